"""Numbers and texts of millions of samples, which are appended and read, and take next to no memory.

They lie in files without a name, whose pages the system takes away where it needs memory; a few stay in memory.
"""

from array import array
from collections.abc import Iterable, Iterator, Sequence
from hashlib import blake2b
from io import FileIO
from itertools import count, pairwise
from tempfile import TemporaryFile
from typing import Any, overload

import numpy as np

from ..errors import OutputError
from ..wording import reason

_BLOCK = 1 << 14  # texts that are joined together
_PENDING = 1 << 18  # numbers that are written together


class Column:
    """Numbers of a type as in `array.array`."""

    def __init__(self, kind: str) -> None:
        self._pending = array(kind)
        self._file: FileIO | None = None

    def append(self, number: int) -> None:
        """Add a number at the end."""
        self._pending.append(number)
        if len(self._pending) >= _PENDING:
            self._write()

    def extend(self, numbers: bytes) -> None:
        """Add numbers that are bytes."""
        self._pending.frombytes(numbers)
        if len(self._pending) >= _PENDING:
            self._write()

    def _write(self) -> None:
        try:
            self._file = self._file or TemporaryFile(buffering=0)  # noqa: SIM115 -- it goes with the column
            left = memoryview(self._pending).cast("B")
            while left:
                left = left[self._file.write(left) :]
        except OSError as error:
            raise OutputError(
                f"a temporary file of names and texts cannot be written ({reason(error)}); set TMPDIR to a folder that"
                " has room for it"
            ) from error
        self._pending = array(self._pending.typecode)

    def read(self) -> np.ndarray:
        """Return all numbers, which are not to be changed."""
        if self._file is None:
            return np.array(self._pending)
        self._write()
        return np.asarray(np.memmap(self._file, self._pending.typecode, "r"))

    def __del__(self) -> None:
        if self._file is not None:
            self._file.close()


class Texts(Sequence[str]):
    """Texts; halves of character pairs stay as they are."""

    def __init__(self, texts: Iterable[str] = ()) -> None:
        self._data, self._edges, self._count, self._end = Column("B"), Column("q"), 0, 0
        self._edges.append(0)
        self._views: tuple[memoryview, memoryview] | None = None
        for text in texts:
            self.append(text)

    def __reduce__(self) -> tuple[Any, ...]:
        return Texts, ([*self],)

    def append(self, text: str) -> None:
        """Add a text at the end."""
        data = text.encode("utf-8", "surrogatepass")
        self._data.extend(data)
        self._count, self._end, self._views = self._count + 1, self._end + len(data), None
        self._edges.append(self._end)

    def _read(self) -> tuple[memoryview, memoryview]:
        """Return the bytes of all, and where each begins."""
        if self._views is None:
            self._views = self._data.read().data, self._edges.read().data
        return self._views

    def offsets(self, rows: np.ndarray) -> Iterator[np.ndarray]:
        """Yield where each of the texts in these rows begins among all their bytes, and last where all end."""
        edges, end = np.asarray(self._read()[1]), 0
        yield np.zeros(1, np.int64)
        for part in blocks_of(rows):
            ends = end + np.cumsum(edges[part + 1] - edges[part])
            yield ends
            end = int(ends[-1])

    def size(self, rows: np.ndarray) -> int:
        """Return the bytes of the texts in these rows together."""
        edges = np.asarray(self._read()[1])
        return sum(int((edges[part + 1] - edges[part]).sum()) for part in blocks_of(rows))

    def in_blocks(self, rows: np.ndarray) -> Iterator[Iterator[memoryview]]:
        """Yield the bytes of each of the texts in these rows, some thousand texts at a time."""
        data, edges = self._read()
        ends = np.asarray(edges)
        for part in blocks_of(rows):
            yield (data[a:b] for a, b in zip(ends[part].tolist(), ends[part + 1].tolist(), strict=True))

    def __len__(self) -> int:
        return self._count

    def __iter__(self) -> Iterator[str]:
        data, edges = self._read()
        return (str(data[a:b], "utf-8", "surrogatepass") for a, b in pairwise(edges))

    @overload
    def __getitem__(self, row: int) -> str: ...
    @overload
    def __getitem__(self, row: slice) -> list[str]: ...
    def __getitem__(self, row: int | slice) -> str | list[str]:
        if isinstance(row, slice):
            return [self[one] for one in range(*row.indices(len(self)))]
        row = row if row >= 0 else len(self) + row
        data, edges = self._read()
        return str(data[edges[row] : edges[row + 1]], "utf-8", "surrogatepass")


def blocks_of(rows: np.ndarray) -> Iterator[np.ndarray]:
    """Yield some thousand rows at a time."""
    return (rows[first : first + _BLOCK] for first in range(0, len(rows), _BLOCK))


def text_hashes(texts: Iterable[bytes | memoryview]) -> np.ndarray:
    """Return 64 bits of the BLAKE2b of each text, int64: different texts have the same ones once in 2 ** 64 pairs."""
    return np.frombuffer(b"".join(blake2b(text, digest_size=8).digest() for text in texts), "<i8")


def distinct(texts: Sequence[str]) -> tuple[np.ndarray, np.ndarray]:
    """Return the first row of each different text, ascending, and for each text which of these it equals, as integers.

    Their hashes are compared; should different texts have the same one, other hashes are.
    """
    for salt in count():  # without end: the last one returns
        hashes = np.fromiter((hash((salt, text)) for text in texts), np.int64, len(texts))
        ordered = np.sort(hashes)
        if (ordered[1:] != ordered[:-1]).all():
            return (rows := np.arange(len(texts), dtype=np.int32)), rows
        order = np.argsort(hashes, kind="stable")
        new = np.append(True, ordered[1:] != ordered[:-1])
        first = order[new]  # by hash; of equal texts the first row
        which = np.empty(len(texts), np.int64)
        which[order] = np.argsort(np.argsort(first))[np.cumsum(new) - 1]
        first.sort()
        same = first[which]
        if all(texts[row] == texts[same[row]] for row in np.flatnonzero(same != np.arange(len(texts))).tolist()):
            return first, which
    raise AssertionError("hashes with another salt differ")


def repeated(texts: Sequence[str]) -> tuple[int, int] | None:
    """Return the rows in which a text stands for the first and the second time, of the second that comes first."""
    first, which = distinct(texts)
    again = np.flatnonzero(first[which] != np.arange(len(texts)))
    return (int(first[which[again[0]]]), int(again[0])) if len(again) else None


def grouped(texts: Sequence[str]) -> tuple[np.ndarray, np.ndarray]:
    """Return the rows, those of one text together and in the order of the first, and where each text begins, int32."""
    first, which = distinct(texts)
    if len(first) == len(texts):
        return which, np.arange(len(texts) + 1, dtype=np.int32)
    order = np.argsort(which, kind="stable").astype(np.int32)
    edges = np.flatnonzero(np.diff(which[order], prepend=-1, append=-1)).astype(np.int32)
    return order, edges


def ranges(start: np.ndarray, count: np.ndarray) -> np.ndarray:
    """Return the numbers ``start[i] … start[i] + count[i] - 1`` of all i, one range after the other, int64."""
    if (count == 1).all():
        return np.asarray(start, np.int64)
    ends = np.cumsum(count)
    numbers = np.repeat(start - ends + count, count)
    numbers += np.arange(len(numbers))
    return numbers
