"""Extraction on a Dask cluster: the same tasks, the same bytes, whatever dies."""

import os
import re
import signal
import threading
import time
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
import small_encoder
from distributed import Client, LocalCluster
from small_extraction import SMALL, files

from xret.pipeline.data.manifest import load_manifest
from xret.pipeline.errors import CacheError, SampleError
from xret.pipeline.extraction import schedule as engine
from xret.pipeline.extraction.extraction import Options, extract
from xret.pipeline.store import FeatureCache

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


# --- A cluster that stalls


@pytest.fixture
def manifest(tiny_dataset, monkeypatch):
    small_encoder.use(monkeypatch)
    monkeypatch.setattr(engine, "SILENCE", 0.5)
    monkeypatch.setattr(engine, "FIRST_SILENCE", 1.0)
    return load_manifest(tiny_dataset())


@pytest.fixture
def stuck(monkeypatch):
    """Let the picture that is named be waited for, each time or the first time only; the test's end is the wait's."""
    released = threading.Event()

    def stick(name, times):
        left, real = [None] * times, small_encoder.SmallEncoder.decode

        def decode(self, path):
            if Path(path.name).name == name and left:
                left.pop()
                released.wait(60)
            return real(self, path)

        monkeypatch.setattr(small_encoder.SmallEncoder, "decode", decode)

    yield stick
    released.set()


@pytest.mark.parametrize("name", ["0.jpg", "31.jpg"], ids=["at the beginning", "at the end"])
def test_a_task_that_waits_for_ever_is_tried_again(cluster, manifest, tmp_path, stuck, capsys, name):
    whole, url = tmp_path / "whole.zarr", tmp_path / "s.zarr"
    extract(manifest, str(whole), SMALL)
    stuck(name, 1)
    summary = extract(manifest, str(url), on(cluster.scheduler_address))
    assert summary.sets[0].samples == 32
    assert files(url) == files(whole)
    notes = [line for line in capsys.readouterr().err.splitlines() if line.startswith("Note: no shard was finished")]
    shard = 0 if name == "0.jpg" else 4
    assert re.search(rf"for \d\.\d seconds; tried again: small@\w+-shard-{shard} on inproc://", notes[0])


def test_a_cluster_that_stalls_for_good_ends_in_a_sentence(cluster, manifest, tmp_path, stuck):
    stuck("0.jpg", 9)
    one = replace(on(cluster.scheduler_address, text=None), shard_images=32)
    said = (
        r"have finished no shard for \d+\.\d seconds, in the last of 4 attempts \(small@\w+-shard-0-again-\d on inproc"
    )
    with pytest.raises(CacheError, match=said):
        extract(manifest, str(tmp_path / "s.zarr"), one)


@pytest.mark.slow
def test_a_cluster_that_loses_its_workers_does_not_wait_for_ever(manifest, tmp_path, stuck, capsys):
    with LocalCluster(n_workers=1, threads_per_worker=1, processes=False, dashboard_address=":0") as cluster:
        stuck("0.jpg", 1)
        threading.Timer(0.5, cluster.scale, (0,)).start()
        with pytest.raises(CacheError, match=r"look into their logs, start them anew"):
            extract(manifest, str(tmp_path / "s.zarr"), on(cluster.scheduler_address, text=None))
    assert "on no worker" in capsys.readouterr().err
