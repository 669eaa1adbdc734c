"""A small store and two runs on it."""

import pytest


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("evaluation")


@pytest.fixture(scope="module")
def store(vsepp):
    return str(vsepp.with_name("small.zarr"))


@pytest.fixture(scope="module")
def setdiv(trained):
    return trained("setdiv")


@pytest.fixture(scope="module")
def vsepp(trained):
    return trained()
