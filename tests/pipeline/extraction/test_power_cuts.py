"""The power fails at any moment: what a store says is done is there, and the work goes on to the same bytes."""

import random
import shutil
from dataclasses import replace

import pytest
import small_encoder
from power_cut import recorded
from small_extraction import SMALL, files

from xret.pipeline.data.manifest import load_manifest
from xret.pipeline.extraction.extraction import extract
from xret.pipeline.store import FeatureCache
from xret.pipeline.store.storage.store import Store
from xret.pipeline.store.upkeep.merge import merge
from xret.pipeline.store.upkeep.verify import verify

SOME = [8, pytest.param(250, marks=[pytest.mark.slow, pytest.mark.timeout(1800)])]
OPTIONS = replace(SMALL, shard_images=4)


@pytest.fixture
def work(tiny_dataset, monkeypatch, tmp_path):
    """Extract the small data set into a store of that name, below a folder of its own; and what it holds at the end."""
    small_encoder.use(monkeypatch)
    monkeypatch.setattr(small_encoder.SmallEncoder, "pause", 0)
    manifest = load_manifest(tiny_dataset())

    def run(place, **options):
        place.mkdir(exist_ok=True)
        extract(manifest, str(place / "a.zarr"), replace(OPTIONS, **options))

    run(tmp_path / "whole")
    run.whole = files(tmp_path / "whole")
    return run


def check(there, whole):
    """Check that every shard that is marked is there as it should be."""
    for mark in (name for name in there if "/done/c/" in name and there[name] == whole.get(name)):
        group, shard = mark.split("/done/c/")
        of_shard = [name for name in whole if name.startswith(f"{group}/") and f"/c/{shard}/" in f"{name}/"]
        assert [name for name in of_shard if there.get(name) != whole[name]] == []


def cuts(log, folder, count, seed=0):
    """Give so many folders as they may be after a cut."""
    for number in range(count):
        place = folder / f"cut-{number}"
        log.cut(place, random.Random(f"{seed} {number}"))
        yield place
        shutil.rmtree(place)


@pytest.mark.parametrize("count", SOME)
def test_extraction(work, tmp_path, count):
    (tmp_path / "first").mkdir()
    with recorded(tmp_path / "first") as log:
        work(tmp_path / "first")
    done = set()
    for place in cuts(log, tmp_path, count):
        there = files(place)
        check(there, work.whole)
        done.add(sum("/done/c/" in name for name in there))
        with recorded(place) as resumed:
            work(place)
        assert files(place) == work.whole
        resumed.cut(tmp_path / "again", random.Random(count))
        check(files(tmp_path / "again"), work.whole)
        work(tmp_path / "again")
        assert files(tmp_path / "again") == work.whole
        shutil.rmtree(tmp_path / "again")
    assert len(done) > 2
    log.all_synced(tmp_path / "end")
    assert files(tmp_path / "end") == work.whole


@pytest.mark.parametrize("count", SOME)
def test_repair(work, tmp_path, count):
    place = tmp_path / "damaged"
    work(place)
    store = Store(str(place / "a.zarr"))
    for path in FeatureCache.open(store.url).set_paths():
        features = FeatureCache.open(store.url).set_at(path)
        name = "local" if features.channels else "token"
        store.write_shard(f"{path}/{name}", 1, features.blank_shard()[name])
    with recorded(place) as log:
        work(place, repair=True)
    for cut in cuts(log, tmp_path, count):
        work(cut, repair=True)
        assert files(cut) == work.whole


@pytest.mark.parametrize("count", SOME)
def test_merge(work, tmp_path, count):
    for split in ("train", "val", "test"):
        work(tmp_path / split, splits=(split,))
    parts = [str(tmp_path / split / "a.zarr") for split in ("train", "val", "test")]
    merge(str(tmp_path / "merged.zarr"), parts)
    whole = files(tmp_path / "merged.zarr")
    (tmp_path / "first").mkdir()
    with recorded(tmp_path / "first") as log:
        merge(str(tmp_path / "first" / "a.zarr"), parts)
    for place in cuts(log, tmp_path, count):
        merge(str(place / "a.zarr"), parts)
        assert files(place / "a.zarr") == whole


def test_a_set_that_is_removed_is_there_as_it_was_or_not_at_all(work, tmp_path):
    place = tmp_path / "first"
    work(place)
    (path,) = FeatureCache.open(str(place / "a.zarr")).set_paths("images")
    with recorded(place) as log:
        Store(str(place / "a.zarr")).remove(path)
    left = set()
    for cut in cuts(log, tmp_path, 12):
        paths = FeatureCache.open(str(cut / "a.zarr")).set_paths("images")
        assert verify(str(cut / "a.zarr")).ok
        left.add(len(paths))
        assert paths == [] or files(cut) == work.whole
    assert left == {0, 1}
