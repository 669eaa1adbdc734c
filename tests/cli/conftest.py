"""A small store that commands read."""

import pytest
from small_store import make_store


@pytest.fixture(scope="session")
def store(tmp_path_factory):
    return make_store(tmp_path_factory.mktemp("store") / "s.zarr", train=8, val=4, test=4)
