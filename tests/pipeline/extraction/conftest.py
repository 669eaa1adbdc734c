"""The data set that is extracted."""

import pytest

from xret.pipeline.data.manifest import load_manifest


@pytest.fixture
def manifest(tiny_dataset):
    return load_manifest(tiny_dataset())
