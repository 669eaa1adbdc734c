"""The data set that is extracted, and a store of it."""

import pytest
from small_extraction import SMALL

from xret.pipeline.data.manifest import load_manifest
from xret.pipeline.extraction.extraction import extract


@pytest.fixture
def manifest(tiny_dataset):
    return load_manifest(tiny_dataset())


@pytest.fixture
def store(manifest, tmp_path):
    extract(manifest, tmp_path / "s.zarr", SMALL)
    return str(tmp_path / "s.zarr")
