"""A small store and two runs on it."""

import pytest
from plain_evaluation import recipe_of
from small_store import make_store

from xret.heads.training.train import train


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("evaluation")


@pytest.fixture(scope="module")
def store(folder):
    return make_store(folder / "small.zarr")


@pytest.fixture(scope="module")
def setdiv(store, folder):
    train(store, recipe_of("setdiv"), folder / "setdiv", device="cpu")
    return folder / "setdiv"


@pytest.fixture(scope="module")
def vsepp(store, folder):
    train(store, recipe_of("vsepp"), folder / "vsepp", device="cpu")
    return folder / "vsepp"
