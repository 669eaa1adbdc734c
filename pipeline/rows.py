"""Rows of a cached array, gathered from memory maps of its shards.

A Zarr slice of a sharded array decodes every block it touches; here a row of an uncompressed shard is one copy from
a map, so that a random batch costs no more than a sequential one.
"""

import struct
from pathlib import Path

import google_crc32c
import numpy as np

from .errors import CacheError
from .store import Store


class Rows:
    """Reads ranges of rows of one array of the cache.

    On a local store its files are mapped; elsewhere the array is read whole, once.

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
        self._folder = Path(store.path(name)) / "c"
        self._whole: np.ndarray | None = None if store.is_local else store.read_array(name)
        self._blocks: dict[int, list[np.ndarray]] = {}

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
        out = np.empty((int(counts.sum()), *self.row_shape), dtype=self.dtype)
        at = 0
        for row, left in zip(np.asarray(first).tolist(), counts.tolist(), strict=True):
            while left:
                taken = self._copy(row, left, out[at:])
                row, left, at = row + taken, left - taken, at + taken
        return out

    def _copy(self, row: int, count: int, out: np.ndarray) -> int:
        """Copy as many of `count` rows from `row` on as lie in one block; return how many."""
        if self._whole is not None:
            out[:count] = self._whole[row : row + count]
            return count
        shard, inside = divmod(row, self._shard)
        blocks = self._blocks.get(shard) or self._open(shard)
        block, start = divmod(inside, self._block)
        rows = blocks[block][start : start + count]
        out[: len(rows)] = rows
        return len(rows)

    def _open(self, shard: int) -> list[np.ndarray]:
        path = self._folder / "/".join([str(shard)] + ["0"] * len(self.row_shape))
        try:
            data = np.memmap(path, dtype=np.uint8, mode="r")
        except (OSError, ValueError) as error:
            raise CacheError(f"{path} is missing; run `xret cache verify`, then extract that set again") from error
        spans = self._index(data, path) if self._sharded else [(0, len(data))]
        blocks = []
        for offset, length in spans:
            body, stored = data[offset : offset + length - 4], data[offset + length - 4 : offset + length]
            if len(stored) != 4 or _crc32c(body) != struct.unpack("<I", stored.tobytes())[0]:
                raise CacheError(f"{path} is damaged (checksum); `xret cache verify` lists what is affected")
            blocks.append(body.view(self.dtype).reshape(-1, *self.row_shape))
        self._blocks[shard] = blocks
        return blocks

    def _index(self, data: np.ndarray, path: Path) -> list[tuple[int, int]]:
        """Parse the shard's index: offset and length of each block as little-endian u64, then its crc32c."""
        blocks = self._shard // self._block
        index = data[-16 * blocks - 4 :]
        if len(index) != 16 * blocks + 4 or _crc32c(index[:-4]) != struct.unpack("<I", index[-4:].tobytes())[0]:
            raise CacheError(f"{path} is damaged (index); `xret cache verify` lists what is affected")
        pairs = index[:-4].view("<u8").reshape(blocks, 2).tolist()
        return [(offset, length) for offset, length in pairs]


def _crc32c(data: np.ndarray) -> int:
    return int(google_crc32c.value(data.tobytes()))
