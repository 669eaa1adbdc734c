"""Extraction on a Dask cluster: the same tasks, the same bytes, whatever dies."""

import os
import signal
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest
from distributed import Client, LocalCluster
from small_extraction import SMALL, files

from xret.pipeline.cache.feature_cache import FeatureCache
from xret.pipeline.data.manifest import load_manifest
from xret.pipeline.errors import CacheError, SampleError
from xret.pipeline.extraction import schedule as engine
from xret.pipeline.extraction.extraction import Options, extract

# Dask's own threads and sockets outlive a closed cluster for a moment, and its nannies fork.
pytestmark = [
    pytest.mark.filterwarnings("ignore::ResourceWarning"),
    pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning"),
    pytest.mark.filterwarnings("ignore:.*:DeprecationWarning:distributed"),
]


@pytest.fixture
def cluster():
    with LocalCluster(n_workers=1, threads_per_worker=2, processes=False, dashboard_address=":0") as cluster:
        yield cluster


def on(address, **changes):
    return Options(**{**vars(SMALL), "scheduler": address, **changes})


def test_a_cluster_writes_the_same_bytes(cluster, tiny_dataset, tmp_path, capsys, monkeypatch):
    manifest = load_manifest(tiny_dataset())
    here, there = str(tmp_path / "here.zarr"), str(tmp_path / "there.zarr")
    extract(manifest, here, SMALL)
    monkeypatch.chdir(tmp_path)
    summary = extract(manifest, "there.zarr", on(cluster.scheduler_address))
    assert [s.samples for s in summary.sets] == [32, 80]
    assert files(there) == files(here)
    assert "Dask dashboard: http://" in capsys.readouterr().err
    again = extract(manifest, there, on(cluster.scheduler_address))
    assert [s.samples for s in again.sets] == [0, 0]


def test_a_broken_image_is_the_same_sentence(cluster, tiny_dataset, tmp_path):
    manifest, url = load_manifest(tiny_dataset()), str(tmp_path / "s.zarr")
    (manifest.images / "4.jpg").write_bytes(b"")
    with pytest.raises(SampleError, match=r"4\.jpg"):
        extract(manifest, url, on(cluster.scheduler_address))
    summary = extract(manifest, url, on(cluster.scheduler_address, on_error="skip"))
    assert summary.sets[0].failed == 1
    assert set(FeatureCache.open(url).image_set().failed) == {"4"}


def test_only_workers_with_a_gpu_get_tasks_where_some_declare_one(cluster, tiny_dataset, tmp_path):
    url = str(tmp_path / "s.zarr")
    cluster.scale(0)
    with LocalCluster(
        n_workers=1, threads_per_worker=1, processes=False, dashboard_address=":0", resources={"GPU": 1}
    ) as gpu:
        summary = extract(load_manifest(tiny_dataset()), url, on(gpu.scheduler_address))
    assert summary.sets[0].samples == 32


def test_no_scheduler_and_no_worker(tiny_dataset, tmp_path, monkeypatch):
    monkeypatch.setattr(engine, "PATIENCE", 1.0)
    manifest, url = load_manifest(tiny_dataset()), str(tmp_path / "s.zarr")
    with pytest.raises(CacheError, match=r"no Dask scheduler answers at tcp://127\.0\.0\.1:9;.*correct --scheduler"):
        extract(manifest, url, on("tcp://127.0.0.1:9"))
    with (
        LocalCluster(n_workers=0, processes=False, dashboard_address=":0") as empty,
        pytest.raises(CacheError, match="has no worker; start some with"),
    ):
        extract(manifest, url, on(empty.scheduler_address))


@pytest.fixture
def web_server():
    with ThreadingHTTPServer(("127.0.0.1", 0), BaseHTTPRequestHandler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"tcp://127.0.0.1:{server.server_port}"
        server.shutdown()


def test_no_client_is_made_where_no_scheduler_is(web_server, tiny_dataset, tmp_path, monkeypatch):
    """A client waits for ever for a web server's handshake, or prints a traceback when it is collected."""
    monkeypatch.setattr(engine, "PATIENCE", 0.5)
    monkeypatch.setattr("distributed.Client", lambda *_, **__: pytest.fail("a client was made"))
    manifest = load_manifest(tiny_dataset())
    for address in (web_server, "tcp://127.0.0.1:9", "nonsense"):
        with pytest.raises(CacheError, match=f"no Dask scheduler answers at {address};"):
            extract(manifest, str(tmp_path / "s.zarr"), on(address))


@pytest.mark.slow
@pytest.mark.timeout(240)
def test_a_worker_killed_in_mid_shard_loses_nothing(tiny_dataset, tmp_path):
    manifest = load_manifest(tiny_dataset(train=160, val=8, test=8))
    whole, url = str(tmp_path / "whole.zarr"), str(tmp_path / "s.zarr")
    extract(manifest, whole, SMALL)
    with LocalCluster(n_workers=2, threads_per_worker=1, dashboard_address=":0") as cluster:
        with Client(cluster) as client:
            victim = next(iter(client.run(os.getpid).values()))

        def kill():
            marks = tmp_path / "s.zarr" / "images"
            while not list(marks.glob("*/done/c/*")):
                time.sleep(0.01)
            os.kill(victim, signal.SIGKILL)

        killer = threading.Thread(target=kill, daemon=True)
        killer.start()
        summary = extract(manifest, url, on(cluster.scheduler_address))
        killer.join()
    assert summary.sets[0].shards == 22
    assert files(url) == files(whole)
