"""Rows of a cached array, gathered from memory maps of its shards, or from the shards themselves of an object store.

A Zarr slice of a sharded array decodes every block it touches; here a row of an uncompressed shard is one copy from
a map, so that a random batch costs no more than a sequential one.
"""

import math
import struct
import sys
import threading
from collections.abc import Callable

import numpy as np

from ..errors import CacheError
from .storage.folder import forbidden
from .storage.seals import crc32c, seal
from .storage.store import Store

# An array in an object store keeps its last shards: at least so many, the three groups of a block shuffle of shards of
# 512 images, and more of smaller ones, up to so many bytes.
KEPT, KEPT_BYTES = 24, 2 << 30


class Rows:
    """Reads ranges of rows of the array `name` of a store.

    On a local store its files are mapped. Elsewhere a shard is read whole when one of its rows is needed, and the last
    ones are kept: rows should then be read in order or in a block shuffle. Two threads may read at once.

    With `views` above one the array's second axis are the views of a sample, each view in files of its own; a row is
    then that of one view. `sealed` gives what the files of a shard must fit, if anything.
    """

    def __init__(
        self, store: Store, name: str, views: int = 1, sealed: Callable[[int], list[int] | None] = lambda _: None
    ) -> None:
        array = store.open_array(name)
        self.dtype, self.row_shape = np.dtype(array.dtype), array.shape[1 if views == 1 else 2 :]
        self._row_bytes = math.prod(self.row_shape) * self.dtype.itemsize
        self._block_rows = array.chunks[0]
        self._sharded = array.shards is not None
        self._per_shard, self._rows = (array.shards or array.chunks)[0] // self._block_rows, array.shape[0]
        self._store, self._name, self._views, self._sealed = store, name, views, sealed
        # Files are counted shard by shard, in a shard view by view, and so are their blocks.
        self._shards: dict[int, _Shard] = {}  # those that are open, the first opened first
        self._blocks: dict[int, np.ndarray] = {}  # of the open shards, those that were checked, uint8 [rows, row_bytes]
        self._opening, self._keeping = threading.Lock(), threading.Lock()
        self._buffers = Buffers()

    def gather(self, first: np.ndarray, count: np.ndarray | int = 1, view: np.ndarray | int = 0) -> np.ndarray:
        """Return the rows ``first[i] : first[i] + count[i]`` of all i, one range after the other.

        Args:
            first: first row of each range, int64 [R].
            count: rows of each range, [R] or one number for all.
            view: of which view, [R] or one number for all.

        Returns:
            An array [sum of counts, ...] in the cache's dtype.

        Raises:
            CacheError: a shard is missing, or its size or checksum does not fit; or the array has not so many rows.
        """
        first = np.asarray(first, dtype=np.int64)
        counts = np.broadcast_to(np.asarray(count, dtype=np.int64), first.shape)
        if ((first < 0) | (counts < 0) | (first > self._rows - counts)).any():
            raise CacheError(f"{self._store.path(self._name)} has not the rows that its set names; get that store anew")
        pieces = self._pieces(first, counts, view)
        if pieces[0] and pieces[0][0] not in self._blocks:  # memory is made for what a file has
            self._block(pieces[0][0])
        out = self._buffers.empty((int(counts.sum()), self._row_bytes), np.dtype(np.uint8))
        blocks, at = self._blocks, 0
        for number, start, stop in zip(*pieces, strict=True):
            rows = blocks.get(number)
            if rows is None:
                rows = self._block(number)
            end = at + stop - start
            # NumPy's own loop: the C library copies so few bytes with `rep movsb`, which on AMD takes twice as long,
            # and four times as long from an odd address, such as that of a block after another's checksum.
            np.positive(rows[start:stop], out[at:end])
            at = end
        return out.view(self.dtype).reshape(-1, *self.row_shape)

    def checksums(self, shard: int) -> list[np.ndarray]:
        """Return the stored checksums of the blocks in each file of a shard, one a view; errors as for `gather`."""
        return [self._opened(shard * self._views + view).checksums() for view in range(self._views)]

    def _pieces(
        self, first: np.ndarray, counts: np.ndarray, view: np.ndarray | int
    ) -> tuple[list[int], list[int], list[int]]:
        """Cut ranges where blocks end; return each piece's block, and its rows there [start, stop)."""
        length = self._block_rows
        last = first + counts
        begin, end = first // length, -(-last // length)
        pieces = np.where(counts > 0, end - begin, 0)
        of_range = np.repeat(np.arange(len(first)), pieces)
        block = ranges(begin, pieces)
        start = np.maximum(first[of_range] - block * length, 0)
        stop = np.minimum(last[of_range] - block * length, length)
        if self._views > 1:
            shard, inside = np.divmod(block, self._per_shard)
            of_view = np.broadcast_to(np.asarray(view, dtype=np.int64), first.shape)[of_range]
            block = (shard * self._views + of_view) * self._per_shard + inside
        return block.tolist(), start.tolist(), stop.tolist()

    def _block(self, number: int) -> np.ndarray:
        """Return a block that is not in memory, checked, from its shard, which is opened if need be."""
        of_shard, inside = divmod(number, self._per_shard)
        shard = self._shards.get(of_shard) or self._opened(of_shard)
        block = shard.block(inside)
        with self._keeping:
            if of_shard in self._shards:  # it may have been closed meanwhile
                self._blocks[number] = block
        return block

    def _opened(self, of_shard: int) -> "_Shard":
        with self._opening:  # of two threads that want a shard only one fetches it
            shard = self._shards.get(of_shard)
            if shard is None:
                shard = self._open(of_shard)
                with self._keeping:
                    self._shards[of_shard] = shard
                    size = self._per_shard * self._block_rows * self._row_bytes
                    if not self._store.is_local and len(self._shards) > max(KEPT * self._views, KEPT_BYTES // size):
                        self._close(next(iter(self._shards)))
            return shard

    def _close(self, of_shard: int) -> None:
        del self._shards[of_shard]
        for number in range(of_shard * self._per_shard, (of_shard + 1) * self._per_shard):
            self._blocks.pop(number, None)

    def _open(self, of_shard: int) -> "_Shard":
        number, view = divmod(of_shard, self._views)
        place = [str(number)] if self._views == 1 else [str(number), str(view)]
        name = "/".join([self._name, "c", *place] + ["0"] * len(self.row_shape))
        path = self._store.path(name)
        data = self._bytes(name)
        if data is None:
            raise CacheError(f"{path} is missing; run `xret cache verify`, then `xret extract --repair`")
        blocks = self._per_shard if self._sharded else None
        shard = _Shard(data, path, self._row_bytes, self._per_shard * self._block_rows, blocks)
        sealed = self._sealed(number)
        if sealed is not None and seal(self._name, number, view, shard.checksums()) != sealed[view]:
            raise CacheError(f"{path} is not what was written there; `xret cache verify` lists what is affected")
        return shard

    def _bytes(self, name: str) -> np.ndarray | None:
        if not self._store.is_local:
            data = self._store.find_bytes(name)
            return None if data is None else np.frombuffer(data, dtype=np.uint8)
        try:
            # As a plain array: each slice of a memmap runs through Python.
            return np.memmap(self._store.path(name), dtype=np.uint8, mode="r").view(np.ndarray)
        except PermissionError as error:
            raise forbidden(self._store.path(name)) from error
        except (OSError, ValueError):  # an empty file cannot be mapped
            return None


class _Shard:
    """One file: uncompressed blocks, each followed by its checksum, and an index unless it is a single block.

    Args:
        data: the file's bytes.
        path: for messages.
        row_bytes: of a row.
        rows: how many it must have.
        blocks: how many the index at the end has; None: the file is one block.

    Raises:
        CacheError: it is of another size, or its index is damaged.
    """

    def __init__(self, data: np.ndarray, path: str, row_bytes: int, rows: int, blocks: int | None) -> None:
        self._data, self._path, self._row_bytes = data, path, row_bytes
        self._block_bytes = rows * row_bytes // (blocks or 1) + 4
        if len(data) != self._block_bytes * (blocks or 1) + (16 * blocks + 4 if blocks else 0):
            raise CacheError(f"{path} is damaged (size); `xret cache verify` lists what is affected")
        self._spans = [(0, len(data))] if blocks is None else self._index(blocks)

    def block(self, number: int) -> np.ndarray:
        """Check a block and return its rows as bytes, uint8 [rows, row_bytes].

        Raises:
            CacheError: its checksum does not fit.
        """
        offset, length = self._spans[number]
        body, stored = self._data[offset : offset + length - 4], self._data[offset + length - 4 : offset + length]
        if length != self._block_bytes or len(stored) != 4 or crc32c(body) != struct.unpack("<I", stored.tobytes())[0]:
            raise CacheError(f"{self._path} is damaged (checksum); `xret cache verify` lists what is affected")
        return body.reshape(-1, self._row_bytes)

    def checksums(self) -> np.ndarray:
        """Return the stored checksums of the blocks, uint32; they are checked with the blocks."""
        ends = [self._data[offset + length - 4 : offset + length] for offset, length in self._spans]
        return np.concatenate(ends).view("<u4") if all(len(end) == 4 for end in ends) else np.zeros(0, np.uint32)

    def _index(self, blocks: int) -> list[tuple[int, int]]:
        """Parse the index: offset and length of each block as little-endian u64, then its crc32c."""
        index = self._data[-16 * blocks - 4 :]
        if len(index) != 16 * blocks + 4 or crc32c(index[:-4]) != struct.unpack("<I", index[-4:].tobytes())[0]:
            raise CacheError(f"{self._path} is damaged (index); `xret cache verify` lists what is affected")
        pairs = index[:-4].view("<u8").reshape(blocks, 2).tolist()
        return [(offset, length) for offset, length in pairs]


class Buffers:
    """Hands out arrays in memory that was handed out before and that nobody refers to any more.

    New pages are cleared by the system first, which takes longer than the copy into them.
    """

    _KEPT = 4

    def __init__(self) -> None:
        self._memory: list[np.ndarray] = []
        self._lending = threading.Lock()

    def empty(self, shape: tuple[int, ...], dtype: np.dtype) -> np.ndarray:
        """Return an array with any values."""
        size = math.prod(shape) * dtype.itemsize
        with self._lending:
            # Two references: of the list, and of the call itself. An array that was handed out is one more.
            free = [i for i in range(len(self._memory)) if sys.getrefcount(self._memory[i]) == 2]
            found = next((i for i in free if self._memory[i].nbytes >= size), None)
            memory = np.empty(size, dtype=np.uint8) if found is None else self._memory[found]
            if found is None and free:
                self._memory[free[0]] = memory
            elif found is None and len(self._memory) < self._KEPT:
                self._memory.append(memory)
        return memory[:size].view(dtype).reshape(shape)


def ranges(start: np.ndarray, count: np.ndarray) -> np.ndarray:
    """Return the numbers ``start[i] … start[i] + count[i] - 1`` of all i, one range after the other, int64."""
    ends = np.cumsum(count)
    return np.repeat(start - ends + count, count) + np.arange(ends[-1] if len(ends) else 0)
