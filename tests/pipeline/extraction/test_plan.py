"""A plan is near what the extraction then takes, and writes nothing."""

from dataclasses import replace

import pytest
from distributed import LocalCluster
from small_ablations import DASK
from small_extraction import SMALL

from xret.pipeline import workers
from xret.pipeline.data.manifest import load_manifest
from xret.pipeline.errors import CacheError, ManifestError
from xret.pipeline.extraction.extraction import extract
from xret.pipeline.extraction.options import build_options
from xret.pipeline.extraction.plan import plan
from xret.pipeline.store import FeatureCache

pytestmark = DASK


SLOW = build_options(visual="own_encoder:Slow", text="own_encoder:SlowLetters", batch_size=16)
QUICK = build_options(visual="own_encoder:Quarters", text="own_encoder:Letters", batch_size=16)


@pytest.fixture
def many(tiny_dataset):
    return load_manifest(tiny_dataset(train=100, val=30, test=30))


def test_a_plan_foresees_the_time_and_the_bytes_and_writes_nothing(many, tmp_path):
    url = tmp_path / "s.zarr"
    foreseen = plan(many, url, SLOW, price=3.0)
    assert not url.exists()
    images, captions = foreseen.sides
    done = extract(many, url, SLOW)
    assert (images.samples, captions.samples) == (done.images, done.captions) == (160, 400)
    assert images.tasks == 10
    for side, alone in ((images, 160 * 0.03), (captions, 400 * 0.003)):  # two threads encode at once, or more
        assert alone / 8 < side.seconds < 4 * alone
    cache = FeatureCache.open(url)
    for side, features in ((images, cache.image_set()), (captions, cache.caption_set())):
        sizes = [path.stat().st_size for path in (url / features.path).rglob("c.*")]
        assert side.bytes == pytest.approx(sum(sizes), rel=0.2)
    assert foreseen.cost == pytest.approx(3 * foreseen.hours) == 3 * (images.seconds + captions.seconds) / 3600
    assert "160 images" in str(foreseen) and foreseen.to_json()["hours"] == foreseen.hours


def test_what_is_done_is_not_planned_again(many, tmp_path):
    extract(many, tmp_path / "s.zarr", replace(QUICK, splits=("train",)))
    images, captions = plan(many, tmp_path / "s.zarr", QUICK).sides
    assert images.samples == 60 and 120 < captions.samples <= 150  # whole chunks of captions are done
    extract(many, tmp_path / "s.zarr", QUICK)
    nothing = plan(many, tmp_path / "s.zarr", QUICK)
    assert (nothing.bytes, nothing.tasks, nothing.hours, nothing.cost) == (0, 0, 0, None)
    assert nothing.measured == 0 and "nothing is left to encode" in str(nothing)


def test_a_worker_measures_for_all(many, tmp_path):
    with LocalCluster(n_workers=2, threads_per_worker=2, processes=False, dashboard_address=":0") as cluster:
        foreseen = plan(many, tmp_path / "s.zarr", replace(QUICK, workers=cluster.scheduler_address), price=1)
    assert foreseen.workers == 2 and not (tmp_path / "s.zarr").exists()
    assert foreseen.hours * 2 == pytest.approx(foreseen.cost)


def test_one_picture_is_enough_and_a_missing_one_refused(tiny_dataset, tmp_path, monkeypatch):
    monkeypatch.setattr(workers, "PATIENCE", 0.1)
    alone = load_manifest(tiny_dataset(train=1))
    assert [side.samples for side in plan(alone, tmp_path / "s.zarr", SMALL).sides] == [1, 2]
    (alone.images / "0.jpg").unlink()
    with pytest.raises(ManifestError, match=r"0\.jpg"):
        plan(alone, tmp_path / "s.zarr", SMALL)
    with pytest.raises(CacheError, match="no Dask scheduler"):
        plan(alone, tmp_path / "s.zarr", replace(SMALL, workers="tcp://127.0.0.1:9"))
