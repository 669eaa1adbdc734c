"""Extraction from every form of one data set: the features of the folder's store, resumed and refused likewise."""

import os
from dataclasses import replace

import numpy as np
import pytest
from packed_data import SPLITS, PackedData
from small_extraction import SMALL

from xret.pipeline.data.images import open_image
from xret.pipeline.data.manifest import load_manifest
from xret.pipeline.errors import CacheError, ManifestError, SampleError
from xret.pipeline.extraction.extraction import extract
from xret.pipeline.store import FeatureCache
from xret.pipeline.store.inspect import verify

FORMS = ("tars", "webdataset", "parquet", "saved", "saved_splits")


@pytest.fixture
def data(tmp_path):
    return PackedData(tmp_path / "data")


def values_of(path, url, **changes):
    """Extract a data set; return its ids and captions and all features in the order of the store."""
    extract(load_manifest(path), url, replace(SMALL, **changes))
    cache = FeatureCache.open(url)
    images, captions = cache.image_set(), cache.caption_set()
    rows, texts = np.arange(cache.images), np.arange(cache.captions)
    assert verify(str(url)).ok
    return [
        cache.caption_texts(0, cache.captions),
        images.local(rows).tolist(),
        images.array("size", rows).tolist(),
        captions.token(texts).tolist(),
    ]


@pytest.mark.parametrize("form", FORMS)
def test_every_value_is_that_of_the_folder(data, tmp_path, form):
    if form == "saved_splits":
        data.rows.sort(key=lambda row: SPLITS.index(row[3]))
    expected = values_of(data.as_folder(), tmp_path / "folder.zarr")
    path = getattr(data, f"as_{form}")()
    assert values_of(path, tmp_path / "packed.zarr") == expected
    summary = extract(load_manifest(path), tmp_path / "packed.zarr", SMALL)
    assert [one.samples for one in summary.sets] == [0, 0]
    cache, manifest = FeatureCache.open(tmp_path / "packed.zarr"), load_manifest(path)
    pictures = cache.open_pictures(manifest.images, 0, cache.images)
    sizes = cache.image_set().array("size", np.arange(cache.images)).tolist()
    for name, size in zip(cache.file_names(0, cache.images), sizes, strict=True):
        assert list(open_image(pictures.open(name)).size) == size


def test_files_that_were_changed_are_refused(data, tmp_path):
    path = data.as_tars()
    extract(load_manifest(path), tmp_path / "s.zarr", replace(SMALL, splits=("train",)))
    changed = next(load_manifest(path).images.rglob("*.tar"))
    os.utime(changed, (1, 1))
    with pytest.raises(CacheError, match="made of other files"):
        extract(load_manifest(path), tmp_path / "s.zarr", SMALL)


def test_what_is_nothing_leaves_nothing(data, tmp_path):
    path = data.as_tars()
    for file in load_manifest(path).images.rglob("*.tar"):
        file.write_bytes(b"no tar at all")
    with pytest.raises((ManifestError, SampleError)):
        extract(load_manifest(path), tmp_path / "s.zarr", SMALL)
    assert not (tmp_path / "s.zarr").exists()
