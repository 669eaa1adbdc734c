"""A tuning of a moment that nobody disturbed."""

import pytest
from small_ablations import Stores
from small_tunings import tuned


@pytest.fixture(scope="session")
def stores(tmp_path_factory):
    return Stores(tmp_path_factory)


@pytest.fixture(scope="session")
def whole(stores, tmp_path_factory):
    """A tuning that nobody disturbed: its folder and what it found."""
    out = tmp_path_factory.mktemp("whole") / "out"
    return out, tuned(stores(), out)
