"""Extraction on a Dask cluster: the same tasks, the same bytes, whatever dies."""

import os
import signal
import threading
import time
from argparse import Namespace
from dataclasses import replace

import pytest
import small_timm  # noqa: F401 - it registers its models
import torch
from distributed import Client, LocalCluster
from safetensors.torch import load_file
from small_extraction import SMALL, files

from xret.pipeline.encoders.registry import load_visual
from xret.pipeline.errors import CacheError, EncoderError, SampleError
from xret.pipeline.extraction import pictures
from xret.pipeline.extraction.extraction import extract
from xret.pipeline.extraction.filler import Filler
from xret.pipeline.extraction.options import build_options
from xret.pipeline.store import FeatureCache
from xret.pipeline.store.inspect import verify

LAYERS = build_options(visual="timm:small_eva", visual_weights="random:0", text=None, layers=(0, 1), batch_size=4)
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
    with pytest.raises(EncoderError, match="give --trust"):
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


def test_a_worker_that_is_killed_loses_nothing(manifest, tmp_path):
    extract(manifest, tmp_path / "here.zarr", SMALL)
    url = tmp_path / "there.zarr"
    with LocalCluster(n_workers=2, threads_per_worker=1, dashboard_address=":0") as cluster:
        with Client(cluster.scheduler_address, set_as_default=False) as client:
            victim = next(iter(client.run(os.getpid).values()))

        def kill():
            until = time.monotonic() + 60
            while not list(url.glob("images/*/status/c.*")) and time.monotonic() < until:
                time.sleep(0.02)
            os.kill(victim, signal.SIGKILL)

        killer = threading.Thread(target=kill)
        killer.start()
        extract(manifest, url, replace(SMALL, workers=cluster.scheduler_address, batch_size=1))
        killer.join()
    assert verify(str(url)).ok
    ours, theirs = files(url), files(tmp_path / "here.zarr")
    same = [name for name in ours if "/c." in name and ours[name] != theirs[name] and "status" in name]
    assert ours.keys() == theirs.keys() and not same
