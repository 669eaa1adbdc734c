"""The data set whose features are exchanged."""

import pytest
from region_sources import World


@pytest.fixture
def world(tmp_path):
    return World(tmp_path / "w")


@pytest.fixture
def ragged(tmp_path):
    """One whose images have 1 to 5 regions."""
    return World(tmp_path / "w", ragged=True)
