"""A small store, and a training on it that nothing stopped."""

import pytest
from small_store import make_store
from small_trainings import recipe_of

from xret.heads.training.train import train


@pytest.fixture(scope="module")
def store(tmp_path_factory):
    return make_store(tmp_path_factory.mktemp("store") / "small.zarr")


@pytest.fixture(scope="module")
def uninterrupted(store, tmp_path_factory):
    run = tmp_path_factory.mktemp("runs") / "whole"
    train(store, recipe_of(), run, device="cpu", seed=3)
    return run
