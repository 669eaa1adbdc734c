"""Small stores that several folders' tests use."""

import pytest
from small_ablations import Stores


@pytest.fixture(scope="session")
def stores(tmp_path_factory):
    return Stores(tmp_path_factory)
