"""Where features lie, in which order they come, and several data sets as one."""

import subprocess
import threading
import time
from dataclasses import fields, is_dataclass

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from small_store import make_store

from xret.heads.run_features import RetokenizedCaptions
from xret.pipeline import placement as placement_module
from xret.pipeline.batches import Batches, JoinedBatches
from xret.pipeline.cache import FeatureCache
from xret.pipeline.errors import CacheError, RunError
from xret.pipeline.placement import Resident, choose
from xret.pipeline.rows import ranges
from xret.pipeline.sides import Features, concatenate
from xret.pipeline.stream import block_order, opened_ahead, read_ahead

ALL = {"image_fields": {"local", "global"}, "caption_fields": {"local", "global", "token"}}
WORDS = {"image_fields": {"local", "global"}, "caption_fields": {"token"}}
CPU = torch.device("cpu")
needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no GPU here")


@pytest.fixture(scope="module")
def cache(tmp_path_factory):
    """Twenty shards of train, of eight images each; four images are broken."""
    url = tmp_path_factory.mktemp("stores") / "s.zarr"
    return FeatureCache.open(make_store(url, train=160, text="tokens", broken=(0, 8, 77, 159)))


def batches_of(cache, placement, wanted=ALL, split="train", device="cpu"):
    sets = cache.image_set(), cache.caption_set()
    return Batches(cache, *sets, split, placement=placement, device=device, **wanted)


def assert_equal(one, other):
    """Compare dataclasses of tensors, which may lie on different devices."""
    if is_dataclass(one):
        for field in fields(one):
            assert_equal(getattr(one, field.name), getattr(other, field.name))
    elif one is None:
        assert other is None
    else:
        assert one.dtype == other.dtype
        assert torch.equal(one.cpu(), other.cpu())


EPOCHS = [
    {"unit": "image", "batch_size": 25, "seed": 3, "epoch": 1},
    {"unit": "image", "batch_size": 25, "seed": 3, "epoch": 1, "captions": 2},
    {"unit": "caption", "batch_size": 32, "seed": 4, "epoch": 0},
]


@pytest.fixture
def small_groups(monkeypatch):
    """Let a stream mix two blocks of eight images, as a large data set's mixes 64 of 64, or 8 of 512."""
    monkeypatch.setattr("xret.pipeline.batches.RUN", 8)
    monkeypatch.setattr("xret.pipeline.batches.block_order", lambda block, rng: block_order(block, rng, 2))


@pytest.fixture
def remote(cache, monkeypatch):
    """The same store, read like one that is not on a local disk."""
    monkeypatch.setattr(cache.store, "is_local", False)
    monkeypatch.setattr(cache.store, "_zarr", lambda: cache.store.root)
    return cache


def rows_of(cache, batch, batches):
    """Read a batch's features from the set itself, sample by sample, and pad them by hand."""
    image = batches.image_rows[batches.caption_image[batch.caption_index]]
    rows = np.empty(len(batch.images.length), dtype=np.int64)
    rows[batch.caption_image] = image
    captions = batches.caption_rows[batch.caption_index]
    images, texts = cache.image_set(), cache.caption_set()

    def padded(read):
        longest = int(texts.length[captions].max())
        each = [read(np.array([row])) for row in captions]
        width = [(0, 0)] * (each[0].ndim - 1)
        return torch.from_numpy(np.stack([np.pad(rows, [(0, longest - len(rows)), *width]) for rows in each]))

    return (
        Features(
            torch.from_numpy(images.length[rows].astype(np.int64)),
            torch.from_numpy(images.local(rows)),
            torch.from_numpy(images.global_(rows)),
        ),
        Features(
            torch.from_numpy(texts.length[captions].astype(np.int64)),
            padded(texts.local),
            torch.from_numpy(texts.global_(captions)),
            padded(texts.token).long(),
        ),
    )


@pytest.mark.parametrize("words", EPOCHS)
def test_batches_are_the_same_wherever_the_features_lie(cache, words):
    mapped, *others = (batches_of(cache, place) for place in ("mapped", "pinned", "device"))
    expected = list(mapped.epoch(**words))
    for batch in expected:
        images, captions = rows_of(cache, batch, mapped)
        assert_equal(batch.images, images)
        assert_equal(batch.captions, captions)
    for other in others:
        got = list(other.epoch(**words))
        assert len(got) == len(expected)
        for one, two in zip(expected, got, strict=True):
            assert_equal(one, two)


@pytest.mark.parametrize("words", EPOCHS)
def test_a_stream_has_every_unit_once_in_an_order_of_its_own(cache, words, small_groups):
    whole, streamed = (batches_of(cache, place) for place in ("mapped", "stream"))
    epoch = list(streamed.epoch(**words))
    assert len(epoch) == streamed.steps(words["unit"], words["batch_size"])
    for one, two in zip(epoch, streamed.epoch(**words), strict=True):
        assert_equal(one, two)
    for batch in epoch:
        images, captions = rows_of(cache, batch, streamed)
        assert_equal(batch.images, images)
        assert_equal(batch.captions, captions)

    def units(batches, epoch):
        if words["unit"] == "caption":
            return torch.cat([batch.caption_index for batch in epoch]).tolist()
        return np.concatenate([np.unique(batches.caption_image[batch.caption_index]) for batch in epoch]).tolist()

    if "captions" not in words:
        index = torch.cat([batch.caption_index for batch in epoch])
        assert sorted(index.tolist()) == list(range(streamed.captions))
    expected = streamed.images if words["unit"] == "image" else streamed.captions
    assert sorted(units(streamed, epoch)) == list(range(expected))
    assert units(streamed, epoch) != units(whole, whole.epoch(**words))
    assert units(streamed, epoch) != units(streamed, streamed.epoch(**{**words, "epoch": 7}))


@pytest.mark.parametrize("words", EPOCHS)
@pytest.mark.parametrize("is_local", [True, False])
@pytest.mark.parametrize("placement", ["pinned", "stream"])
def test_an_epoch_that_begins_later_reads_nothing_of_what_was_before(
    request, placement, is_local, words, small_groups, monkeypatch
):
    batches = batches_of(request.getfixturevalue("cache" if is_local else "remote"), placement)
    whole = list(batches.epoch(**words))
    block = batches._block if words["unit"] == "image" else batches._block[batches.caption_image]
    _, groups = block_order(block, np.random.default_rng([words["seed"], words["epoch"]]), 2)
    plans, opened, fetch = [], [], batches._fetch
    monkeypatch.setattr(batches, "_fetch", lambda plan: plans.append(plan) or fetch(plan))
    monkeypatch.setattr(batches, "_open", lambda shards: opened.append(shards.tolist()))
    for first in (0, 1, len(whole) - 1, len(whole)):
        plans.clear()
        opened.clear()
        rest = list(batches.epoch(**words, first=first))
        assert len(rest) == len(plans) == len(whole) - first
        for one, other in zip(rest, whole[first:], strict=True):
            assert_equal(one, other)
        if placement == "stream" and not is_local:
            read = {block for plan in plans for block in batches._block[plan.images].tolist()}
            needed = [group.tolist() for group in groups if read & set(group.tolist())]
            assert all(group in needed for group in opened)
            assert opened or not rest
        else:
            assert not opened


@pytest.mark.parametrize("is_local", [True, False])
def test_a_stream_mixes_neighbours_on_a_disk_and_whole_shards_of_an_object_store(request, is_local, small_groups):
    batches = batches_of(request.getfixturevalue("cache" if is_local else "remote"), "stream")
    block_of = np.arange(156) // 8 if is_local else batches.image_rows // 8  # four of 160 images are broken
    for epoch in range(5):
        batch = next(iter(batches.epoch(unit="image", batch_size=12, seed=0, epoch=epoch)))
        images = np.unique(batches.caption_image[batch.caption_index])
        assert len(np.unique(block_of[images])) == 2  # of which a group has 12 to 16


@pytest.mark.parametrize("placement", ["mapped", "pinned", "device", "stream"])
def test_evaluation_reads_in_the_order_of_the_rows(cache, placement):
    batches = batches_of(cache, placement, split="val")
    images, texts = cache.image_set(), cache.caption_set()
    got = concatenate(list(batches.image_features(5)))
    assert torch.equal(got.local, torch.from_numpy(images.local(batches.image_rows)))
    assert torch.equal(got.global_, torch.from_numpy(images.global_(batches.image_rows)))
    got = concatenate(list(batches.caption_features(7)))
    assert got.length.tolist() == texts.length[batches.caption_rows].tolist()
    packed = torch.cat([rows[:length] for rows, length in zip(got.local, got.length, strict=True)])
    assert torch.equal(packed, torch.from_numpy(texts.local(batches.caption_rows)))


def test_batches_that_are_kept_stay_as_they_are(cache):
    for placement in ("mapped", "pinned"):
        batches = batches_of(cache, placement)
        kept, copies = [], []
        for _ in range(3):
            for batch in batches.epoch(**EPOCHS[0]):
                kept.append(batch.images.local[:, 1:])  # a view keeps the memory as well
                copies.append(batch.images.local[:, 1:].clone())
        assert all(torch.equal(one, two) for one, two in zip(kept, copies, strict=True))


# --- The choice


def test_auto_takes_the_first_place_that_the_features_fit(monkeypatch, capsys):
    free = {"cuda": 100, "host": 1000}
    monkeypatch.setattr(placement_module, "free_host_memory", lambda: free["host"])
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda _: (free["cuda"], 10**9))
    cases = [
        ("cuda", True, 60, "device"),
        ("cuda", True, 61, "pinned"),
        ("cuda", False, 600, "pinned"),
        ("cuda", True, 601, "stream"),
        ("cpu", True, 600, "mapped"),
        ("cpu", False, 600, "pinned"),
        ("cpu", True, 601, "stream"),
        ("cpu", False, 601, "stream"),
    ]
    for device, is_local, size, expected in cases:
        assert choose("auto", size, torch.device(device), is_local, "these") == expected
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == len(cases)
    assert lines[0] == "these take 0.1 kB: in device memory (free: 0.1 kB of device memory, 1.0 kB of RAM)."


def test_auto_tells_what_it_took_and_why(cache, capsys):
    assert batches_of(cache, "auto").placement == "mapped"
    line = capsys.readouterr().err
    assert line.startswith(
        "the features of 156 images and 390 captions (small, train) take 93.3 kB: in the store's files"
    )
    assert batches_of(cache, "pinned").placement == "pinned"
    assert capsys.readouterr().err == ""


def test_what_lies_in_memory_already_needs_no_more(cache, monkeypatch, capsys):
    resident, sets = Resident(), (cache.image_set(), cache.caption_set())

    def again(placement, wanted=ALL):
        return Batches(cache, *sets, "train", placement=placement, resident=resident, **wanted)

    first = again("pinned", {"image_fields": {"local"}, "caption_fields": {"token"}})
    monkeypatch.setattr(placement_module, "free_host_memory", lambda: 25_000)  # local rows of images take 20 KB
    with pytest.raises(RunError, match=r"set runtime\.cache to stream"):
        again("pinned")
    with pytest.raises(RunError, match=r"set runtime\.cache to stream"):
        batches_of(cache, "pinned", {"image_fields": {"local"}, "caption_fields": {"token"}})
    monkeypatch.setattr(placement_module, "free_host_memory", lambda: 10**9)
    second = again("device")
    monkeypatch.setattr(placement_module, "free_host_memory", lambda: 0)
    third = again("pinned")
    for side in (0, 1):
        for field in first._stored[side]._columns:
            assert first._stored[side]._columns[field] is second._stored[side]._columns[field]
        assert second._stored[side]._columns == third._stored[side]._columns
    monkeypatch.setattr(cache.store, "is_local", False)
    monkeypatch.setattr(cache.store, "_zarr", lambda: cache.store.root)
    capsys.readouterr()
    assert again("auto").placement == "pinned"
    assert capsys.readouterr().err == ""


def test_words_of_another_vocabulary_are_another_table(two):
    first, second = two
    resident, tables = Resident(), []
    for vocabulary in (first.caption_set().vocabulary, second.caption_set().vocabulary):
        sets = second.image_set(), RetokenizedCaptions(second, vocabulary)
        batches = Batches(second, *sets, "train", placement="pinned", resident=resident, **WORDS)
        (features,) = batches.caption_features(1000)
        tables.append(features.token)
    assert not torch.equal(*tables)


def test_what_torch_keeps_of_a_gpu_s_memory_is_free(monkeypatch):
    free = [100]
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda _: (free[0], 10**9))
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: free.__setitem__(0, 1000))
    assert choose("device", 500, torch.device("cuda"), True, "features") == "device"


def test_the_bytes_are_those_of_the_arrays(cache):
    batches = batches_of(cache, "mapped")
    images, texts = cache.image_set(), cache.caption_set()
    expected = sum(read(batches.image_rows).nbytes for read in (images.local, images.global_))
    expected += sum(read(batches.caption_rows).nbytes for read in (texts.local, texts.global_, texts.token))
    assert sum(side.nbytes for side in batches._stored) == expected


def test_what_does_not_fit_is_a_sentence(cache, monkeypatch):
    monkeypatch.setattr(placement_module, "free_host_memory", lambda: 50_000)
    for placement in ("device", "pinned"):
        sentence = (
            r"390 captions \(small, train\) take 93\.3 kB, and .* has 50\.0 kB free; set runtime\.cache to stream"
        )
        with pytest.raises(RunError, match=sentence):
            batches_of(cache, placement)
    assert batches_of(cache, "stream").placement == "stream"
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda _: (4 * 10**9, 10**11))
    with pytest.raises(RunError, match=r"5\.0 GB, and cuda has 4\.0 GB free; set runtime\.cache to pinned or stream"):
        choose("device", 5 * 10**9, torch.device("cuda"), True, "these")


def test_free_memory_is_within_what_is_built_in():
    total = int(subprocess.check_output(["sh", "-c", "awk '/MemTotal/ {print $2}' /proc/meminfo"])) * 1024
    assert 0 < placement_module.free_host_memory() <= total


@pytest.mark.parametrize(
    ("folder", "limit", "used", "prefix"),
    [("", "memory.max", "memory.current", ""), ("memory", "memory.limit_in_bytes", "memory.usage_in_bytes", "total_")],
    ids=["version 2", "version 1"],
)
def test_in_a_container_what_is_used_is_not_free(folder, limit, used, prefix, tmp_path, monkeypatch):
    monkeypatch.setattr(placement_module, "_CGROUPS", tmp_path)
    files = tmp_path / folder
    files.mkdir(exist_ok=True)

    def free(**contents):
        for name, text in contents.items():
            (files / {"limit": limit, "used": used, "stat": "memory.stat"}[name]).write_text(text)
        return placement_module.free_host_memory()

    # Of 700 bytes 250 are a cache of files, which makes room.
    stat = f"anon 400\n{prefix}active_file 50\n{prefix}inactive_file 200\n{prefix}unevictable 50\n"
    assert free(limit="1000\n", used="700\n", stat=stat) == 550
    assert free(limit="100\n") == 0
    for without in ("max\n", f"{1 << 62}\n"):  # what the machine has
        assert 1 << 20 < free(limit=without) < 1 << 50


@given(st.lists(st.tuples(st.integers(0, 50), st.integers(0, 5)), max_size=8))
def test_ranges_are_those_of_python(pairs):
    start, count = (np.array([pair[i] for pair in pairs], dtype=np.int64) for i in (0, 1))
    assert ranges(start, count).tolist() == [row for a, n in pairs for row in range(a, a + n)]


# --- The order of a stream


@given(st.lists(st.integers(0, 12), min_size=1, max_size=60), st.integers(1, 5), st.integers(0, 99))
def test_a_block_order_visits_whole_groups(block, group, seed):
    block = np.array(sorted(block))
    order, groups = block_order(block, np.random.default_rng(seed), group)
    assert sorted(order.tolist()) == list(range(len(block)))
    assert sorted(b for blocks in groups for b in blocks.tolist()) == sorted(set(block.tolist()))
    assert all(len(blocks) == group for blocks in groups[:-1])
    at = 0
    for blocks in groups:
        inside = np.isin(block, blocks).sum()
        assert set(block[order[at : at + inside]].tolist()) == set(blocks.tolist())
        at += inside


def test_a_group_mixes_some_thousand_samples():
    for samples, blocks, expected in ((512, 20, 8), (64, 200, 64), (8, 600, 512), (8, 20, 20), (2560, 9, 8)):
        _, groups = block_order(np.repeat(np.arange(blocks), samples), np.random.default_rng(0))
        assert len(groups[0]) == expected


def test_a_block_order_draws_groups_and_places_evenly():
    block = np.repeat(np.arange(6), 3)
    rng = np.random.default_rng(0)
    orders = np.stack([block_order(block, rng, 2)[0] for _ in range(6000)])
    for place in (0, 5, 6, 17):  # every sample is as likely in every place
        share = np.bincount(orders[:, place], minlength=18) / len(orders)
        assert share == pytest.approx(np.full(18, 1 / 18), abs=5 * (1 / 18 / len(orders)) ** 0.5)
    together = (block[orders[:, 0]] == block[orders[:, 1]]).mean()  # two of six places are the first one's block
    assert together == pytest.approx(2 / 5, abs=0.04)


def test_the_next_group_is_opened_with_the_first_sample_of_a_group():
    groups = [np.array(shards) for shards in ([4, 1], [0, 5], [3, 2], [6])]
    opened, seen = [], []
    items = [np.array(item) for item in ([4, 1], [1], [1, 0], [5], [3, 2, 6], [6])]
    for item in opened_ahead(lambda shards: opened.append(shards.tolist()), items, lambda item: item, groups):
        time.sleep(0.02)
        seen.append((item.tolist(), len(opened)))
    assert [count for _, count in seen] == [2, 2, 3, 3, 4, 4]
    assert opened == [shards.tolist() for shards in groups]


def test_a_stream_of_an_object_store_reads_every_object_once_an_epoch(remote, monkeypatch, small_groups):
    """No more shards are kept than the groups at hand, and those are not read again."""
    store, read = remote.store, []
    found = store.find_bytes
    monkeypatch.setattr(store, "find_bytes", lambda name: read.append(name) or found(name))
    monkeypatch.setattr("xret.pipeline.rows.KEPT", 6)
    monkeypatch.setattr("xret.pipeline.rows.KEPT_BYTES", 0)
    for epoch in (0, 1):
        read.clear()
        batches = batches_of(remote, "stream")
        list(batches.epoch(unit="image", batch_size=4, seed=0, epoch=epoch))
        local = [name for name in read if "images/grid" in name and "/local/c/" in name]
        assert len(set(local)) == 20
        assert len(local) <= 21  # one was read when the array was opened
        assert len(batches.image_set._rows["local"]._shards) == 6


# --- The thread


def test_results_come_in_order_and_are_read_beside_the_work():
    reading, threads = [], set()

    def fetch(item):
        threads.add(threading.get_ident())
        reading.append(item)
        return 10 * item

    got = []
    for result in read_ahead(fetch, lambda item, fetched: (item, fetched), range(6), CPU):
        until = time.monotonic() + 5
        while max(reading) < min(len(got) + 2, 5) and time.monotonic() < until:
            time.sleep(0.001)
        time.sleep(0.01)
        got.append((result, max(reading)))
    assert [result for result, _ in got] == [(i, 10 * i) for i in range(6)]
    assert [latest for _, latest in got] == [2, 3, 4, 5, 5, 5]
    assert len(threads) == 1
    assert threading.get_ident() not in threads


def test_a_failure_is_raised_where_its_batch_is_due_and_no_thread_is_left():
    def fetch(item):
        if item == 2:
            raise CacheError("shard 2 is damaged")
        return item

    before, got = threading.active_count(), []
    with pytest.raises(CacheError, match="shard 2 is damaged"):
        got.extend(read_ahead(fetch, lambda _, fetched: fetched, range(9), CPU))
    assert got == [0, 1]
    endless = read_ahead(fetch, lambda _, fetched: fetched, iter(lambda: 7, None), CPU)
    assert next(endless) == 7
    endless.close()
    assert threading.active_count() == before


def test_waiting_is_counted(cache, monkeypatch):
    batches = batches_of(cache, "pinned")
    words = EPOCHS[0]
    fetch = batches._fetch
    steps = 0
    for _ in batches.epoch(**words):
        time.sleep(0.02)
        steps += 1
    quick = batches.waited
    monkeypatch.setattr(batches, "_fetch", lambda plan: time.sleep(0.05) or fetch(plan))
    began = time.perf_counter()
    list(batches.epoch(**words))
    assert steps * 0.05 <= batches.waited <= time.perf_counter() - began
    assert quick < batches.waited


# --- Several data sets


@pytest.fixture
def two(tmp_path):
    """Two stores of one encoder, of 20 and 12 images of train, and other words in their captions."""
    urls = [make_store(tmp_path / "a.zarr", train=20), make_store(tmp_path / "b.zarr", train=12, words="look here")]
    return [FeatureCache.open(url) for url in urls]


def joined(two, placement="mapped"):
    first, second = two
    sets = first.image_set(), first.caption_set()
    words = RetokenizedCaptions(second, sets[1].vocabulary)
    parts = [
        Batches(first, *sets, "train", placement=placement, **WORDS),
        Batches(second, second.image_set(), words, "train", placement=placement, **WORDS),
    ]
    return JoinedBatches(parts)


@pytest.mark.parametrize("placement", ["mapped", "pinned", "device", "stream"])
@pytest.mark.parametrize(("unit", "size"), [("image", 6), ("caption", 16)])
def test_joined_data_sets_are_one(two, placement, unit, size):
    batches = joined(two, placement)
    first, second = batches.parts
    assert (batches.images, batches.captions, batches.skipped) == (32, 80, 0)
    epoch = list(batches.epoch(unit=unit, batch_size=size, seed=0, epoch=0))
    assert len(epoch) == batches.steps(unit, size)
    seen, mixed = [], 0
    for batch in epoch:
        index = batch.caption_index.numpy()
        owner = np.empty(len(batch.images.length), dtype=np.int64)
        owner[batch.caption_image] = batches.caption_image[index]
        for row, image in enumerate(owner):
            part, own = (first, image) if image < 20 else (second, image - 20)
            expected = part.image_set.local(part.image_rows[[own]])[0]
            assert np.array_equal(batch.images.local[row], expected)
        for row, caption in enumerate(index):
            part, own = (first, caption) if caption < 50 else (second, caption - 50)
            token = part.caption_set.token(part.caption_rows[[own]])
            assert batch.captions.token[row].tolist() == [*token, *[0] * (batch.captions.token.shape[1] - len(token))]
            assert batch.captions.length[row] == len(token)
        seen += index.tolist()
        mixed += 0 < (owner < 20).sum() < len(owner)
    assert sorted(seen) == list(range(80))
    assert mixed > len(epoch) / 2


def test_joined_batches_are_the_same_wherever_the_features_lie(two):
    for words in ({"captions": 1, "unit": "image"}, {"unit": "caption"}):
        epochs = [
            list(joined(two, place).epoch(batch_size=9, seed=1, epoch=2, **words)) for place in ("mapped", "pinned")
        ]
        for one, other in zip(*epochs, strict=True):
            assert_equal(one, other)


def test_features_of_different_lengths_are_padded_to_the_longest():
    one = Features(torch.tensor([2, 1]), torch.ones(2, 2, 3), torch.ones(2, 5), torch.ones(2, 2, dtype=torch.int64))
    two = Features(torch.tensor([4]), torch.ones(1, 4, 3), torch.ones(1, 5), torch.ones(1, 4, dtype=torch.int64))
    got = concatenate([one, two])
    assert got.length.tolist() == [2, 1, 4]
    assert got.local[:2, :2].eq(1).all() and not got.local[:2, 2:].any() and got.local[2].eq(1).all()
    assert got.token.tolist() == [[1, 1, 0, 0], [1, 1, 0, 0], [1, 1, 1, 1]]
    assert got.global_.shape == (3, 5)
    assert concatenate([Features(torch.tensor([1])), Features(torch.tensor([1]))]).local is None


def test_what_differs_is_not_joined(two, tmp_path):
    first, second = (batches_of(cache, "mapped", WORDS) for cache in two)
    with pytest.raises(CacheError, match=r"b\.zarr cannot be joined .* another vocabulary"):
        JoinedBatches([first, second])
    other = FeatureCache.open(make_store(tmp_path / "c.zarr", train=20, weights="b"))
    with pytest.raises(CacheError, match=r"c\.zarr cannot be joined to .*a\.zarr: its images .* not of the encoder"):
        JoinedBatches([first, batches_of(other, "mapped", WORDS)])
    tokens = FeatureCache.open(make_store(tmp_path / "d.zarr", train=20, text="tokens"))
    with pytest.raises(CacheError, match="its captions 'words@"):
        JoinedBatches([batches_of(tokens, "mapped"), first])


# --- On a GPU


@pytest.mark.gpu
@needs_gpu
@pytest.mark.parametrize("words", EPOCHS)
@pytest.mark.parametrize("placement", ["device", "pinned", "mapped"])
def test_a_gpu_has_the_batches_of_a_cpu(cache, words, placement):
    here, there = batches_of(cache, "mapped"), batches_of(cache, placement, device="cuda")
    for one, other in zip(here.epoch(**words), there.epoch(**words), strict=True):
        assert other.images.local.is_cuda and other.captions.token.is_cuda
        assert_equal(one, other)


@pytest.mark.gpu
@needs_gpu
def test_a_gpu_that_is_slow_gets_no_overwritten_batch(cache):
    for placement in ("device", "pinned", "stream"):
        batches = batches_of(cache, placement, device="cuda")
        expected = [batch.images.local.double().sum().item() for batch in batches.epoch(**EPOCHS[0])]
        sums = []
        for batch in batches.epoch(**EPOCHS[0]):
            torch.cuda._sleep(20_000_000)
            sums.append(batch.images.local.double().sum())
            del batch
        assert [total.item() for total in sums] == expected
