"""The memory-map reader against Zarr itself."""

import threading
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from xret.pipeline.cache.rows import Buffers, Rows, ranges
from xret.pipeline.cache.storage.store import Store
from xret.pipeline.errors import CacheError

ROWS = 48


@pytest.fixture(scope="module", params=["sharded", "one block a file"])
def array(request, tmp_path_factory):
    store = Store(str(tmp_path_factory.mktemp("rows") / "s.zarr"))
    store.fs.makedirs(store.root)
    inner = 4 if request.param == "sharded" else None
    store.create_array("a", (ROWS, 3, 2), 16, "float16", inner=inner)
    values = np.random.default_rng(0).normal(size=(ROWS, 3, 2)).astype(np.float16)
    store.open_array("a", writable=True)[...] = values
    return store, values


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=50)
@given(pairs=st.lists(st.tuples(st.integers(0, ROWS), st.integers(0, 20)), max_size=6))
def test_any_ranges_equal_slices(array, pairs):
    store, values = array
    pairs = [(first, min(count, ROWS - first)) for first, count in pairs]
    expected = [values[first : first + count] for first, count in pairs]
    got = Rows(store, "a").gather(
        np.array([r[0] for r in pairs], dtype=int), np.array([r[1] for r in pairs], dtype=int)
    )
    assert np.array_equal(got, np.concatenate([values[:0], *expected]))
    assert got.dtype == values.dtype


@pytest.mark.parametrize("inner", [4, None])
@pytest.mark.parametrize("is_local", [True, False])
def test_each_view_is_read_from_files_of_its_own(tmp_path, monkeypatch, inner, is_local):
    store = Store(str(tmp_path / "s.zarr"))
    store.fs.makedirs(store.root)
    store.create_array("a", (ROWS, 5, 3, 2), 16, "float16", inner=inner, apart=True)
    values = np.random.default_rng(0).normal(size=(ROWS, 5, 3, 2)).astype(np.float16)
    store.open_array("a", writable=True)[...] = values
    if not is_local:
        store.is_local, store._zarr = False, lambda writable: store.root
    opened, original = [], Rows._bytes
    monkeypatch.setattr(Rows, "_bytes", lambda rows, name: opened.append(name) or original(rows, name))
    rows, at = Rows(store, "a", views=5), np.random.default_rng(1).integers(0, ROWS - 1, size=40)
    assert np.array_equal(rows.gather(at, view=3), values[at, 3])
    assert {name.split("/")[3] for name in opened} == {"3"}
    view = np.arange(40) % 5
    assert np.array_equal(rows.gather(at, view=view), values[at, view])
    pairs = np.stack([values[at, view], values[at + 1, view]], axis=1)
    assert np.array_equal(rows.gather(at, 2, view), pairs.reshape(80, 3, 2))


def test_a_store_that_is_not_local_is_read_through_zarr(array):
    store, values = array
    remote = Store(store.url)
    remote.is_local = False
    remote._zarr = lambda writable: store.root
    assert np.array_equal(Rows(remote, "a").gather(np.array([40, 3]), 2), values[[40, 41, 3, 4]])


@pytest.mark.parametrize("where", [0, 37, -1, -20])
def test_a_flipped_byte_is_an_error(tmp_path, where):
    store = Store(str(tmp_path / "s.zarr"))
    store.fs.makedirs(store.root)
    store.create_array("a", (16, 8), 16, "float16", inner=8)
    store.open_array("a", writable=True)[...] = np.ones((16, 8))
    path = tmp_path / "s.zarr" / "a" / "c" / "0" / "0"
    data = bytearray(path.read_bytes())
    data[where] ^= 0x10
    path.write_bytes(data)
    with pytest.raises(CacheError, match="is damaged"):
        Rows(store, "a").gather(np.array([0]))


def test_a_block_is_checked_when_it_is_read_and_not_before(tmp_path):
    store = Store(str(tmp_path / "s.zarr"))
    store.fs.makedirs(store.root)
    store.create_array("a", (16, 8), 16, "float16", inner=4)
    store.open_array("a", writable=True)[...] = np.arange(16)[:, None]
    path = tmp_path / "s.zarr" / "a" / "c" / "0" / "0"
    data = bytearray(path.read_bytes())
    data[2 * (4 * 16 + 4) + 5] ^= 0x10  # in the third block
    path.write_bytes(data)
    rows = Rows(store, "a")
    assert rows.gather(np.array([15, 0, 7]))[:, 3].tolist() == [15, 0, 7]
    for _ in range(2):
        with pytest.raises(CacheError, match=r"c/0/0 is damaged \(checksum\)"):
            rows.gather(np.array([6]), 3)
    assert rows.gather(np.array([4]), 4)[:, 0].tolist() == [4, 5, 6, 7]


def test_a_missing_shard_is_an_error(tmp_path):
    store = Store(str(tmp_path / "s.zarr"))
    store.fs.makedirs(store.root)
    store.create_array("a", (16, 8), 16, "float16", inner=8)
    with pytest.raises(CacheError, match="is missing"):
        Rows(store, "a").gather(np.array([0]))


def test_memory_is_used_again_once_nobody_looks_at_it():
    buffers, dtype = Buffers(), np.dtype(np.float16)
    first = buffers.empty((5, 4), dtype)
    address = first.ctypes.data
    view = first[1:3]
    del first
    other = buffers.empty((5, 4), dtype)  # the first one is still looked at
    assert other.ctypes.data != address
    del view
    smaller = buffers.empty((2, 3, 2), dtype)
    assert smaller.ctypes.data == address and smaller.shape == (2, 3, 2) and smaller.dtype == dtype
    del smaller
    larger = buffers.empty((50, 4), dtype)
    larger[:], other[:] = 1, 2
    assert larger.sum() == 200 and other.sum() == 40
    assert buffers.empty((0, 4), dtype).shape == (0, 4)
    many = [buffers.empty((9,), dtype) for _ in range(9)]
    assert len({array.ctypes.data for array in many}) == 9  # none of them shares its memory


@given(st.lists(st.tuples(st.integers(0, 50), st.integers(0, 5)), max_size=8))
def test_ranges_are_those_of_python(pairs):
    start, count = (np.array([pair[i] for pair in pairs], dtype=np.int64) for i in (0, 1))
    assert ranges(start, count).tolist() == [row for a, n in pairs for row in range(a, a + n)]


def test_a_shard_that_is_there_does_not_wait_for_one_on_its_way(tmp_path, monkeypatch):
    store = Store(str(tmp_path / "s.zarr"))
    store.fs.makedirs(store.root)
    store.create_array("a", (32, 8), 16, "float16", inner=4)
    store.open_array("a", writable=True)[...] = np.arange(32)[:, None]
    rows, fetching, go_on = Rows(store, "a"), threading.Event(), threading.Event()
    rows.gather(np.array([0]))
    whole = Rows._open

    def slow(self, of_shard):
        fetching.set()
        assert go_on.wait(10)
        return whole(self, of_shard)

    monkeypatch.setattr(Rows, "_open", slow)
    with ThreadPoolExecutor(1) as pool:
        other = pool.submit(rows.gather, np.array([17]))
        assert fetching.wait(10)
        assert rows.gather(np.array([9]))[0, 0] == 9  # another block of the first shard
        assert not other.done()
        go_on.set()
        assert other.result()[0, 0] == 17
