"""Rows of a cached array, gathered from memory maps of its shards, or from the shards themselves of an object store.

A Zarr slice of a sharded array decodes every block it touches; here a row of an uncompressed shard is one copy from
a map, so that a random batch costs no more than a sequential one.
"""

import struct
import sys
import threading

import google_crc32c
import numpy as np

from .errors import CacheError
from .store import Store

# Of an object store an array keeps its last shards: three groups of a block shuffle, and more where they are small.
KEPT, KEPT_BYTES = 24, 2 << 30
_SPARE = 4  # arrays that were handed out and may be used again


class Rows:
    """Reads ranges of rows of one array of the cache.

    On a local store its files are mapped; elsewhere a shard is read whole when one of its rows is asked for, and the
    last ones are kept: such rows are to be read in order or in a block shuffle. Two threads may read at once.

    Args:
        store: the cache's store.
        name: the array's path below it.
    """

    def __init__(self, store: Store, name: str) -> None:
        array = store.open_array(name)
        self.dtype, self.row_shape = np.dtype(array.dtype), array.shape[1:]
        self._shard = (array.shards or array.chunks)[0]
        self._block = array.chunks[0]
        self._sharded = array.shards is not None
        self._store, self._folder = store, f"{name}/c"
        self._blocks: dict[int, list[np.ndarray]] = {}  # of each open shard, the least recently opened first
        self._spare: list[np.ndarray] = []
        self._opening, self._lending = threading.Lock(), threading.Lock()

    def gather(self, first: np.ndarray, count: np.ndarray | int = 1) -> np.ndarray:
        """Return the rows ``first[i] : first[i] + count[i]`` of all i, one range after the other.

        Args:
            first: first row of each range, int64 [R].
            count: rows of each range, [R] or one number for all.

        Returns:
            An array [sum of counts, ...] in the cache's dtype.

        Raises:
            CacheError: a shard is missing or its checksum does not fit.
        """
        counts = np.broadcast_to(np.asarray(count, dtype=np.int64), np.shape(first))
        out = self._empty(int(counts.sum()))
        at = 0
        for row, left in zip(np.asarray(first).tolist(), counts.tolist(), strict=True):
            while left:
                shard, inside = divmod(row, self._shard)
                block, start = divmod(inside, self._block)
                rows = (self._blocks.get(shard) or self._open(shard))[block][start : start + left]
                taken = len(rows)
                out[at : at + taken] = rows
                row, left, at = row + taken, left - taken, at + taken
        return out

    def _empty(self, rows: int) -> np.ndarray:
        """Return an array for so many rows, in memory that was handed out before where nobody refers to it now.

        Pages that a process gets from the system are cleared first, which takes longer than the copy into them.
        """
        size = rows * int(np.prod(self.row_shape, dtype=np.int64)) * self.dtype.itemsize
        with self._lending:
            # Two references: of the list, and of the call itself. Every view of a spare array is one more.
            free = [i for i in range(len(self._spare)) if sys.getrefcount(self._spare[i]) == 2]
            found = next((i for i in free if self._spare[i].nbytes >= size), None)
            memory = np.empty(size, dtype=np.uint8) if found is None else self._spare[found]
            if found is None and free:
                self._spare[free[0]] = memory
            elif found is None and len(self._spare) < _SPARE:
                self._spare.append(memory)
        return memory[:size].view(self.dtype).reshape(rows, *self.row_shape)

    def _open(self, shard: int) -> list[np.ndarray]:
        with self._opening:
            if shard not in self._blocks:  # another thread may have opened it meanwhile
                self._blocks[shard] = self._read(shard)
                if not self._store.is_local:
                    self._forget()
            return self._blocks[shard]

    def _forget(self) -> None:
        """Let go of the shards that were read first, as long as enough others are kept."""
        size = math.prod((self._shard, *self.row_shape)) * self.dtype.itemsize
        while len(self._blocks) > max(KEPT, KEPT_BYTES // size):
            del self._blocks[next(iter(self._blocks))]

    def _read(self, shard: int) -> list[np.ndarray]:
        name = "/".join([self._folder, str(shard)] + ["0"] * len(self.row_shape))
        path = self._store.path(name)
        data = self._bytes(name)
        if data is None:
            raise CacheError(f"{path} is missing; run `xret cache verify`, then `xret extract --repair`")
        spans = self._index(data, path) if self._sharded else [(0, len(data))]
        blocks = []
        for offset, length in spans:
            body, stored = data[offset : offset + length - 4], data[offset + length - 4 : offset + length]
            if len(stored) != 4 or _crc32c(body) != struct.unpack("<I", stored.tobytes())[0]:
                raise CacheError(f"{path} is damaged (checksum); `xret cache verify` lists what is affected")
            blocks.append(body.view(self.dtype).reshape(-1, *self.row_shape))
        return blocks

    def _bytes(self, name: str) -> np.ndarray | None:
        if not self._store.is_local:
            data = self._store.find_bytes(name)
            return None if data is None else np.frombuffer(data, dtype=np.uint8)
        try:
            return np.memmap(self._store.path(name), dtype=np.uint8, mode="r")
        except (OSError, ValueError):  # an empty file cannot be mapped
            return None

    def _index(self, data: np.ndarray, path: str) -> list[tuple[int, int]]:
        """Parse the shard's index: offset and length of each block as little-endian u64, then its crc32c."""
        blocks = self._shard // self._block
        index = data[-16 * blocks - 4 :]
        if len(index) != 16 * blocks + 4 or _crc32c(index[:-4]) != struct.unpack("<I", index[-4:].tobytes())[0]:
            raise CacheError(f"{path} is damaged (index); `xret cache verify` lists what is affected")
        pairs = index[:-4].view("<u8").reshape(blocks, 2).tolist()
        return [(offset, length) for offset, length in pairs]


def _crc32c(data: np.ndarray) -> int:
    return int(google_crc32c.value(data.tobytes()))
