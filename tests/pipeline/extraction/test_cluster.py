"""Extraction on a Dask cluster: the same tasks, the same bytes, whatever dies."""

import os
import signal
import threading
import time
from argparse import Namespace
from collections import Counter
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path

import pytest
import small_timm  # noqa: F401 - it registers its models
import torch
from dask_processes import cluster
from distributed import Client, LocalCluster
from safetensors.torch import load_file
from small_disk import limit_files
from small_extraction import SMALL, files

from xret.pipeline.encoders.registry import load_visual
from xret.pipeline.errors import CacheError, EncoderError, ManifestError, OutputError, SampleError
from xret.pipeline.extraction import cluster as tasks
from xret.pipeline.extraction import filler, pictures
from xret.pipeline.extraction.extraction import extract
from xret.pipeline.extraction.filler import Filler, Job
from xret.pipeline.extraction.options import build_options
from xret.pipeline.store import FeatureCache
from xret.pipeline.store.inspect import verify

LAYERS = build_options(visual="timm:small_eva", visual_weights="random:0", text=None, layers=(0, 1), batch_size=4)
SLOW = build_options(visual="own_encoder:Slow", text=None, batch_size=4)
SUPPORT = Path(__file__).parents[2] / "support"
# Dask's own threads and sockets outlive a closed cluster for a moment, and its nannies fork.
pytestmark = [
    pytest.mark.filterwarnings("ignore::ResourceWarning"),
    pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning"),
    pytest.mark.filterwarnings("ignore:.*:DeprecationWarning:distributed"),
]


@pytest.fixture
def address():
    with LocalCluster(n_workers=1, threads_per_worker=2, processes=False, dashboard_address=":0") as cluster:
        yield cluster.scheduler_address


@pytest.mark.parametrize(("options", "samples"), [(SMALL, [32, 80]), (LAYERS, [32, 32])])
def test_a_cluster_writes_the_same_bytes(options, samples, address, manifest, tmp_path, monkeypatch):
    extract(manifest, tmp_path / "here.zarr", options)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(Filler, "processes", 2)  # as on a GPU
    monkeypatch.setattr(pictures, "DataLoader", None)  # a worker would fork for each task
    summary = extract(manifest, "there.zarr", replace(options, workers=address))
    assert [one.samples for one in summary.sets] == samples
    assert files(tmp_path / "there.zarr") == files(tmp_path / "here.zarr")


def test_trust_reaches_who_reads_the_weights_and_no_store(address, manifest, tmp_path):
    load_visual(SMALL.visual, "cpu").save(tmp_path / "w.safetensors")
    torch.save({"model": load_file(tmp_path / "w.safetensors"), "args": Namespace()}, tmp_path / "w.pth")
    options = replace(SMALL, text=None, visual=replace(SMALL.visual, weights=str(tmp_path / "w.pth")))
    with pytest.raises(EncoderError, match="give `trust`"):
        extract(manifest, tmp_path / "s.zarr", options)
    trusting = replace(options, visual=replace(options.visual, trust=True))
    for store, workers in (("here", None), ("there", address)):
        summary = extract(manifest, tmp_path / store, replace(trusting, workers=workers))
        assert summary.sets[0].samples == 32
    assert files(tmp_path / "there") == files(tmp_path / "here")
    assert "'trust'" not in str(FeatureCache.open(tmp_path / "here").image_set().attributes)


def test_a_broken_image_is_the_same_sentence(address, manifest, tmp_path):
    (manifest.images / "4.jpg").write_bytes(b"")
    with pytest.raises(SampleError, match=r"4\.jpg"):
        extract(manifest, tmp_path / "s.zarr", replace(SMALL, workers=address))
    summary = extract(manifest, tmp_path / "s.zarr", replace(SMALL, workers=address, on_error="skip"))
    assert summary.sets[0].failed == 1


def test_a_scheduler_without_workers_is_a_sentence(manifest, tmp_path):
    with (
        LocalCluster(n_workers=0, processes=False, dashboard_address=":0") as cluster,
        pytest.raises(CacheError, match="has no workers"),
    ):
        extract(manifest, tmp_path / "s.zarr", replace(SMALL, workers=cluster.scheduler_address))


def kill_when_begun(url, pid):
    """Kill a process as soon as a chunk is written."""

    def kill():
        until = time.monotonic() + 60
        while not list(url.glob("images/*/status/c.*")) and time.monotonic() < until:
            time.sleep(0.02)
        os.kill(pid, signal.SIGKILL)

    thread = threading.Thread(target=kill)
    thread.start()
    return thread


@pytest.mark.slow
def test_a_worker_or_a_scheduler_that_is_killed_loses_nothing(manifest, tmp_path):
    extract(manifest, tmp_path / "here.zarr", SLOW)
    for name, victim in (("scheduler", 0), ("worker", 1)):
        url, folder = tmp_path / f"{name}.zarr", tmp_path / name
        folder.mkdir()
        with cluster(folder, [SUPPORT] * 2) as (address, processes):
            killer = kill_when_begun(url, processes[victim].pid)
            went = (
                pytest.raises(CacheError, match="scheduler went away; run the same") if victim == 0 else nullcontext()
            )
            with went:
                extract(manifest, url, replace(SLOW, workers=address))
            killer.join()
        if victim == 0:
            extract(manifest, url, SLOW)
        assert files(url) == files(tmp_path / "here.zarr")


@pytest.mark.slow
def test_a_full_disk_of_a_worker_names_it_and_the_next_run_completes(manifest, tmp_path):
    extract(manifest, tmp_path / "here.zarr", SLOW)
    url = tmp_path / "there.zarr"
    with cluster(tmp_path, [SUPPORT] * 4) as (address, _), Client(address, set_as_default=False) as client:
        (full,) = (
            worker for worker, of in client.scheduler_info(n_workers=-1)["workers"].items() if of["name"] == "w2"
        )
        before = client.run(limit_files, 100, workers=[full])[full]
        with pytest.raises(OutputError, match=r"File too large \(worker w2\)"):
            extract(manifest, url, replace(SLOW, workers=address))
        assert verify(str(url)).ok
        client.run(limit_files, before, workers=[full])
        extract(manifest, url, replace(SLOW, workers=address))
    assert files(url) == files(tmp_path / "here.zarr")


@pytest.mark.slow
def test_a_worker_with_another_xret_is_named(manifest, tmp_path):
    other = tmp_path / "other" / "xret-0.0.1.dist-info"
    other.mkdir(parents=True)
    (other / "METADATA").write_text("Metadata-Version: 2.1\nName: xret\nVersion: 0.0.1\n")
    with cluster(tmp_path, ["", other.parent]) as (address, _):
        with pytest.raises(CacheError, match=r"worker w1 has xret 0\.0\.1 and not .*; install xret"):
            extract(manifest, tmp_path / "s.zarr", replace(SMALL, workers=address))
        assert not (tmp_path / "s.zarr").exists()


@pytest.mark.parametrize(
    ("unseen", "error", "sentence"),
    [
        ({"folder": "/elsewhere"}, ManifestError, "/elsewhere/0.jpg is missing; mount"),
        ({"url": "/elsewhere"}, CacheError, "/elsewhere"),
        ({"specs": (replace(SMALL.visual, weights="/elsewhere"),)}, EncoderError, "/elsewhere"),
    ],
)
def test_a_path_that_a_worker_does_not_see_is_no_failed_sample(
    unseen, error, sentence, address, manifest, tmp_path, monkeypatch
):
    how = replace(SMALL, workers=address, on_error="skip")
    with monkeypatch.context() as patch:
        patch.setattr(filler, "Job", lambda **of_job: Job(**of_job | unseen))
        with pytest.raises(error, match=rf"{sentence}.* \(worker 0\)"):
            extract(manifest, tmp_path / "s.zarr", how)
    assert [one.failed for one in extract(manifest, tmp_path / "s.zarr", how).sets] == [0, 0]


def test_tasks_take_ten_seconds_and_less_at_the_end(address, monkeypatch):
    def fill(job, groups):
        return Counter(samples=len(groups), task=len(groups) * 10**9)

    sizes = []
    monkeypatch.setattr(tasks, "_fill_on_worker", fill)
    with Client(address, set_as_default=False) as client:
        tasks.fill_on_cluster(
            Namespace(key="job"), [[chunk] for chunk in range(200)], client, lambda done: sizes.append(done["samples"])
        )
    assert (sum(sizes), max(sizes), sizes[0], sizes[-1]) == (200, 10, 1, 1)
