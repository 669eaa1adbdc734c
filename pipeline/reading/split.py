"""The samples of a split that can be used: images and captions that could be read when they were extracted."""

from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np

from ..errors import CacheError
from ..store import NOT_DONE, OK, FeatureSet
from ..wording import counted, option
from .joined_sets import Captions, Images, parts_of
from .placement import Placement
from .prefetch import RUN

AS_A_WHOLE = "as a whole"  # how an epoch's samples are mixed where nothing is streamed


@dataclass(frozen=True)
class Split:
    """The usable samples of one split of one store, or of several splits."""

    image_set: Images  # the features of its images
    caption_set: Captions  # the features of its captions
    image_rows: np.ndarray  # image rows of the store, int64
    caption_rows: np.ndarray  # caption rows of the store, int64
    caption_image: np.ndarray  # index into `image_rows` of each of `caption_rows`, int64
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
        images = np.sort(np.concatenate([np.arange(*cache.splits[name]) for name in names]))
        image_rows = images[image_set.status[images] == OK]
        rows = np.sort(np.concatenate([np.arange(cache.captions)[caption_set.rows_of(name)] for name in names]))
        image_is_good = image_set.status[cache.caption_image[rows]] == OK
        caption_rows = rows[image_is_good & (caption_set.status[rows] == OK)]
        if not len(caption_rows):
            raise CacheError(f"{cache.url}: split '{', '.join(names)}' has no usable image with a caption")
        owner = np.searchsorted(image_rows, cache.caption_image[caption_rows])
        skipped = len(images) - len(image_rows) + int(image_is_good.sum()) - len(caption_rows)
        return cls(image_set, caption_set, image_rows, caption_rows, owner, skipped)

    def drawn(self, share: float) -> "Split":
        """Return this share of the images, with their captions; a smaller share is a part of a larger one."""
        if share == 1:
            return self
        count = len(self.image_rows)
        images = np.sort(np.random.default_rng(0).permutation(count)[: max(1, round(share * count))])
        kept = np.isin(self.caption_image, images)
        owner = np.searchsorted(images, self.caption_image[kept])
        rows = self.image_rows[images], self.caption_rows[kept]
        return replace(self, image_rows=rows[0], caption_rows=rows[1], caption_image=owner)

    @property
    def by_chunk(self) -> bool:
        """Whether chunks are read whole, as those of an object store."""
        return not self.image_set.cache.folder.is_local

    def blocks(self) -> np.ndarray:
        """Return the block of each image, int64: what a stream reads at once."""
        if self.by_chunk:
            return self.image_rows // self.image_set.chunk_rows
        return np.arange(len(self.image_rows)) // RUN

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
            f" {option('splits', split)}, or choose another split"
        )


def texts_of(read: Callable[[int, int], list[str]], rows: np.ndarray) -> list[str]:
    """Return the texts of some ascending rows; `read` takes the first row and the one after the last."""
    first, last = (int(rows[0]), int(rows[-1]) + 1) if len(rows) else (0, 0)
    found = read(first, last)
    return [found[row - first] for row in rows.tolist()]
