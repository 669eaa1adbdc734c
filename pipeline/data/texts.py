"""Texts in one buffer, at eight bytes each over their own, where a list of `str` takes sixty."""

from array import array
from collections.abc import Iterable, Iterator, Sequence
from hashlib import blake2b
from itertools import count, pairwise
from typing import overload

import numpy as np

_BLOCK = 1 << 14  # texts that are joined together


class Texts(Sequence[str]):
    """Texts, which are appended and read."""

    def __init__(self, texts: Iterable[str] = ()) -> None:
        self._data, self._edges = bytearray(), array("q", [0])
        for text in texts:
            self.append(text)

    def append(self, text: str) -> None:
        """Add a text at the end; halves of character pairs stay as they are."""
        self._data += text.encode("utf-8", "surrogatepass")
        self._edges.append(len(self._data))

    def lengths(self) -> np.ndarray:
        """Return the bytes of each text, int64."""
        return np.diff(np.frombuffer(self._edges, np.int64))

    def in_blocks(self, rows: np.ndarray) -> Iterator[np.ndarray]:
        """Yield the bytes of the texts in these rows, uint8, some thousand texts at a time."""
        return (np.frombuffer(b"".join(pieces), np.uint8) for pieces in self._pieces(rows))

    def hashes(self, rows: np.ndarray) -> Iterator[np.ndarray]:
        """Yield `text_hashes` of the texts in these rows, some thousand texts at a time."""
        return map(text_hashes, self._pieces(rows))

    def _pieces(self, rows: np.ndarray) -> Iterator[Iterator[bytearray]]:
        edges = np.frombuffer(self._edges, np.int64)
        for first in range(0, len(rows), _BLOCK):
            part = rows[first : first + _BLOCK]
            yield (self._data[a:b] for a, b in zip(edges[part].tolist(), edges[part + 1].tolist(), strict=True))

    def __len__(self) -> int:
        return len(self._edges) - 1

    def __iter__(self) -> Iterator[str]:
        return (self._data[a:b].decode("utf-8", "surrogatepass") for a, b in pairwise(self._edges))

    @overload
    def __getitem__(self, row: int) -> str: ...
    @overload
    def __getitem__(self, row: slice) -> list[str]: ...
    def __getitem__(self, row: int | slice) -> str | list[str]:
        if isinstance(row, slice):
            return [self[one] for one in range(*row.indices(len(self)))]
        row = row if row >= 0 else len(self) + row
        return self._data[self._edges[row] : self._edges[row + 1]].decode("utf-8", "surrogatepass")


def text_hashes(texts: Iterable[bytes | bytearray]) -> np.ndarray:
    """Return 64 bits of the BLAKE2b of each text, int64: different texts have the same ones once in 2 ** 64 pairs."""
    return np.frombuffer(b"".join(blake2b(text, digest_size=8).digest() for text in texts), "<i8")


def distinct(texts: Sequence[str]) -> tuple[np.ndarray, np.ndarray]:
    """Return the first row of each different text, ascending, and for each text which of these it equals, both int64.

    Their hashes are compared; should different texts have the same one, other hashes are.
    """
    for salt in count():
        hashes = np.fromiter((hash((salt, text)) for text in texts), np.int64, len(texts))
        _, first, which = np.unique(hashes, return_index=True, return_inverse=True)
        order = np.argsort(first)
        first, which = first[order], np.argsort(order)[which]
        same = first[which]
        if all(texts[row] == texts[same[row]] for row in np.flatnonzero(same != np.arange(len(texts))).tolist()):
            break
    return first, which
