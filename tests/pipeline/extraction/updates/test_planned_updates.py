"""A plan of an update, and an update on a cluster, against the update on this machine."""

import shutil
from dataclasses import replace
from pathlib import Path

import pytest
from changing_data import OPTIONS, Picture, pictures, write
from distributed import LocalCluster
from small_extraction import files

from xret.pipeline.cache.feature_cache import FeatureCache
from xret.pipeline.cache.storage.store import Store
from xret.pipeline.extraction.extraction import extract
from xret.pipeline.extraction.plan import plan

UPDATE = replace(OPTIONS, update=True)
# A picture of other bytes, another caption, one picture less, and one more between others.
DATA = [
    replace(pictures()[0], content=99),
    replace(pictures()[1], captions=("another", "one")),
    *pictures()[3:6],
    Picture("new.png", 50, "train", ("a new one", "and another")),
    *pictures()[6:],
]


def foreseen(manifest, url, options):
    """Return of each set its name, tasks, how many are done, samples that are found, and those that are computed."""
    before = files(url)
    sets = plan(manifest, url, options).sets
    assert files(url) == before
    left = [one.hours * one.per_second * 3600 for one in sets]
    assert left == pytest.approx(list(map(round, left)))
    return [(one.name, one.tasks, one.done, one.found, round(rest)) for one, rest in zip(sets, left, strict=True)]


def made(summary):
    return [
        (one.name, one.shards + one.shards_before, one.shards_before, one.found, one.samples) for one in summary.sets
    ]


def test_a_plan_counts_what_an_update_then_computes(store, tmp_path):
    manifest = write(tmp_path / "data", DATA)
    announced = foreseen(manifest, store, UPDATE)
    assert [one[2:] for one in announced] == [(0, 18, 2), (0, 27, 4)]
    assert announced == made(extract(manifest, store, UPDATE))
    assert foreseen(manifest, store, UPDATE) == [(*one[:2], one[1], 0, 0) for one in announced]


def test_a_plan_goes_on_where_an_update_was_stopped(store, tmp_path, monkeypatch):
    manifest, write_shard, left = write(tmp_path / "data", DATA), Store.write_shard, [12]

    def dying(*arguments):
        left[0] -= 1
        if left[0] < 0:
            raise KeyboardInterrupt
        write_shard(*arguments)

    with monkeypatch.context() as patch:
        patch.setattr(Store, "write_shard", dying)
        with pytest.raises(KeyboardInterrupt):
            extract(manifest, store, UPDATE)
    announced = foreseen(manifest, store, UPDATE)
    assert 0 < announced[0][2] < announced[0][1]
    assert announced == made(extract(manifest, store, UPDATE))


def test_a_plan_of_a_set_that_was_left_out_finds_it_in_the_generation_before(store, tmp_path):
    manifest = write(tmp_path / "data", DATA)
    extract(manifest, store, replace(UPDATE, visual=None))
    announced = foreseen(manifest, store, OPTIONS)
    assert [one[2:] for one in announced] == [(0, 18, 2), (announced[1][1], 0, 0)]
    assert announced == made(extract(manifest, store, OPTIONS))


def test_a_plan_for_so_many_images_finds_nothing(store, tmp_path):
    (images, _) = plan(write(tmp_path / "data", DATA), store, UPDATE, images=100).sets
    assert (images.samples, images.done, images.found) == (100, 0, 0)


@pytest.mark.filterwarnings("ignore::ResourceWarning", "ignore:.*:DeprecationWarning:distributed")
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_a_cluster_updates_to_the_same_bytes(store, encoded, tmp_path):
    there = str(shutil.copytree(store, tmp_path / "there.zarr"))
    manifest = write(tmp_path / "data", DATA)
    here = extract(manifest, store, UPDATE)
    for counts in encoded:
        counts.clear()
    with LocalCluster(n_workers=1, threads_per_worker=2, processes=False, dashboard_address=":0") as cluster:
        summary = extract(manifest, there, replace(UPDATE, scheduler=cluster.scheduler_address))
    assert made(summary) == made(here)
    assert [sum(counts) for counts in encoded] == [2, 4]
    assert files(there) == files(store)
    path = f"{FeatureCache.open(there).image_set().path}/local/c"
    assert Path(there, path, "4/0/0").samefile(Path(there, "generations/2", path, "4/0/0"))
