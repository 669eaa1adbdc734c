"""Settings of Zarr: a wrong one is refused, all others change nothing."""

import numpy as np
import pytest
import small_encoder
import zarr
from small_extraction import SMALL, files

from xret.pipeline.data.manifest import load_manifest
from xret.pipeline.errors import CacheError
from xret.pipeline.extraction.extraction import extract
from xret.pipeline.reading.batches import stored_batches
from xret.pipeline.store import FeatureCache
from xret.pipeline.store.inspect import verify


@pytest.fixture
def images(tiny_dataset, monkeypatch):
    small_encoder.use(monkeypatch)
    return load_manifest(tiny_dataset(train=10, val=2))


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("codec_pipeline.path", "zarr.core.codec_pipeline.FusedCodecPipeline"),
        ("codec_pipeline.path", "zarrs.ZarrsCodecPipeline"),
        ("buffer", "zarr.buffer.gpu.Buffer"),
    ],
)
def test_settings_that_give_something_else_are_refused(images, tmp_path, key, value):
    url, sentence = (
        str(tmp_path / "s.zarr"),
        rf"^Zarr's setting {key} is {value}, .*; do without it, or call zarr\.config",
    )
    with zarr.config.set({key: value}), pytest.raises(CacheError, match=sentence):
        extract(images, url, SMALL)
    assert not (tmp_path / "s.zarr").exists()
    extract(images, url, SMALL)
    features = FeatureCache.open(url).image_set()
    with zarr.config.set({key: value}), pytest.raises(CacheError, match=sentence):
        features.done()


@pytest.mark.parametrize(
    "settings",
    [
        {"default_zarr_format": 2},
        {"json_indent": None},
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
