"""Two writers of one object store: one goes on, the other ends with a sentence, and the store is sound."""

import os
import signal
import subprocess
import sys
import threading
import time
from dataclasses import replace
from pathlib import Path

import pytest
import small_encoder
from distributed import LocalCluster
from s3_server import LATE, LOST_ANSWER, LOST_REQUEST
from small_extraction import SMALL, files

from xret.pipeline.cache.storage import lease
from xret.pipeline.cache.storage.store import Store
from xret.pipeline.cache.storage.zarr_stores import LEASE
from xret.pipeline.cache.upkeep.contents import remove_set
from xret.pipeline.cache.upkeep.merge import merge
from xret.pipeline.data.manifest import load_manifest
from xret.pipeline.errors import CacheError
from xret.pipeline.extraction.extraction import extract

# Connections that the server closed are collected whenever Python likes; Dask's threads outlive a closed cluster.
pytestmark = [
    pytest.mark.filterwarnings("ignore::ResourceWarning"),
    pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning"),
    pytest.mark.filterwarnings("ignore:.*:DeprecationWarning:distributed"),
]
SUPPORT = Path(__file__).parents[3] / "support"
TAKEN_OVER = "another process took .* over while this one could not reach it; run the same command again"
DENIED = 403, "AccessDenied", "Access Denied"
OTHER = b"someone else"
IMAGES = replace(SMALL, text=None)  # a request takes its time


@pytest.fixture
def manifest(tiny_dataset):
    return load_manifest(tiny_dataset(train=10, val=2))  # three shards of eight images


@pytest.fixture
def whole(bucket, manifest, tmp_path):
    """Every file of an uninterrupted extraction on the disk."""
    extract(manifest, str(tmp_path / "whole.zarr"), IMAGES)
    return files(tmp_path / "whole.zarr")


def at_once(works):
    """Run functions at the same time; return what each returned, or the sentence that it ended with."""
    outcomes = []

    def run(work):
        try:
            outcomes.append(work())
        except CacheError as error:
            outcomes.append(str(error))

    threads = [threading.Thread(target=run, args=(work,)) for work in works]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return outcomes


# --- The lease


def test_a_dead_writers_lease_is_taken_over(bucket, capsys):
    bucket.put(LEASE, b"someone 17")
    with lease.lease(Store(bucket.url)):
        assert list(bucket.files()) == [LEASE]
    assert "or was killed while it did" in capsys.readouterr().err
    assert bucket.files() == {}


@pytest.mark.parametrize("dead", [False, True])
def test_of_many_one_holds_the_lease(bucket, dead):
    held, most = [], []
    if dead:
        bucket.put(LEASE, b"someone 17")

    def hold():
        with lease.lease(Store(bucket.url)):
            held.append(1)
            most.append(len(held))
            time.sleep(1)  # longer than the patience with a dead one
            held.pop()

    outcomes = at_once([hold] * 6)
    assert set(most) == {1}
    assert sum(outcome is not None for outcome in outcomes) == 6 - len(most)
    assert bucket.files() == {}


def test_whoever_lost_the_lease_says_so(bucket):
    with pytest.raises(CacheError, match=TAKEN_OVER), lease.lease(Store(bucket.url)):
        bucket.put(LEASE, OTHER)
        time.sleep(0.4)
    assert bucket.files() == {LEASE: OTHER}


def test_a_lease_is_not_renewed_over_anothers(bucket):
    """The other takes it when the renewal is on its way."""
    renewals = []

    def gate(method, path):
        if method == "PUT" and not renewals:
            renewals.append(path)
            bucket.put(LEASE, OTHER)

    with pytest.raises(CacheError, match=TAKEN_OVER), lease.lease(Store(bucket.url)), bucket.server.failing(gate):
        time.sleep(0.4)
    assert renewals
    assert bucket.files() == {LEASE: OTHER}


@pytest.mark.parametrize(
    ("fault", "at"),
    [(LOST_REQUEST, 1), (LOST_ANSWER, 1), (LATE, 1), (DENIED, 2), (LOST_REQUEST, 2), (LOST_ANSWER, 2), (LATE, 2)],
)
def test_a_request_that_fails_is_not_blamed_on_another_writer(bucket, fault, at):
    """The first puts the lease there, and the second renews it."""
    puts = []

    def gate(method, _):
        puts.extend([method] if method == "PUT" else [])
        return fault if method == "PUT" and len(puts) == at else None

    with bucket.server.failing(gate), lease.lease(Store(bucket.url)):
        time.sleep(1)
        assert len(puts) > at
    assert bucket.files() == {}


# --- Its loss


def extraction(manifest, bucket, _):
    extract(manifest, bucket.url, replace(IMAGES, workers=1))


def merging(_, bucket, whole):
    merge(bucket.url, [whole])


def removal(_, bucket, whole):
    remove_set(bucket.url, "images/small")


def on_cluster(manifest, bucket, _):
    with LocalCluster(n_workers=1, threads_per_worker=1, processes=False, dashboard_address=":0") as cluster:
        extract(manifest, bucket.url, replace(IMAGES, scheduler=cluster.scheduler_address))


@pytest.mark.parametrize(
    ("work", "at"),
    [
        (extraction, "/local/c/0"),
        pytest.param(extraction, "/images/", marks=pytest.mark.slow),
        pytest.param(on_cluster, "/length/c/1", marks=pytest.mark.slow),
        (merging, "/global/c/1"),
        (removal, "/images/"),
    ],
)
def test_without_the_lease_nothing_more_is_written(bucket, manifest, whole, tmp_path, work, at):
    if work == removal:
        bucket.fill(whole)
    lost, after = [], []

    def gate(method, path):
        if method in ("PUT", "POST", "DELETE") and not path.endswith(LEASE):
            if lost:
                after.append((method, path))
            elif at in path:
                lost.append(path)
                bucket.put(LEASE, OTHER)

    with bucket.server.failing(gate), pytest.raises(CacheError, match=TAKEN_OVER):
        work(manifest, bucket, str(tmp_path / "whole.zarr"))
    assert lost
    assert after == []
    assert bucket.files()[LEASE] == OTHER
    extract(manifest, bucket.url, IMAGES)
    assert bucket.files() == whole


def test_the_second_of_two_extractions_is_refused(bucket, manifest, whole, monkeypatch):
    monkeypatch.setattr(small_encoder.SmallEncoder, "pause", 0.5)
    bucket.fill({name: data for name, data in whole.items() if "done" not in name or not name.endswith("/1")})
    outcomes = at_once([lambda: "done" if extract(manifest, bucket.url, IMAGES) else ""] * 3)
    refusal = f"another process is writing to {bucket.url}; wait until it has ended"
    assert sorted(outcomes) == [refusal, refusal, "done"]
    assert bucket.files() == whole


WRITER = """
import sys, time
clock, shift = time.time, float(sys.argv[3])
time.time = lambda: clock() + shift
import small_encoder
from small_extraction import SMALL
from xret.pipeline.cache.storage import lease
from xret.pipeline.data.manifest import load_manifest
from xret.pipeline.errors import XretError
from xret.pipeline.extraction.extraction import extract
lease.PERIOD, lease.PATIENCE = 0.1, 0.6
small_encoder.use()
small_encoder.SmallEncoder.pause = 1
try:
    extract(load_manifest(sys.argv[1]), sys.argv[2], SMALL)
except XretError as error:
    sys.exit(f"Error: {error}")
"""


@pytest.mark.slow
@pytest.mark.parametrize("shift", [300, -300])
def test_a_suspended_writer_whose_clock_is_wrong_ends_when_it_goes_on(bucket, tiny_dataset, tmp_path, shift):
    path = tiny_dataset(train=40, val=2)
    manifest = load_manifest(path)
    extract(manifest, str(tmp_path / "whole.zarr"), SMALL)
    paths = os.pathsep.join([str(SUPPORT), os.environ.get("PYTHONPATH", "")])
    words = [sys.executable, "-c", WRITER, str(path), bucket.url, str(shift)]
    with subprocess.Popen(words, stderr=subprocess.PIPE, text=True, env={**os.environ, "PYTHONPATH": paths}) as writer:
        while writer.poll() is None and not any("/done/c/" in name for name in bucket.files()):
            time.sleep(0.05)
        with pytest.raises(CacheError, match="another process is writing"):
            extract(manifest, bucket.url, SMALL)
        os.kill(writer.pid, signal.SIGSTOP)
        summary = extract(manifest, bucket.url, SMALL)
        assert summary.sets[0].shards > 1
        before = len(bucket.server.requests)
        os.kill(writer.pid, signal.SIGCONT)
        said = writer.communicate(timeout=60)[1]
    assert writer.returncode == 1
    assert "Error: another process took " in said.splitlines()[-1]
    written = [request for request in bucket.server.requests[before:] if request[0] not in ("GET", "HEAD")]
    assert len(written) <= 2  # what each of its two threads was at
    assert bucket.files() == files(tmp_path / "whole.zarr")
