"""Features of images or of captions, padded on a device, and where they come from."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Protocol

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import pad as pad_after

from ..device import on_host, send
from ..store import CaptionSet, ImageSet
from .placement import Column, Resident, Where
from .split import Ascending

Draws = tuple[int, int]  # seed and epoch, from which every random choice about a sample follows
_OF_VIEW = 3  # so that it draws numbers of its own


@dataclass
class Features:
    """Features of one modality, padded, on one device. What was not asked for is None."""

    length: Tensor  # valid local rows, int64 [B]; see `device.send`
    local: Tensor | None = None  # [B,N,C] in the store's dtype; padding rows are zero
    global_: Tensor | None = None  # [B,C]
    token: Tensor | None = None  # token ids, int64 [B,N]
    place: Tensor | None = None  # where rows were left out: the number of each that stays among all, int64 [B,N]
    grid: tuple[int, int] | None = None  # height and width of the map whose cells the rows are; None: it is square
    others: "tuple[Features, ...]" = ()  # of the same samples in further feature sets

    @property
    def parts(self) -> "tuple[Features, ...]":
        """The features of each set, these first."""
        return self, *self.others

    @property
    def words(self) -> "Features | None":
        """The features of the first set that came with token ids; None without one."""
        return next((part for part in self.parts if part.token is not None), None)

    @property
    def rows(self) -> Tensor:
        """Valid local rows of all sets together, int64 [B]."""
        return sum((part.length for part in self.others), self.length)


def set_by_set(change: Callable[[Features], Features], features: Features) -> Features:
    """Return features with `change` applied to those of each set by themselves."""
    return side_by_side([change(replace(part, others=()) if part.others else part) for part in features.parts])


def side_by_side(parts: Sequence[Features]) -> Features:
    """Return the features that several sets have of the same samples as one."""
    return replace(parts[0], others=tuple(parts[1:])) if len(parts) > 1 else parts[0]


class FeatureSource(Protocol):
    """Where the features of a split's images, or of its captions, come from. Samples are counted from 0."""

    def fetch(self, items: np.ndarray, draws: Draws | None = None) -> Callable[[], Features]:
        """Do the host's part for these samples, in any thread; what is returned puts the features on the device.

        In a training `draws` say what is drawn for a sample; None: nothing is.
        """


class Stored:
    """Features of one set, which lie in the store or in memory; `place` says where.

    Of the samples in these `rows` of the store `fields` are read, of ``local``, ``global`` and ``token``, by field in
    `columns`; of several `views` all samples in the first, then all in the next. Where a set has fewer views than these
    name, it begins again with its first.
    """

    def __init__(
        self, features: ImageSet | CaptionSet, rows: Ascending, fields: set[str], views: Sequence[int] = (0,)
    ) -> None:
        self._features, self._rows, self.grid = features, rows, getattr(features, "grid", None)
        is_image = isinstance(features, ImageSet)
        views = list(dict.fromkeys(view % (features.views if isinstance(features, ImageSet) else 1) for view in views))
        self.views = len(views)
        words = features.vocabulary if isinstance(features, CaptionSet) else None  # it may be another store's
        which = features.cache.url, features.modality, features.name, words, rows.key, tuple(views)
        self.columns = {}
        for field in sorted(fields):
            count = None if is_image or field == "global" else features.length[rows.whole()]
            read = getattr(features, "global_" if field == "global" else field)
            read = _in_views(read, rows, views) if is_image else _of_rows(read, rows)
            samples = len(rows) * self.views
            self.columns[field] = Column((*which, field), read, samples, count, _row_bytes(features, field))

    def place(self, where: Where, device: torch.device, resident: Resident) -> None:
        """Put the columns where `choose_placement` said, unless `resident` has them, for batches on a device."""
        self.device = device
        for field, column in self.columns.items():
            # Word ids are few bytes in many small pieces: in memory they cost next to nothing, in the store the most.
            column.place("host" if field == "token" and where == "store" else where, device, resident)

    def fetch(self, items: np.ndarray, draws: Draws | None = None) -> Callable[[], Features]:
        """Read or gather the rows of these samples; of several views one is drawn, without `draws` it is the first."""
        length = torch.from_numpy(self._features.length[self._rows[items]].astype(np.int64))
        at, samples = items, len(self._rows)
        if draws is not None and self.views > 1:
            at = items + samples * drawn_views(draws, self.views, samples)[items]
        rows = {field: column.fetch(at) for field, column in self.columns.items()}

        def finish() -> Features:
            parts = {
                field: own() if self.columns[field].count is None else pad(own(), length) for field, own in rows.items()
            }
            token = parts["token"].long() if "token" in parts else None
            return Features(send(length, self.device), parts.get("local"), parts.get("global"), token, grid=self.grid)

        return finish


@lru_cache(8)  # of an epoch's batches all ask for the same, of several data and feature sets in turn
def drawn_views(draws: Draws, views: int, samples: int) -> np.ndarray:
    """Return the view of each sample in an epoch, int64 [S], each drawn from all of them alike."""
    return np.random.default_rng([*draws, _OF_VIEW]).integers(views, size=samples)


class SideBySide:
    """The sources of several feature sets of the same samples."""

    def __init__(self, sources: Sequence[Stored]) -> None:
        self.sources = tuple(sources)

    def fetch(self, items: np.ndarray, draws: Draws | None = None) -> Callable[[], Features]:
        """Fetch these samples from each; every set draws among its own views."""
        parts = [source.fetch(items, draws) for source in self.sources]
        return lambda: side_by_side([part() for part in parts])


class Joined:
    """Several sources of so many samples each, of the same fields on one device; samples are counted on."""

    def __init__(self, sources: Sequence[FeatureSource], sizes: Sequence[int]) -> None:
        self.sources, self.start = sources, np.cumsum([0, *sizes])

    def fetch(self, items: np.ndarray, draws: Draws | None = None) -> Callable[[], Features]:
        """Fetch these samples, which are in the order of the sources, padded to the longest of all."""
        parts = [source.fetch(own, draws) for source, own in self._parts(items)]
        return parts[0] if len(parts) == 1 else lambda: concatenate([part() for part in parts])

    def _parts(self, items: np.ndarray) -> Iterator[tuple[FeatureSource, np.ndarray]]:
        """Yield the sources that have some of these samples, with their own numbers of them."""
        bounds = np.searchsorted(items, self.start)
        for source, start, a, b in zip(self.sources, self.start, bounds, bounds[1:], strict=False):
            if a < b:
                yield source, items[a:b] - start


def _of_rows(read: Callable[..., np.ndarray], rows: Ascending) -> Callable[[np.ndarray], np.ndarray]:
    return lambda items: read(rows[items])


def _in_views(
    read: Callable[..., np.ndarray], rows: Ascending, views: Sequence[int]
) -> Callable[[np.ndarray], np.ndarray]:
    """Return what reads images that are counted on from view to view."""
    number = np.array(views)
    return lambda items: read(rows[items % len(rows)], number[items // len(rows)])


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
        send(torch.cat([on_host(part.length) for part in parts]), parts[0].length.device),
        whole([part.local for part in parts]),
        whole([part.global_ for part in parts]),
        whole([part.token for part in parts]),
        grid=parts[0].grid,
        others=tuple(concatenate(of_set) for of_set in zip(*(part.others for part in parts), strict=True)),
    )


def pad(packed: Tensor, length: Tensor) -> Tensor:
    """Return packed rows [sum of lengths, ...] as [B, longest, ...], with zeros after each sample's own.

    `length`, int64 [B], is on the CPU, so that a GPU need not be waited for.
    """
    inside = np.arange(int(length.max())) < length.numpy()[:, None]
    padded = packed.new_zeros((*inside.shape, *packed.shape[1:]))
    if packed.device.type == "cpu":  # where NumPy takes half of torch's time
        padded.numpy()[inside] = packed.numpy()
    else:
        places = send(torch.from_numpy(np.flatnonzero(inside)), packed.device)
        padded.flatten(0, 1).index_copy_(0, places, packed)
    return padded


def pad_ids(ids: Sequence[Sequence[int]]) -> tuple[Tensor, Tensor]:
    """Return the token ids of captions, padded with zeros, int64 [B,N], and their lengths, int64 [B], on the CPU."""
    length = torch.tensor([len(caption) for caption in ids])
    return pad(torch.tensor([number for caption in ids for number in caption]), length), length
