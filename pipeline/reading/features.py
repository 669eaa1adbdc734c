"""One modality of a split: its samples' features, packed on the host and padded on the device."""

from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from functools import partial
from hashlib import sha256
from typing import Protocol

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import pad as pad_behind

from ..cache import CaptionSet, ImageSet
from .columns import Column, Placement, Reader, Resident, lies_in, place


@dataclass
class Features:
    """Features of one modality, padded, on one device. What was not asked for is None.

    Attributes:
        length: valid local rows, int64 [B].
        local: [B,N,C] in the cache's dtype; padding rows are zero.
        global_: [B,C].
        token: token ids, int64 [B,N].
    """

    length: Tensor
    local: Tensor | None = None
    global_: Tensor | None = None
    token: Tensor | None = None


@dataclass
class Fetched:
    """Features of some samples between the two steps of a `Side`.

    Attributes:
        length: int64 [B], on the CPU.
        columns: what each column fetched, by field.
    """

    length: Tensor
    columns: dict[str, Tensor]


class Side(Protocol):
    """Features of a split's samples, which are counted from 0, in two steps."""

    def fetch(self, items: np.ndarray) -> list[Fetched]:
        """Do the host's part for these samples, in any thread."""

    def finish(self, fetched: list[Fetched]) -> Features:
        """Return the features on the device, padded."""


class StoredSide:
    """The side of one feature set.

    Args:
        features: the set.
        rows: the samples' rows in the cache, int64.
        fields: which of ``local``, ``global`` and ``token`` to read.
        device: where the features are put.
    """

    def __init__(
        self, features: ImageSet | CaptionSet, rows: np.ndarray, fields: set[str], device: torch.device
    ) -> None:
        self.device = device
        self.length = features.length[rows].astype(np.int64)
        words = features.vocabulary if isinstance(features, CaptionSet) else None  # it may be another store's
        self._which = (features.cache.url, features.modality, features.name, words, sha256(rows.tobytes()).digest())
        self._ragged = {"local", "token"} if isinstance(features, CaptionSet) else set()
        self._row_bytes = {field: _row_bytes(features, field) for field in fields}
        self._read: dict[str, Reader] = {
            field: partial(_rows_of, getattr(features, "global_" if field == "global" else field), rows)
            for field in sorted(fields)
        }
        self._columns: dict[str, Column] = {}

    @property
    def nbytes(self) -> int:
        """Bytes of all features that are read."""
        return sum(self._size(field) for field in self._read)

    def there(self, placement: Placement, resident: Resident) -> int:
        """Return how many of these bytes were put before where `placement` would put them in memory."""
        if lies_in(placement, self.device) == "mapped":
            return 0
        return sum(self._size(field) for field in self._read if self._key(field, placement) in resident)

    def place(self, placement: Placement, resident: Resident) -> None:
        """Put the features where `placement` says, as `placement.choose` returned it, but for those that are there."""
        for field, read in self._read.items():
            # Word ids are few bytes in many small pieces: in memory they cost next to nothing, in the store the most.
            where = "pinned" if field == "token" and placement in ("mapped", "stream") else placement
            make = partial(place, read, self._count(field), where, self.device)
            self._columns[field] = resident.column(self._key(field, where), make)

    def fetch(self, items: np.ndarray) -> list[Fetched]:
        """Do the host's part for these samples, in any thread."""
        columns = {field: column.fetch(items) for field, column in self._columns.items()}
        return [Fetched(torch.from_numpy(self.length[items]), columns)]

    def finish(self, fetched: list[Fetched]) -> Features:
        """Return the features on the device, padded."""
        (one,) = fetched
        parts = {field: self._columns[field].finish(rows) for field, rows in one.columns.items()}
        for field in self._ragged & set(parts):
            parts[field] = pad(parts[field], one.length)
        token = parts["token"].long() if "token" in parts else None
        length = one.length.to(self.device, non_blocking=True)
        return Features(length, parts.get("local"), parts.get("global"), token)

    def _key(self, field: str, placement: Placement) -> Hashable:
        return (*self._which, field, lies_in(placement, self.device), str(self.device))

    def _size(self, field: str) -> int:
        return self._row_bytes[field] * int(self._count(field).sum())

    def _count(self, field: str) -> np.ndarray:
        return self.length if field in self._ragged else np.ones_like(self.length)


class JoinedSide:
    """Sides behind one another: the samples of the second are counted on from those of the first.

    Args:
        sides: of the same fields on the same device.
    """

    def __init__(self, sides: Sequence[StoredSide]) -> None:
        self.sides = sides
        self.start = np.cumsum([0] + [len(side.length) for side in sides])

    def fetch(self, items: np.ndarray) -> list[Fetched]:
        """Do the host's part for these samples, which are in the order of the sides."""
        bounds = np.searchsorted(items, self.start)
        return [
            side.fetch(items[a:b] - start)[0]
            for side, start, a, b in zip(self.sides, self.start, bounds, bounds[1:], strict=False)
        ]

    def finish(self, fetched: list[Fetched]) -> Features:
        """Return the features on the device, padded to the longest of all sides."""
        parts = [side.finish([one]) for side, one in zip(self.sides, fetched, strict=True) if len(one.length)]
        return parts[0] if len(parts) == 1 else concatenate(parts)


def concatenate(parts: Sequence[Features]) -> Features:
    """Return the samples of all parts behind one another, padded to the longest."""

    def whole(tensors: list[Tensor | None]) -> Tensor | None:
        there = [tensor for tensor in tensors if tensor is not None]
        if not there:
            return None
        longest = max(tensor.shape[1] for tensor in there)
        return torch.cat([pad_behind(t, (0, 0) * (t.ndim - 2) + (0, longest - t.shape[1])) for t in there])

    return Features(
        torch.cat([part.length for part in parts]),
        whole([part.local for part in parts]),
        whole([part.global_ for part in parts]),
        whole([part.token for part in parts]),
    )


def pad(packed: Tensor, length: Tensor) -> Tensor:
    """Lay packed rows out with zeros behind each sample's own.

    Args:
        packed: [sum of lengths, ...].
        length: int64 [B], on the CPU, so that a GPU need not be waited for.

    Returns:
        [B, longest, ...].
    """
    longest = int(length.max())
    inside = torch.arange(longest)[None, :] < length[:, None]
    places = inside.flatten().nonzero()[:, 0].to(packed.device, non_blocking=True)
    padded = packed.new_zeros((len(length) * longest, *packed.shape[1:]))
    return padded.index_copy_(0, places, packed).unflatten(0, (len(length), longest))


def _row_bytes(features: ImageSet | CaptionSet, field: str) -> int:
    if field == "token":
        return 4
    width = features.global_channels if field == "global" else features.channels
    rows = features.rows if isinstance(features, ImageSet) and field == "local" else 1
    return rows * (width or 0) * np.dtype(features.dtype).itemsize


def _rows_of(read: Reader, rows: np.ndarray, items: np.ndarray) -> np.ndarray:
    return read(rows[items])
