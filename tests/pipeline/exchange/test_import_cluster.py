"""Imports run the tasks of an extraction: with any number of threads, on a cluster, and after any stop."""

from pathlib import Path

import pytest
from distributed import LocalCluster
from region_sources import ARRAYS, World
from small_extraction import files

from xret.pipeline.data.manifest import load_manifest
from xret.pipeline.errors import CacheError, SampleError
from xret.pipeline.exchange.importers.importing import ImportOptions, import_features
from xret.pipeline.exchange.importers.source import SourceError
from xret.pipeline.exchange.importers.tasks import ImportJob, write_imported_shard
from xret.pipeline.store import FeatureCache

TESTS = Path(__file__).parents[2]

# Dask's own threads and sockets outlive a closed cluster for a moment, and its nannies fork.
pytestmark = [
    pytest.mark.filterwarnings("ignore::ResourceWarning"),
    pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning"),
    pytest.mark.filterwarnings("ignore:.*:DeprecationWarning:distributed"),
]


def bring(world, url, format_, source, **options):
    arrays = ARRAYS if format_ == "hdf5" else {}
    return import_features(load_manifest(world.manifest), str(url), ImportOptions(format_, source, arrays, **options))


@pytest.fixture
def cluster():
    """Two workers, each a process of its own: what they are told has travelled."""
    with LocalCluster(n_workers=2, threads_per_worker=2, dashboard_address=":0") as cluster:
        yield cluster.scheduler_address


@pytest.mark.parametrize("format_", ["scan", "butd-tsv", "lxmert-tsv", "detectron-npz", "hdf5"])
def test_any_number_of_threads_writes_the_same_bytes(tmp_path, format_):
    world = World(tmp_path / "w", ragged=format_ != "scan")
    makers = {"scan": world.scan, "detectron-npz": world.npz, "hdf5": world.hdf5}
    source = makers.get(format_, lambda: world.tsv(lxmert=format_ == "lxmert-tsv"))()
    for workers in (1, 4):
        bring(world, tmp_path / f"{workers}.zarr", format_, source, workers=workers)
    assert files(tmp_path / "1.zarr") == files(tmp_path / "4.zarr")


def test_a_cluster_writes_the_same_bytes(cluster, tmp_path, monkeypatch):
    world = World(tmp_path / "w", ragged=True)
    monkeypatch.chdir(tmp_path)  # the workers have another folder
    for format_, source in (("butd-tsv", world.tsv()), ("hdf5", world.hdf5()), ("detectron-npz", world.npz())):
        source = source.relative_to(tmp_path)
        bring(world, "here.zarr", format_, source)
        summary = bring(world, "there.zarr", format_, source, scheduler=cluster)
        assert (summary.sets[0].samples, summary.sets[0].shards) == (32, 5)
        assert bring(world, "there.zarr", format_, source, scheduler=cluster).sets[0].shards_before == 5
    assert files(tmp_path / "there.zarr") == files(tmp_path / "here.zarr")
    broken = world.tsv()  # in the place of one that the workers have looked through
    line = world.line(world.images[0])
    broken.write_bytes(broken.read_bytes().replace(line, line[:-3] + b"!\n", 1))
    with pytest.raises(SampleError, match="the base64 of its 'features' is damaged"):
        bring(world, "there.zarr", "butd-tsv", broken, scheduler=cluster)
    skipped = bring(world, "there.zarr", "butd-tsv", broken, scheduler=cluster, on_error="skip")
    assert skipped.sets[0].failed == 1
    with pytest.raises(CacheError, match="no Dask scheduler answers"):
        bring(world, "other.zarr", "butd-tsv", world.tsv(), scheduler="tcp://127.0.0.1:9")


def test_a_worker_with_other_files_under_the_same_name_is_refused(tmp_path):
    world, url = World(tmp_path / "w"), str(tmp_path / "s.zarr")
    bring(world, url, "butd-tsv", world.tsv())
    features = FeatureCache.open(url).image_set()
    before = files(url)
    options = ImportOptions("butd-tsv", world.tsv("other.tsv"))
    other = ImportJob(options, "world", url, features.name, tuple(range(8)))
    with pytest.raises(SourceError, match=r"other\.tsv is not what 'butd-tsv@\w+' was begun with; give every worker"):
        write_imported_shard(other, 0)
    assert files(url) == before
