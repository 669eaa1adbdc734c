"""`verify` finds what was broken: any byte of any file, a missing file, a value that is no number."""

import itertools
import os
import random
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import small_encoder
from small_extraction import SMALL, files
from small_store import seal_anew

from xret.pipeline.cache.feature_cache import FeatureCache
from xret.pipeline.cache.records import record_failures
from xret.pipeline.cache.upkeep.contents import describe
from xret.pipeline.cache.upkeep.verify import Damage, FailedSample, Verification, verify
from xret.pipeline.data.manifest import load_manifest
from xret.pipeline.errors import CacheError
from xret.pipeline.extraction.extraction import extract


@pytest.fixture
def store(tiny_dataset, tmp_path, monkeypatch) -> Path:
    small_encoder.use(monkeypatch)
    extract(load_manifest(tiny_dataset(train=12, val=3, test=3)), str(tmp_path / "s.zarr"), SMALL)
    return tmp_path / "s.zarr"


def test_a_sound_store(store):
    # train takes two shards of eight images, val and test one each; twice, for images and captions
    assert verify(str(store)) == Verification(8, (), ())
    facts = describe(str(store))
    assert facts.splits == {"train": 12, "val": 3, "test": 3}
    assert facts.sets[0].done == {"train": (2, 2), "val": (1, 1), "test": (1, 1)}
    assert facts.bytes == sum(p.stat().st_size for p in store.rglob("*") if p.is_file())


def test_a_flipped_byte_in_any_file_is_found(store):
    dice = random.Random(0)
    paths = [path for path in sorted(store.rglob("*")) if path.is_file()]
    assert len(paths) > 60
    for path in paths:
        data = path.read_bytes()
        at = dice.randrange(len(data))
        path.write_bytes(data[:at] + bytes([data[at] ^ (1 << dice.randrange(8))]) + data[at + 1 :])
        report = verify(str(store))
        assert not report.ok, f"byte {at} of {path}"
        named = [damage.array for damage in report.damaged]
        parent = str(path.relative_to(store)).split("/c/")[0].removesuffix("/zarr.json")
        assert parent in named or path.name == "zarr.json", (parent, named)
        path.write_bytes(data)
    assert verify(str(store)).ok


def test_no_byte_of_a_sets_metadata_can_be_flipped_unnoticed_nor_costs_the_set(store, tiny_dataset):
    manifest = load_manifest(store.parent / "tiny" / "tiny.yaml")
    path = next((store / "captions").glob("*/zarr.json"))
    data = path.read_bytes()
    for at in range(0, len(data), 41):
        path.write_bytes(data[:at] + bytes([data[at] ^ 1]) + data[at + 1 :])
        assert not verify(str(store)).ok, at
        if at % 246 == 0:
            with pytest.raises(CacheError, match="damaged"):
                extract(manifest, str(store), SMALL)
    path.unlink()
    with pytest.raises(CacheError, match="damaged or missing"):
        extract(manifest, str(store), SMALL)
    path.write_bytes(data)
    assert verify(str(store)).ok


def test_repair_computes_again_what_is_damaged_or_failed(store):
    manifest = load_manifest(store.parent / "tiny" / "tiny.yaml")
    before = files(store)
    name = FeatureCache.open(str(store)).image_set().name
    for file in ("local/c/1/0/0", "status/c/0", "done/c/2"):
        path = store / "images" / name / file
        data = bytearray(path.read_bytes())
        data[0] ^= 4
        path.write_bytes(data)
    with pytest.raises(CacheError, match="damaged"):
        extract(manifest, str(store), SMALL)
    extract(manifest, str(store), replace(SMALL, repair=True))
    assert files(store) == before


def test_a_missing_file_is_found_and_names_its_samples(store):
    name = FeatureCache.open(str(store)).image_set().name
    (store / "images" / name / "local" / "c" / "1" / "0" / "0").unlink()
    assert verify(str(store)).damaged == (Damage(f"images/{name}/local", 1, (8, 12)),)
    words = FeatureCache.open(str(store)).caption_set().name
    (store / "captions" / words / "token" / "c" / "2").unlink()
    first = int(FeatureCache.open(str(store)).caption_start[12])
    last = int(FeatureCache.open(str(store)).caption_start[15])
    damage = Damage(f"captions/{words}/token", 2, (first, last))
    assert damage in verify(str(store)).damaged


def test_an_unmarked_shard_is_incomplete_and_not_damaged(store):
    name = FeatureCache.open(str(store)).image_set().name
    (store / "images" / name / "done" / "c" / "0").unlink()
    assert verify(str(store)) == Verification(7, (), ())
    assert describe(str(store)).sets[0].done["train"] == (1, 2)


@pytest.mark.parametrize("value", [np.nan, np.inf])
@pytest.mark.parametrize("array", ["local", "global"])
def test_values_that_are_no_numbers_are_found(store, array, value):
    features = FeatureCache.open(str(store)).image_set()
    opened = features.cache.store.open_array(f"{features.path}/{array}", writable=True)
    row = opened[9:10]
    row[..., 3] = value
    opened[9:10] = row
    damage = Damage(f"{features.path}/{array}", 1, (8, 12))
    assert verify(str(store)).damaged == (damage,)


def test_a_status_that_contradicts_the_record_is_found(store):
    features = FeatureCache.open(str(store)).image_set()
    features.cache.store.open_array(f"{features.path}/status", writable=True)[2] = 1
    seal_anew(features)
    assert [d.array for d in verify(str(store)).damaged] == [f"{features.path}/status"]
    record_failures(features, [], {"2": "2.jpg: truncated"})
    report = verify(str(store))
    assert report.ok
    assert report.failed_samples == (FailedSample("2", "2.jpg: truncated"),)


def test_no_cache(tmp_path):
    with pytest.raises(CacheError, match="no feature cache is there"):
        verify(str(tmp_path / "none.zarr"))


def read_all(url):
    """Return everything that a reader can ask of a store."""
    cache = FeatureCache.open(str(url))
    images, captions = cache.image_set(), cache.caption_set()
    pictures, texts = np.arange(cache.images), np.arange(cache.captions)
    arrays = [images.local(pictures), images.global_(pictures), images.array("size", pictures), images.length]
    arrays += [images.status, captions.token(texts), captions.length, captions.status, cache.caption_image]
    arrays += [cache.sample_array("cocoid"), cache.sentids(0, cache.captions), cache.caption_count]
    said = [cache.ids(0, cache.images), cache.file_names(0, cache.images), cache.caption_texts(0, cache.captions)]
    return [array.tolist() for array in arrays] + said


def is_noticed(url, whole):
    """Return whether `verify` finds a fault; what readers say is right, or refused."""
    try:
        assert read_all(url) == whole
    except CacheError as error:
        assert "is not what was written there" in str(error) or "damaged" in str(error) or "missing" in str(error)
    return not verify(str(url)).ok


@pytest.mark.parametrize("most", [20, pytest.param(10_000, marks=pytest.mark.slow)])
def test_a_file_that_lies_in_anothers_place_is_found(store, most):
    whole = read_all(store)
    by_size = {}
    for path in sorted(store.rglob("c/**/*")):
        if path.is_file() and "done" not in path.parts and "split" not in path.parts:
            by_size.setdefault(path.stat().st_size, []).append((path, path.read_bytes()))
    pairs = [
        pair for alike in by_size.values() for pair in itertools.combinations(alike, 2) if pair[0][1] != pair[1][1]
    ]
    assert len(pairs) > 60
    random.Random(0).shuffle(pairs)
    for (one, first), (two, second) in pairs[:most]:
        one.write_bytes(second)
        assert is_noticed(store, whole), f"{one} holds what belongs to {two}"
        two.write_bytes(first)
        assert is_noticed(store, whole), f"{one} and {two} have changed places"
        one.write_bytes(first), two.write_bytes(second)
    assert verify(str(store)).ok


@pytest.mark.parametrize("every", [False, pytest.param(True, marks=pytest.mark.slow)])
@pytest.mark.parametrize("fault", ["empty", "folder"])
def test_a_file_that_is_none_is_found_and_repaired(store, fault, every):
    manifest, before, whole = load_manifest(store.parent / "tiny" / "tiny.yaml"), files(store), read_all(store)
    paths = [path for path in sorted(store.rglob("c/**/*")) if path.is_file()]
    assert len(paths) > 60
    if not every:  # a shard of each array
        dice = random.Random(0)
        by_array = itertools.groupby(paths, lambda path: str(path).partition("/c/")[0])
        paths = [dice.choice(list(shards)) for _, shards in by_array]
        assert len(paths) > 20
    for path in paths:
        data = path.read_bytes()
        path.unlink()
        path.mkdir() if fault == "folder" else path.write_bytes(b"")
        assert is_noticed(store, whole), path
        if path.parts[-3] == "local" or "token" in path.parts or "cocoid" in path.parts:
            extract(manifest, str(store), replace(SMALL, repair=True))
            assert files(store) == before
        else:
            path.rmdir() if fault == "folder" else path.unlink()
            path.write_bytes(data)
    assert verify(str(store)).ok


@pytest.mark.skipif(os.geteuid() == 0, reason="the superuser may read every file")
def test_a_file_that_may_not_be_read_is_neither_damaged_nor_missing(store):
    for part in ("local/c/1/0/0", "length/c/0", "zarr.json"):
        path = store / FeatureCache.open(str(store)).image_set().path / part
        mode = path.stat().st_mode
        path.chmod(0)
        for work in (verify, read_all):
            with pytest.raises(CacheError, match=f"{path} may not be read by you"):
                work(str(store))
        path.chmod(mode)
