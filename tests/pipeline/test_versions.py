"""Settings of Zarr change no byte."""

import numpy as np
import pytest
import small_encoder
import zarr
from small_extraction import SMALL, files

from xret.pipeline.data.manifest import load_manifest
from xret.pipeline.extraction.extraction import extract
from xret.pipeline.reading.batches import stored_batches
from xret.pipeline.store import FeatureCache
from xret.pipeline.store.inspect import verify


@pytest.fixture
def images(tiny_dataset, monkeypatch):
    small_encoder.use(monkeypatch)
    return load_manifest(tiny_dataset(train=10, val=2))


@pytest.mark.parametrize(
    "settings",
    [
        {"default_zarr_format": 2},
        {"array.order": "F"},
        {"array.write_empty_chunks": False},
        {"array.write_empty_chunks": True},
        {"async.concurrency": 1, "codec_pipeline.batch_size": 7, "array.target_shard_size_bytes": 1000},
    ],
    ids=str,
)
def test_other_settings_change_no_byte(images, tmp_path, settings):
    whole, url = tmp_path / "whole.zarr", tmp_path / "s.zarr"
    extract(images, str(whole), SMALL)
    with zarr.config.set(settings):
        extract(images, str(url), SMALL)
        assert files(url) == files(whole)
        assert verify(str(url)).ok
        read = rows_of(url)
    assert all(np.array_equal(one, other) for one, other in zip(read, rows_of(whole), strict=True))


def rows_of(url):
    cache = FeatureCache.open(str(url))
    fields = {"image_fields": {"local", "global"}, "caption_fields": {"token"}}
    batches = stored_batches(cache.image_set(), cache.caption_set(), "train", **fields)
    epoch = list(batches.epoch(unit="image", batch_size=5, seed=0, epoch=0))
    return [part for batch in epoch for part in (batch.images.local, batch.images.global_, batch.captions.token)]
