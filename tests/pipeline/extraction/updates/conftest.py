"""A small store of pictures that change, and a count of what is encoded."""

import pytest
from changing_data import OPTIONS, pictures, use, write

from xret.pipeline.extraction.extraction import extract


@pytest.fixture
def encoded(monkeypatch):
    return use(monkeypatch)


@pytest.fixture
def store(encoded, tmp_path):
    url = str(tmp_path / "s.zarr")
    extract(write(tmp_path / "data", pictures()), url, OPTIONS)
    for counts in encoded:
        counts.clear()
    return url
