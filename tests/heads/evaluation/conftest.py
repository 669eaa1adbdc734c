"""A small store and two runs on it, and runs as if trained on other stores."""

import pytest
from captioned_store import make_captioned_store
from plain_evaluation import run_on


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


@pytest.fixture
def elsewhere(tmp_path):
    """Copy a run as if trained on a new captioned store: `elsewhere(run, "one", order=range(3))`."""

    def make(run, name, captions=3, **options):
        store = make_captioned_store(tmp_path / f"{name}.zarr", captions=captions, **options)
        return run_on(run, store, tmp_path / name)

    return make
