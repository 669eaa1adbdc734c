"""The order of an epoch that is read from the store, and the threads that read ahead."""

import subprocess
import sys
import threading
import time
from contextlib import nullcontext
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from small_batches import EPOCHS, as_remote, assert_equal, batches_of, large, rows_of

from xret.pipeline.errors import CacheError
from xret.pipeline.reading import prefetch
from xret.pipeline.reading.batches import Batch
from xret.pipeline.reading.features import Features
from xret.pipeline.reading.prefetch import block_order, opened_ahead, read_ahead

CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def cache(tmp_path_factory):
    return large(tmp_path_factory.mktemp("stores"))


@pytest.fixture
def small_groups(monkeypatch):
    """Let a stream mix two blocks of eight images, as a large data set's mixes 64 of 64, or 8 of 512."""
    monkeypatch.setattr("xret.pipeline.reading.split.RUN", 8)
    monkeypatch.setattr("xret.pipeline.reading.batches.block_order", lambda block, rng: block_order(block, rng, 2))


@pytest.fixture
def remote(cache):
    """The same store, read like one that is not on a local disk."""
    return as_remote(cache)


@pytest.mark.parametrize("words", EPOCHS)
def test_a_stream_has_every_unit_once_in_an_order_of_its_own(cache, words, small_groups):
    whole, streamed = (batches_of(cache, place) for place in ("memory", "stream"))

    def units(batches, **changes):
        found = []
        for batch in batches.epoch(**{**words, **changes}):
            index = batch.caption_index
            found += index.tolist() if words["unit"] == "caption" else np.unique(batches.caption_image[index]).tolist()
        return found

    for batch in streamed.epoch(**words):
        images, captions = rows_of(cache, batch, streamed)
        assert_equal(batch.images, images)
        assert_equal(batch.captions, captions)
    expected = streamed.images if words["unit"] == "image" else streamed.captions
    assert sorted(units(streamed)) == sorted(units(whole)) == list(range(expected))
    assert units(streamed) == units(streamed)
    assert units(streamed) != units(whole)
    assert units(streamed) != units(streamed, epoch=7)


@pytest.mark.parametrize("words", EPOCHS)
@pytest.mark.parametrize(("placement", "is_local"), [("memory", True), ("stream", True), ("stream", False)])
def test_an_epoch_that_begins_later_reads_nothing_of_what_was_before(
    request, placement, is_local, words, small_groups, monkeypatch
):
    batches = batches_of(request.getfixturevalue("cache" if is_local else "remote"), placement)
    whole = list(batches.epoch(**words))
    fetched, opened, source = [], [], batches.image_source
    batches.image_source = SimpleNamespace(fetch=lambda items, draws: fetched.append(items) or source.fetch(items))
    monkeypatch.setattr(batches, "_open", lambda blocks: opened.extend(blocks.tolist()))
    for first in (0, 1, len(whole) - 1, len(whole)):
        fetched.clear()
        opened.clear()
        rest = list(batches.epoch(**words, first=first))
        assert len(rest) == len(fetched) == len(whole) - first
        for one, other in zip(rest, whole[first:], strict=True):
            assert_equal(one, other)
        read = {images for items in fetched for images in (items // 8).tolist()}
        assert not opened or (not is_local and rest)  # a thread opens, and may come too late for a short rest
        assert len(opened) <= len(read) + 4  # with a group of two blocks ahead, and one that was begun


@pytest.mark.parametrize("is_local", [True, False])
def test_a_stream_mixes_neighbours_on_a_disk_and_whole_chunks_of_an_object_store(request, is_local, small_groups):
    batches = batches_of(request.getfixturevalue("cache" if is_local else "remote"), "stream")
    block_of = np.arange(156) // 8 if is_local else batches.image_rows // 8  # four of 160 images are broken
    for epoch in range(5):
        batch = next(iter(batches.epoch(unit="image", batch_size=12, seed=0, epoch=epoch)))
        images = np.unique(batches.caption_image[batch.caption_index])
        assert len(np.unique(block_of[images])) == 2  # of which a group has 12 to 16


@given(st.lists(st.integers(0, 5), min_size=1, max_size=20).filter(any), st.integers(1, 5), st.integers(0, 99))
def test_a_block_order_visits_whole_groups(sizes, group, seed):
    block = np.repeat(np.arange(len(sizes)), sizes)
    order, groups = block_order(np.array(sizes), np.random.default_rng(seed), group)
    assert sorted(order.tolist()) == list(range(len(block)))
    assert sorted(b for blocks in groups for b in blocks.tolist()) == sorted(set(block.tolist()))
    assert all(len(blocks) == group for blocks in groups[:-1])
    at = 0
    for blocks in groups:
        inside = np.isin(block, blocks).sum()
        assert set(block[order[at : at + inside]].tolist()) == set(blocks.tolist())
        at += inside


def test_a_block_order_is_one_stable_sort_by_group(monkeypatch):
    monkeypatch.setattr(prefetch, "_AT_ONCE", 7)
    sizes, again = np.array([3, 0, 9, 1, 12, 4, 0, 8]), np.random.default_rng(5)
    order, groups = block_order(sizes, np.random.default_rng(5), 2)
    drawn = np.flatnonzero(sizes)[again.permutation(6)]
    assert [blocks.tolist() for blocks in groups] == drawn.reshape(3, 2).tolist()
    group_of = {block: at // 2 for at, block in enumerate(drawn.tolist())}
    block_of = np.repeat(np.arange(8), sizes).tolist()
    assert order.tolist() == sorted(again.permutation(37).tolist(), key=lambda row: group_of[block_of[row]])


def test_a_group_mixes_some_thousand_samples():
    for samples, blocks, expected in ((512, 20, 8), (64, 200, 64), (8, 600, 512), (8, 20, 20), (2560, 9, 8)):
        _, groups = block_order(np.full(blocks, samples), np.random.default_rng(0))
        assert len(groups[0]) == expected


def test_a_block_order_draws_groups_and_places_evenly():
    block = np.repeat(np.arange(6), 3)
    rng = np.random.default_rng(0)
    orders = np.stack([block_order(np.full(6, 3), rng, 2)[0] for _ in range(6000)])
    for place in (0, 5, 6, 17):  # every sample is as likely in every place
        share = np.bincount(orders[:, place], minlength=18) / len(orders)
        assert share == pytest.approx(np.full(18, 1 / 18), abs=5 * (1 / 18 / len(orders)) ** 0.5)
    together = (block[orders[:, 0]] == block[orders[:, 1]]).mean()  # two of six places are the first one's block
    assert together == pytest.approx(2 / 5, abs=0.04)


def test_the_next_group_is_opened_with_the_first_sample_of_a_group():
    groups = [np.array(shards) for shards in ([4, 1], [0, 5], [3, 2], [6])]
    opened = []
    items = [np.array(item) for item in ([4, 1], [1], [1, 0], [5], [3, 2, 6], [6])]
    changed = threading.Condition()

    def open_shards(shards):
        with changed:
            opened.append(shards.tolist())
            changed.notify()

    expected = iter([2, 2, 3, 3, 4, 4])
    for _ in opened_ahead(open_shards, items, lambda item: item, groups):
        count = next(expected)
        with changed:
            assert changed.wait_for(lambda count=count: len(opened) >= count, 60)
            changed.wait_for(lambda count=count: len(opened) > count, 0.01)
            assert len(opened) == count
    assert opened == [shards.tolist() for shards in groups]


def test_a_stream_of_an_object_store_reads_every_chunk_once_an_epoch(remote, monkeypatch, small_groups):
    """No more chunks are kept than the groups at hand, and those are not read again."""
    folder, read = remote.folder, []
    found = folder.read
    monkeypatch.setattr(folder, "read", lambda *names: read.extend(names) or found(*names))
    monkeypatch.setattr("xret.pipeline.store.rows._KEPT", 6 * 8 * 4 * 16 * 2)  # of local features, six chunks
    for epoch in (0, 1):
        batches = batches_of(remote, "stream")
        read.clear()
        list(batches.epoch(unit="image", batch_size=4, seed=0, epoch=epoch))
        local = [name for name in read if "images/grid" in name and "/local/c." in name]
        assert 19 <= len(local) == len(set(local)) <= 20  # one may have been read when the array was opened


def test_results_come_in_order_and_are_read_beside_the_work():
    reading, threads = [], set()

    def read(item):
        threads.add(threading.get_ident())
        reading.append(item)
        return lambda: (item, threading.get_ident())

    for number, result in enumerate(read_ahead(read, range(6), CPU)):
        ahead, until = min(number + 3, 5), time.monotonic() + 60
        while len(reading) <= ahead and time.monotonic() < until:
            time.sleep(0.001)
        time.sleep(0.01)
        assert sorted(reading) == list(range(ahead + 1))
        assert result == (number, threading.get_ident())  # the rest is done here, on a CPU
    assert threading.get_ident() not in threads


def test_a_failure_is_raised_where_its_batch_is_due_and_no_thread_is_left():
    def read(item):
        if item == 2:
            raise CacheError("shard 2 is damaged")
        return lambda: item

    before, got = set(threading.enumerate()), []
    with pytest.raises(CacheError, match="shard 2 is damaged"):
        got.extend(read_ahead(read, range(9), CPU))
    assert got == [0, 1]
    endless = read_ahead(read, iter(lambda: 7, None), CPU)
    assert next(endless) == 7
    endless.close()
    assert set(threading.enumerate()) <= before


def test_no_memory_of_a_batch_is_used_again_before_a_gpu_has_computed_with_it(monkeypatch):
    """What the reading stream has allocated is recorded on the stream that computes, of all feature sets."""
    computing, recorded = SimpleNamespace(wait_event=lambda event: None), []
    reading = SimpleNamespace(wait_stream=lambda stream: None, record_event=lambda: None)
    monkeypatch.setattr("xret.pipeline.reading.prefetch._copies", lambda device: reading)
    monkeypatch.setattr(torch.cuda, "stream", nullcontext)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: computing)
    monkeypatch.setattr(torch.Tensor, "is_cuda", True)
    monkeypatch.setattr(torch.Tensor, "record_stream", lambda self, stream: recorded.append((id(self), stream)))
    tensors = iter(made := [torch.zeros(1) for _ in range(8)])
    images = Features(next(tensors), next(tensors), others=(Features(next(tensors), global_=next(tensors)),))
    batch = Batch(images, Features(next(tensors), token=next(tensors)), next(tensors), next(tensors))
    assert list(read_ahead(lambda item: lambda: batch, [0], torch.device("cuda"))) == [batch]
    assert sorted(number for number, _ in recorded) == sorted(map(id, made))
    assert all(stream is computing for _, stream in recorded)


LEFT_EARLY = """
import numpy as np, torch
from xret.pipeline.reading.prefetch import opened_ahead, read_ahead

items = opened_ahead(lambda blocks: None, range(9), np.array, [np.arange(9)])
results = read_ahead(lambda item: lambda: item, items, torch.device("cpu"))
for result in results:
    HOW
"""


@pytest.mark.parametrize(("how", "code"), [("break", 0), ("raise SystemExit(3)", 3)])
def test_what_is_left_early_ends_silently_with_its_process(how, code):
    words = [sys.executable, "-c", LEFT_EARLY.replace("HOW", how)]
    done = subprocess.run(words, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (code, "")
