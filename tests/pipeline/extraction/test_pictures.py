"""Pictures are read ahead in bounded memory, by threads and by processes alike."""

import multiprocessing
import os
import resource
import signal
import threading
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from dask.diagnostics import Profiler
from small_encoder import SmallEncoder, use_for_images
from small_extraction import SMALL, files
from torch.utils.data import DataLoader
from torch.utils.data.dataloader import _MultiProcessingDataLoaderIter

from xret.pipeline.data.manifest import load_manifest
from xret.pipeline.encoders.spec import EncoderSpec
from xret.pipeline.errors import CacheError, SampleError
from xret.pipeline.extraction.extraction import extract
from xret.pipeline.extraction.filler import Filler
from xret.pipeline.extraction.options import build_options

IMAGES = replace(SMALL, text=None)


class Watched(SmallEncoder):
    """Counts the pictures that are read and not encoded yet; `encode` waits until they have once been `enough`."""

    def __init__(self, enough):
        self.changed, self.waiting, self.most, self.enough = threading.Condition(), 0, 0, enough

    def decode(self, path):
        found = super().decode(path)
        with self.changed:
            self.waiting += 1
            self.most = max(self.most, self.waiting)
            self.changed.notify_all()
        return found

    def encode(self, pixels):
        with self.changed:
            assert self.changed.wait_for(lambda: self.most >= self.enough, timeout=120)
            self.waiting -= len(pixels)
        return super().encode(pixels)


@pytest.mark.parametrize(("batch", "ahead"), [(8, 8), (2, 4)])
def test_reading_runs_ahead_across_chunks_in_bounded_memory(tiny_dataset, tmp_path, monkeypatch, batch, ahead):
    """Two batches are encoded at once, and one batch or two pictures a thread are read beyond them."""
    monkeypatch.setattr("xret.pipeline.device.cores", lambda: 2)
    use_for_images(monkeypatch, encoder := Watched(2 * batch + ahead))
    options = replace(IMAGES, batch_size=batch, workers=2)
    extract(load_manifest(tiny_dataset(train=40)), tmp_path / "s.zarr", options)
    assert encoder.most < 3 * batch + ahead


def test_the_batches_of_one_chunk_are_encoded_at_once(tiny_dataset, tmp_path, monkeypatch):
    both, encode = threading.Barrier(2), SmallEncoder.encode
    use_for_images(monkeypatch, encoder := SmallEncoder())
    encoder.encode = lambda pixels: (both.wait(120), encode(encoder, pixels))[1]
    summary = extract(load_manifest(tiny_dataset(train=8)), tmp_path / "s.zarr", replace(IMAGES, batch_size=4))
    assert (summary.sets[0].samples, summary.sets[0].chunks) == (8, 1)


def test_diagnostics_see_each_batch(manifest, tmp_path):
    with Profiler() as seen:
        extract(manifest, tmp_path / "s.zarr", replace(IMAGES, batch_size=4))
    assert len(seen.results) == 32 / 4


@pytest.fixture
def in_processes(monkeypatch):
    """Let two processes read the pictures, as for a GPU, and torch look every tenth of a second if they live.

    A loader of the user's own has had its turn, which lets torch interrupt the main thread when a process dies.
    """
    list(DataLoader([0], num_workers=1, multiprocessing_context="fork", generator=torch.Generator()))
    monkeypatch.setattr(Filler, "processes", 2)
    monkeypatch.setattr(_MultiProcessingDataLoaderIter._try_get_data, "__defaults__", (0.1,))
    monkeypatch.setattr(torch.utils.data._utils, "MP_STATUS_CHECK_INTERVAL", 0.1)


@pytest.mark.parametrize("how", [{}, {"visual": "timm:test_vit", "views": "crop-flip:2"}], ids=["grid", "views"])
def test_pictures_that_processes_read_give_the_same_bytes(manifest, tmp_path, request, how):
    options = build_options(
        **({"visual": SMALL.visual.name, "image_size": 48} | how), visual_weights="random:0", text=None
    )
    options, state = replace(options, batch_size=8), torch.get_rng_state()
    extract(manifest, tmp_path / "threads.zarr", options)
    request.getfixturevalue("in_processes")
    extract(manifest, tmp_path / "processes.zarr", options)
    assert files(tmp_path / "processes.zarr") == files(tmp_path / "threads.zarr")
    assert torch.equal(torch.get_rng_state(), state)


def test_processes_record_or_refuse_what_cannot_be_read(manifest, tmp_path, in_processes):
    (manifest.images / "3.jpg").write_bytes(b"no picture")
    with pytest.raises(SampleError, match=r"3\.jpg"):
        extract(manifest, tmp_path / "s.zarr", IMAGES)
    for child in multiprocessing.active_children():
        child.join(10)
    assert not multiprocessing.active_children()
    summary = extract(manifest, tmp_path / "s.zarr", replace(IMAGES, on_error="skip")).sets[0]
    assert (summary.samples, summary.failed) == (31, 1)


def test_a_process_that_dies_is_said(manifest, tmp_path, monkeypatch, in_processes):
    use_for_images(monkeypatch, encoder := SmallEncoder())
    encoder.decode = lambda picture: os.kill(os.getpid(), signal.SIGKILL)
    with pytest.raises(CacheError, match="process"):
        extract(manifest, tmp_path / "s.zarr", IMAGES)


def test_what_a_process_raises_is_raised(manifest, tmp_path, monkeypatch, in_processes):
    use_for_images(monkeypatch, encoder := SmallEncoder())
    encoder.decode = lambda picture: torch.zeros(2) + torch.zeros(3)
    with pytest.raises(RuntimeError, match="must match the size"):
        extract(manifest, tmp_path / "s.zarr", IMAGES)


@pytest.mark.parametrize(
    ("name", "kind", "device", "expected"),
    [
        ("resnet18", "grid", "cuda:1", 3),
        ("resnet18", "grid", "cpu", 0),
        ("butd", "roi", "cuda", 0),
        ("my:Own", "grid", "cuda", 0),
    ],
)
def test_processes_read_for_a_gpu_but_not_for_an_encoder_of_ones_own(name, kind, device, expected):
    job = SimpleNamespace(specs=[EncoderSpec(name)], options=replace(IMAGES, workers=3))
    filler = SimpleNamespace(job=job, device=device, encoders=[SimpleNamespace(kind=kind)])
    assert Filler.processes.fget(filler) == expected


def test_shared_memory_that_is_too_small_for_processes(manifest, tmp_path, monkeypatch, in_processes):
    def decode(picture):
        resource.setrlimit(resource.RLIMIT_FSIZE, (0, resource.RLIM_INFINITY))  # of this process alone
        return torch.zeros(3, 8, 8, dtype=torch.uint8), (8, 8)

    use_for_images(monkeypatch, encoder := SmallEncoder())
    encoder.decode = decode
    with pytest.raises(CacheError, match="shared memory"):
        extract(manifest, tmp_path / "s.zarr", IMAGES)
