"""Versions and settings of Zarr and Dask: a newer one is told of, a wrong one refused, all others change nothing."""

from importlib.metadata import version

import numpy as np
import pytest
import small_encoder
import zarr
from small_extraction import SMALL, files

from xret.pipeline import versions
from xret.pipeline.data.manifest import load_manifest
from xret.pipeline.errors import CacheError
from xret.pipeline.extraction.extraction import extract
from xret.pipeline.reading.batches import stored_batches
from xret.pipeline.store import FeatureCache
from xret.pipeline.store.upkeep.verify import verify


@pytest.fixture
def images(tiny_dataset, monkeypatch):
    small_encoder.use(monkeypatch)
    return load_manifest(tiny_dataset(train=10, val=2))


@pytest.fixture
def older(monkeypatch):
    """Let the tested versions be older ones, and nothing have been said yet."""
    monkeypatch.setattr(versions, "NEWEST", {"zarr": "3.0", "dask": "2025.12"})
    versions.note_version.cache_clear()
    yield
    versions.note_version.cache_clear()


@pytest.mark.parametrize("package", versions.NEWEST)
def test_what_is_installed_here_is_tested(package, capsys):
    versions.note_version.cache_clear()
    versions.note_version(package)
    assert capsys.readouterr().err == ""


def test_a_newer_version_is_told_of_once(older, images, tmp_path, capsys):
    for name in "ab":
        extract(images, str(tmp_path / name), SMALL)
        FeatureCache.open(str(tmp_path / name))
    said = [line for line in capsys.readouterr().err.splitlines() if line.startswith("Note: ")]
    assert said == [
        f"Note: {package} {version(package)} is installed, and xret has been tested up to {newest}; if something is"
        f" odd, install '{package}=={newest}.*'."
        for package, newest in versions.NEWEST.items()
    ]


def test_a_newer_patch_is_not_told_of(monkeypatch, capsys):
    monkeypatch.setattr(versions, "version", lambda _: f"{versions.NEWEST['zarr']}.99")
    versions.note_version.cache_clear()
    versions.note_version("zarr")
    assert capsys.readouterr().err == ""


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
