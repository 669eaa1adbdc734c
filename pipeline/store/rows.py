"""Arrays of a store: rows gathered from memory maps of their chunk files, or from the chunks of an object store.

A chunk is uncompressed rows and a crc32c, so that a row is one copy from a map: a random batch costs no more than a
sequential one, where a Zarr slice would read every chunk that it touches.
"""

import math
import threading
from collections import OrderedDict, deque
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import google_crc32c
import numpy as np
import zarr

from ..data.texts import ranges
from ..errors import CacheError
from ..wording import reason
from .folder import Folder

_KEPT = 2 << 30  # bytes of chunks of an object store that stay in memory
_AT_ONCE = 128 << 20  # bytes of chunks that an object store sends at once, so that its latency counts but once


class StoredArray:
    """An array whose first axis are samples; several threads may read it at once.

    `gather` takes each of several views, the second axis, for a row of its own: ``sample * views + view``.
    """

    advice = "run `xret cache verify`, then the extraction with --repair"  # on a chunk that is missing or damaged
    reused = range(1 << 20, 1 << 28)  # bytes of results whose memory is used again: new pages cost as much as the copy

    def __init__(self, folder: Folder, array: "zarr.Array[Any]", views: int = 1) -> None:
        self.folder, self.name = folder, array.path
        self.shape, self.chunk_rows = array.shape, array.chunks[0]
        self.dtype, self.fill = np.dtype(array.dtype), array.fill_value
        self._row_shape = array.shape[1 if views == 1 else 2 :]
        self._rows, self._in_chunk = array.shape[0] * views, self.chunk_rows * views
        self._row_bytes = math.prod(self._row_shape) * self.dtype.itemsize
        self._chunks: OrderedDict[int, np.ndarray] = OrderedDict()  # uint8 [rows, row_bytes]
        self._lock = threading.Lock()
        self._spare = deque[np.ndarray](maxlen=4)  # memory of results that nobody holds any more

    def gather(self, first: np.ndarray, count: np.ndarray | int = 1) -> np.ndarray:
        """Return the rows ``first[i] : first[i] + count[i]`` of all i, one range after the other, [sum of counts, …].

        `first` is int64 [R], `count` too, or one number for all. CacheError: a chunk is missing or damaged, or there
        are no such rows.
        """
        first = np.asarray(first, dtype=np.int64)
        counts = np.broadcast_to(np.asarray(count, dtype=np.int64), first.shape)
        if ((first < 0) | (counts < 0) | (first > self._rows - counts)).any():
            raise CacheError(f"{self.folder.path(self.name)} has no such rows; extract again with --repair")
        out = self._empty(int(counts.sum()))
        chunks, length, pieces = self._chunks, self._in_chunk, list[np.ndarray]()
        touched = [] if self.folder.is_local else _touched(first // length, -(-(first + counts) // length))
        numbers, places = np.divmod(first, length)
        for number, inside, left in zip(numbers.tolist(), places.tolist(), counts.tolist(), strict=True):
            while left > 0:
                rows = chunks[number] if number in chunks else self._open(number, touched)
                piece = rows[inside : inside + left]
                pieces.append(piece if self.folder.is_local else piece.copy())  # a view would keep a fetched chunk
                number, inside, left = number + 1, 0, left - (length - inside)
        if pieces:
            np.concatenate(pieces, out=out)
        return out.view(self.dtype).reshape(-1, *self._row_shape)

    def _empty(self, rows: int) -> np.ndarray:
        """Return rows of bytes, in the memory of an earlier result where one is spare and large enough."""
        shape, size = (rows, self._row_bytes), rows * self._row_bytes
        if size not in self.reused:
            return np.empty(shape, np.uint8)
        memory = np.empty(0, np.uint8)
        with suppress(IndexError):  # none is left
            while len(memory) < size:
                memory = self._spare.pop()
        if len(memory) < size:
            memory = np.empty(size + size // 8, np.uint8)
        return np.asarray(_Lent(memory, self._spare))[:size].reshape(shape)

    def whole(self, numbers: Sequence[int]) -> np.ndarray:
        """Return all samples: those of the chunks of these numbers, and the fill value elsewhere."""
        out = self.blank(self.shape[0])
        for number, data in zip(numbers, self.folder.read(*map(self.file, numbers)), strict=True):
            out[number * self.chunk_rows : (number + 1) * self.chunk_rows] = self.decoded(number, data)
        return out

    def blank(self, rows: int) -> np.ndarray:
        """Return so many samples of the fill value."""
        return np.full((rows, *self.shape[1:]), self.fill, self.dtype)

    def decoded(self, number: int, data: bytes | None) -> np.ndarray:
        """Return the samples of a chunk, whose file has this content; CacheError: it is missing or damaged."""
        rows = self._checked(number, data).view(self.dtype).reshape(-1, *self.shape[1:])
        return rows[: max(0, self.shape[0] - number * self.chunk_rows)]

    def encoded(self, values: np.ndarray) -> tuple[Any, bytes]:
        """Return the content of a chunk's file, as Zarr writes it: samples filled up to its size, and their crc32c.

        Zarr would write all chunks in one thread, one after the other, each synced to the disk.
        """
        rows = np.ascontiguousarray(values, self.dtype)
        if len(rows) < self.chunk_rows:
            rows = np.concatenate([rows, self.blank(self.chunk_rows - len(rows))])
        data = rows.ravel().view(np.uint8)
        return data, google_crc32c.value(data).to_bytes(4, "little")

    def file(self, number: int) -> str:
        """Return the file of a chunk."""
        return f"{self.name}/c.{number}" + ".0" * (len(self.shape) - 1)

    def _open(self, number: int, touched: list[int]) -> np.ndarray:
        """Map a chunk, or fetch it together with those that are touched next."""
        with self._lock:  # two threads that want a chunk read it once
            if (found := self._chunks.get(number)) is not None:
                return found
            if self.folder.is_local:
                found = self._chunks[number] = self._checked(number, self._map(self.file(number)))
                return found
            size = self._in_chunk * self._row_bytes
            lacking = [other for other in touched[touched.index(number) :] if other not in self._chunks]
            numbers = lacking[: max(1, _AT_ONCE // size)]
            for other, data in zip(numbers, self.folder.read(*map(self.file, numbers)), strict=True):
                self._chunks[other] = self._checked(other, data)
            found = self._chunks[number]
            while len(self._chunks) * size > _KEPT and len(self._chunks) > 1:
                self._chunks.popitem(last=False)
            return found

    def _checked(self, number: int, data: bytes | np.ndarray | None) -> np.ndarray:
        """Return the rows of a chunk, uint8 [rows, row_bytes], whose checksum fits."""
        size = self._in_chunk * self._row_bytes
        if (
            data is None
            or len(data) != size + 4
            or google_crc32c.value(data[:size]) != int.from_bytes(data[-4:], "little")
        ):
            what = "missing" if data is None else "damaged"
            raise CacheError(f"{self.folder.path(self.file(number))} is {what}; {self.advice}")
        return np.frombuffer(data, np.uint8, size).reshape(self._in_chunk, -1)

    def _map(self, name: str) -> np.ndarray | None:
        import torch

        path = self.folder.path(name)
        try:
            size = Path(path).stat().st_size
            # Unlike NumPy's, torch's maps hold no file descriptor, of which a process may have but a thousand.
            return torch.from_file(path, shared=False, size=size, dtype=torch.uint8).numpy() if size else np.empty(0)
        except FileNotFoundError:
            return None
        except (OSError, RuntimeError) as error:  # torch raises RuntimeError where a file cannot be opened
            raise CacheError(f"{path} cannot be opened ({reason(error)})") from error


class _Lent:
    """The memory of an array and its views, which comes back when the last of them is gone."""

    def __init__(self, memory: np.ndarray, spare: deque[np.ndarray]) -> None:
        self.memory, self.spare, self.__array_interface__ = memory, spare, memory.__array_interface__

    def __del__(self) -> None:
        self.spare.append(self.memory)


def _touched(first: np.ndarray, last: np.ndarray) -> list[int]:
    """Return the chunks of ranges ``first[i] : last[i]`` in the order in which they are read, each once."""
    numbers, places = np.unique(ranges(first, last - first), return_index=True)
    return [*map(int, numbers[np.argsort(places)])]


class SampleArray(StoredArray):
    """An array of the samples, whose few chunks are read without torch, whose start takes seconds."""

    advice = "copy the store again, or extract into another --store"
    reused = range(0)  # read now and then: spare memory would only lie there

    def few(self, rows: np.ndarray) -> np.ndarray:
        """Return these rows, of a number each, from one chunk after the other."""
        numbers, places = np.divmod(rows, self.chunk_rows)
        out, touched = np.empty(len(rows), self.dtype), np.unique(numbers).tolist()
        for number in touched:
            here = numbers == number
            out[here] = self._open(number, touched).view(self.dtype)[places[here], 0]
        return out

    def _map(self, name: str) -> np.ndarray | None:
        try:
            return np.memmap(self.folder.path(name), np.uint8, "r")
        except FileNotFoundError:
            return None
        except ValueError:  # it is empty
            return np.empty(0, np.uint8)
