"""`verify` finds what was broken: any byte of any file, a missing file, a value that is no number."""

import random
from pathlib import Path

import numpy as np
import pytest

from xret.pipeline.cache import FeatureCache
from xret.pipeline.errors import CacheError
from xret.pipeline.extraction import Options, extract
from xret.pipeline.layout import record_failures
from xret.pipeline.manifest import load_manifest
from xret.pipeline.verify import describe, verify

SMALL = Options(visual="resnet18", visual_weights="random:0", image_size=64, text="words", shard_images=8)


@pytest.fixture
def store(tiny_dataset, tmp_path) -> Path:
    extract(load_manifest(tiny_dataset(train=12, val=3, test=3)), str(tmp_path / "s.zarr"), SMALL)
    return tmp_path / "s.zarr"


def test_a_sound_store(store):
    # train takes two shards of eight images, val and test one each; twice, for images and captions
    assert verify(str(store)) == {"ok": True, "shards": 8, "failed_samples": [], "damaged": []}
    facts = describe(str(store))
    assert facts["splits"] == {"train": 12, "val": 3, "test": 3}
    assert facts["sets"][0]["done"] == {"train": [2, 2], "val": [1, 1], "test": [1, 1]}
    assert facts["bytes"] == sum(p.stat().st_size for p in store.rglob("*") if p.is_file())


def test_a_flipped_byte_in_any_file_is_found(store):
    dice = random.Random(0)
    paths = [path for path in sorted(store.rglob("*")) if path.is_file()]
    assert len(paths) > 60
    for path in paths:
        data = path.read_bytes()
        at = dice.randrange(len(data))
        path.write_bytes(data[:at] + bytes([data[at] ^ (1 << dice.randrange(8))]) + data[at + 1 :])
        report = verify(str(store))
        assert not report["ok"], f"byte {at} of {path}"
        named = [damage["array"] for damage in report["damaged"]]
        parent = str(path.relative_to(store)).split("/c/")[0].removesuffix("/zarr.json")
        assert parent in named or path.name == "zarr.json", (parent, named)
        path.write_bytes(data)
    assert verify(str(store))["ok"]


def test_a_missing_file_is_found_and_names_its_samples(store):
    name = FeatureCache.open(str(store)).image_set().name
    (store / "images" / name / "local" / "c" / "1" / "0" / "0").unlink()
    assert verify(str(store))["damaged"] == [{"array": f"images/{name}/local", "shard": 1, "samples": [8, 12]}]
    words = FeatureCache.open(str(store)).caption_set().name
    (store / "captions" / words / "token" / "c" / "2").unlink()
    first = int(FeatureCache.open(str(store)).caption_start[12])
    last = int(FeatureCache.open(str(store)).caption_start[15])
    damage = {"array": f"captions/{words}/token", "shard": 2, "samples": [first, last]}
    assert damage in verify(str(store))["damaged"]


def test_an_unmarked_shard_is_incomplete_and_not_damaged(store):
    name = FeatureCache.open(str(store)).image_set().name
    (store / "images" / name / "done" / "c" / "0").unlink()
    assert verify(str(store)) == {"ok": True, "shards": 7, "failed_samples": [], "damaged": []}
    assert describe(str(store))["sets"][0]["done"]["train"] == [1, 2]


@pytest.mark.parametrize("value", [np.nan, np.inf])
@pytest.mark.parametrize("array", ["local", "global"])
def test_values_that_are_no_numbers_are_found(store, array, value):
    features = FeatureCache.open(str(store)).image_set()
    opened = features.cache.store.open_array(f"{features.path}/{array}", writable=True)
    row = opened[9:10]
    row[..., 3] = value
    opened[9:10] = row
    damage = {"array": f"{features.path}/{array}", "shard": 1, "samples": [8, 12]}
    assert verify(str(store))["damaged"] == [damage]


def test_a_status_that_contradicts_the_record_is_found(store):
    features = FeatureCache.open(str(store)).image_set()
    features.cache.store.open_array(f"{features.path}/status", writable=True)[2] = 1
    assert [d["array"] for d in verify(str(store))["damaged"]] == [f"{features.path}/status"]
    record_failures(features, {"2": "2.jpg: truncated"})
    report = verify(str(store))
    assert report["ok"]
    assert report["failed_samples"] == [{"id": "2", "reason": "2.jpg: truncated"}]


def test_no_cache(tmp_path):
    with pytest.raises(CacheError, match="no feature cache is there"):
        verify(str(tmp_path / "none.zarr"))
