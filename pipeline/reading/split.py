"""The samples of a split that can be used: images and captions that could be read when they were extracted."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import cached_property
from hashlib import sha256
from typing import Any

import numpy as np

from ..errors import CacheError
from ..store import NOT_DONE, OK, FeatureSet
from ..wording import counted
from .joined_sets import Captions, Images, parts_of
from .placement import Placement
from .prefetch import RUN

AS_A_WHOLE = "as a whole"  # how an epoch's samples are mixed where nothing is streamed


class Ascending:
    """Different numbers in ascending order, of which the ends are enough where none between them is left out."""

    def __init__(self, first: int, there: np.ndarray) -> None:
        """Take the numbers from `first` on that are `there`, bool."""
        self.first, self._numbers = first, None
        self._count = int(there.sum())
        if self._count < len(there):
            self._numbers = np.flatnonzero(there).astype(_smallest(first + len(there)))
            self._numbers += first

    def only(self, kept: np.ndarray) -> "Ascending":
        """Return those that are kept, bool."""
        if self._numbers is None:
            return Ascending(self.first, kept)
        there = np.zeros(int(self._numbers[-1]) + 1 - self.first, bool)
        there[self._numbers[kept] - self.first] = True
        return Ascending(self.first, there)

    def __len__(self) -> int:
        return self._count

    def __getitem__(self, places: np.ndarray) -> np.ndarray:
        """Return the numbers at these places, int64."""
        return self.first + places.astype(np.int64) if self._numbers is None else self._numbers[places].astype(np.int64)

    def __iter__(self) -> Iterator[int]:
        return iter(self.whole().tolist())

    def whole(self) -> np.ndarray:
        """Return all numbers, int64."""
        return self[np.arange(len(self))]

    def places(self, numbers: np.ndarray) -> np.ndarray:
        """Return how many are smaller than each of these numbers."""
        if self._numbers is None:
            return (numbers - self.first).clip(0, self._count)
        return np.searchsorted(self._numbers, numbers.astype(self._numbers.dtype))

    @property
    def key(self) -> object:
        """What is equal for equal numbers."""
        return self.first, self._count, self._numbers is not None and sha256(self._numbers.tobytes()).digest()


@dataclass(frozen=True)
class Split:
    """The usable samples of one split of one store, or of several splits."""

    image_set: Images  # the features of its images
    caption_set: Captions  # the features of its captions
    images: Ascending  # image rows of the store
    captions: Ascending  # caption rows of the store
    first_caption: np.ndarray  # of each image, a place among `captions`, and last the number of these, int [I + 1]
    skipped: int  # failed images, and failed captions of good images
    placement: Placement = "stream"  # where their features lie while they are read; never ``auto``

    @classmethod
    def of(cls, image_set: Images, caption_set: Captions, *names: str) -> "Split":
        """Return the usable samples of splits; CacheError if one is missing or incomplete, or there are no samples."""
        cache = image_set.cache
        for name in names:
            if name not in cache.splits:
                raise CacheError(f"{cache.url} has no split '{name}'; it has {', '.join(cache.splits)}")
            for features in (*parts_of(image_set), *parts_of(caption_set)):
                require_complete(features, name)
        spans = [cache.splits[name] for name in names]
        first, last = min(spans)[0], max(spans)[1]
        wanted = np.zeros(last - first, bool)
        for begin, end in spans:
            wanted[begin - first : end - first] = True
        start, stop = cache.captions_of(first, last)
        count, good = cache.sample_array("caption_count", first, last), image_set.status[first:last] == OK
        good &= wanted
        usable = np.repeat(good, count)
        skipped = int(wanted.sum() - good.sum() + usable.sum())
        usable &= caption_set.status[start:stop] == OK
        skipped -= int(usable.sum())
        if not usable.any():
            raise CacheError(f"{cache.url}: split '{', '.join(names)}' has no usable image with a caption")
        first_caption = _edges(count)
        if not (good.all() and usable.all()):
            first_caption = _edges(usable)[np.append(first_caption[:-1][good], len(usable))]
        return cls(image_set, caption_set, Ascending(first, good), Ascending(start, usable), first_caption, skipped)

    def drawn(self, share: float) -> "Split":
        """Return this share of the images, with their captions; a smaller share is a part of a larger one."""
        if share == 1:
            return self
        count = len(self.images)
        kept = np.zeros(count, bool)
        kept[np.random.default_rng(0).permutation(count)[: max(1, round(share * count))]] = True
        counts = np.diff(self.first_caption)
        images, captions = self.images.only(kept), self.captions.only(np.repeat(kept, counts))
        return replace(self, images=images, captions=captions, first_caption=_edges(counts[kept]))

    @cached_property
    def image_rows(self) -> np.ndarray:
        """Image rows of the store, int64."""
        return self.images.whole()

    @cached_property
    def caption_rows(self) -> np.ndarray:
        """Caption rows of the store, int64."""
        return self.captions.whole()

    @cached_property
    def caption_image(self) -> np.ndarray:
        """Index into `image_rows` of each of `caption_rows`, int64."""
        return np.repeat(np.arange(len(self.images)), np.diff(self.first_caption))

    def image_of(self, captions: np.ndarray) -> np.ndarray:
        """Return the places among `images` of the images of captions in some places among `captions`, int64."""
        return range_of(self.first_caption, captions)

    @property
    def by_chunk(self) -> bool:
        """Whether chunks are read whole, as those of an object store."""
        return not self.image_set.cache.folder.is_local

    def blocks(self) -> np.ndarray:
        """Return the first image of each block, which a stream reads at once, and last the number of all, int64."""
        images = len(self.images)
        if self.by_chunk:
            return np.flatnonzero(np.diff(self.image_rows // self.image_set.chunk_rows, prepend=-1, append=-1))
        return np.append(np.arange(0, images, RUN), images)

    @property
    def shuffled(self) -> str:
        """How an epoch mixes these samples, in words."""
        if self.placement != "stream":
            return AS_A_WHOLE
        runs = f"chunks of {self.image_set.chunk_rows} images" if self.by_chunk else f"runs of {RUN} neighbours"
        return f"in groups of {runs}"

    def require_joinable(self, other: "Split") -> None:
        """Raise CacheError where the features of `other` are of other encoders, or its words of another vocabulary."""
        for ours, theirs, what in (
            (_made_by(self.image_set), other.image_set, "images"),
            (_made_by(self.caption_set), other.caption_set, "captions"),
        ):
            if ours != _made_by(theirs):
                raise CacheError(
                    f"{theirs.cache.url} cannot be joined to {self.image_set.cache.url}: its {what} '{theirs.name}' are"
                    " of another encoder or vocabulary; extract them with the same options"
                )


def range_of(first: np.ndarray, numbers: np.ndarray) -> np.ndarray:
    """Return in which of the ranges that begin at `first` each number lies, int64."""
    # Numbers of another type than `first` would make NumPy convert the whole of it each time.
    return np.searchsorted(first, numbers.astype(first.dtype), side="right") - 1


def _edges(count: np.ndarray) -> np.ndarray:
    """Return where each of so many begins, one after the other, and last their sum."""
    edges = np.zeros(len(count) + 1, _smallest(int(count.sum())))
    np.cumsum(count, out=edges[1:])
    return edges


def _smallest(most: int) -> "np.dtype[Any]":
    """Return int32, or int64 where that is too small."""
    return np.result_type(np.int32, np.min_scalar_type(-most))


def _made_by(features: Images | Captions) -> list[object]:
    """Return what made each set: its vocabulary, where it has one, or its fingerprint."""
    return [getattr(part, "vocabulary", None) or part.fingerprint for part in parts_of(features)]


def begun_splits(image_set: Images, caption_set: Captions) -> list[str]:
    """Return the splits of which something is done in every set, in the order of their rows; all where none is."""
    cache, sets = image_set.cache, (*parts_of(image_set), *parts_of(caption_set))
    names = sorted(cache.splits, key=lambda name: cache.splits[name])
    done = {name: [one.status[one.rows_of(name)] != NOT_DONE for one in sets] for name in names}
    return [name for name in names if all(rows.any() or not len(rows) for rows in done[name])] or names


def require_complete(features: FeatureSet, split: str) -> None:
    """Raise CacheError unless every sample of a split is done."""
    if missing := features.missing([split]):
        raise CacheError(
            f"{features.cache.url}: split '{split}' of '{features.name}' lacks {len(missing)} of"
            f" {counted(len(features.chunks_of(split)), 'chunk')}; run `xret extract` or `xret import` again with"
            f" --splits {split}, or choose another split"
        )


def texts_of(read: Callable[[int, int], list[str]], rows: np.ndarray) -> list[str]:
    """Return the texts of some ascending rows; `read` takes the first row and the one after the last."""
    first, last = (int(rows[0]), int(rows[-1]) + 1) if len(rows) else (0, 0)
    found = read(first, last)
    return [found[row - first] for row in rows.tolist()]
