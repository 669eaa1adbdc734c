"""Features of images or of captions, padded on a device, and where they come from."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from hashlib import sha256
from typing import Protocol

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import pad as pad_after

from ..cache import CaptionSet, ImageSet
from .placement import Array, Placement, Resident

Draws = tuple[int, int]  # seed and epoch, from which every random choice about a sample follows


@dataclass
class Features:
    """Features of one modality, padded, on one device. What was not asked for is None."""

    length: Tensor  # valid local rows, int64 [B]
    local: Tensor | None = None  # [B,N,C] in the cache's dtype; padding rows are zero
    global_: Tensor | None = None  # [B,C]
    token: Tensor | None = None  # token ids, int64 [B,N]
    place: Tensor | None = None  # where cells of a map were left out: row and column of those that stay, [B,N,2]


class Source(Protocol):
    """Where the features of a split's images, or of its captions, come from. Samples are counted from 0."""

    def fetch(self, items: np.ndarray, draws: Draws | None = None) -> Callable[[], Features]:
        """Do the host's part for these samples, in any thread; what is returned puts the features on the device.

        Args:
            items: samples, int64 [B].
            draws: of a training, where something is drawn for a sample; None: nothing is.
        """


class Stored:
    """Features of one set, which lie in the store or in memory.

    Args:
        length: valid local rows of each sample.
        arrays: what is read of them, by field.
        placement: where they lie, as `placement.choose` returned it.
        device: where a batch is put.
        resident: what lies in memory already, and what is put there now.
    """

    def __init__(
        self,
        length: np.ndarray,
        arrays: Mapping[str, Array],
        placement: Placement,
        device: torch.device,
        resident: Resident,
    ) -> None:
        self.length, self.device = length.astype(np.int64), device
        self.ragged = {field for field, array in arrays.items() if array.ragged}
        self.columns = {}
        for field, array in arrays.items():
            # Word ids are few bytes in many small pieces: in memory they cost next to nothing, in the store the most.
            where = "pinned" if field == "token" and placement in ("mapped", "stream") else placement
            self.columns[field] = resident.column(array, where, device)

    def fetch(self, items: np.ndarray, draws: Draws | None = None) -> Callable[[], Features]:
        """Read or gather the rows of these samples; nothing is drawn."""
        length = torch.from_numpy(self.length[items])
        rows = {field: column.fetch(items) for field, column in self.columns.items()}

        def finish() -> Features:
            parts = {field: pad(own(), length) if field in self.ragged else own() for field, own in rows.items()}
            token = parts["token"].long() if "token" in parts else None
            return Features(length.to(self.device, non_blocking=True), parts.get("local"), parts.get("global"), token)

        return finish


class Joined:
    """Several sources of so many samples each, of the same fields on one device; samples are counted on."""

    def __init__(self, sources: Sequence[Source], sizes: Sequence[int]) -> None:
        self.sources, self.start = sources, np.cumsum([0, *sizes])

    def fetch(self, items: np.ndarray, draws: Draws | None = None) -> Callable[[], Features]:
        """Fetch these samples, which are in the order of the sources, padded to the longest of all."""
        bounds = np.searchsorted(items, self.start)
        parts = [
            source.fetch(items[a:b] - start, draws)
            for source, start, a, b in zip(self.sources, self.start, bounds, bounds[1:], strict=False)
            if a < b
        ]
        return parts[0] if len(parts) == 1 else lambda: concatenate([part() for part in parts])


def arrays_of(features: ImageSet | CaptionSet, rows: np.ndarray, fields: set[str]) -> dict[str, Array]:
    """Return those of the arrays ``local``, ``global`` and ``token`` of a set that are in `fields`, for cache rows."""
    words = features.vocabulary if isinstance(features, CaptionSet) else None  # it may be another store's
    which = (features.cache.url, features.modality, features.name, words, sha256(rows.tobytes()).digest())
    arrays = {}
    for field in sorted(fields):
        ragged = isinstance(features, CaptionSet) and field != "global"
        count = features.length[rows].astype(np.int64) if ragged else np.ones(len(rows), dtype=np.int64)
        read = getattr(features, "global_" if field == "global" else field)
        arrays[field] = Array((*which, field), read, rows, count, ragged, _row_bytes(features, field))
    return arrays


def _row_bytes(features: ImageSet | CaptionSet, field: str) -> int:
    if field == "token":
        return 4
    width = features.global_channels if field == "global" else features.channels
    rows = features.rows if isinstance(features, ImageSet) and field == "local" else 1
    return rows * (width or 0) * np.dtype(features.dtype).itemsize


def concatenate(parts: Sequence[Features]) -> Features:
    """Return the samples of all parts one after the other, padded to the longest."""

    def whole(tensors: list[Tensor | None]) -> Tensor | None:
        there = [tensor for tensor in tensors if tensor is not None]
        if not there:
            return None
        longest = max(tensor.shape[1] for tensor in there)
        return torch.cat([pad_after(t, (0, 0) * (t.ndim - 2) + (0, longest - t.shape[1])) for t in there])

    return Features(
        torch.cat([part.length for part in parts]),
        whole([part.local for part in parts]),
        whole([part.global_ for part in parts]),
        whole([part.token for part in parts]),
    )


def pad(packed: Tensor, length: Tensor) -> Tensor:
    """Lay packed rows out, with zeros after each sample's own.

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
    return padded.index_copy_(0, places, packed).reshape(len(length), longest, *packed.shape[1:])


def pad_ids(ids: Sequence[Sequence[int]]) -> tuple[Tensor, Tensor]:
    """Return the token ids of captions, padded with zeros, int64 [B,N], and their lengths, int64 [B], on the CPU."""
    length = torch.tensor([len(caption) for caption in ids])
    return pad(torch.tensor([number for caption in ids for number in caption]), length), length
