"""What an export takes from a cache: at most one set of images and one of captions, and the samples of some splits."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from ...errors import CacheError
from ...reading.split import require_complete
from ...store import OK, CaptionSet, FeatureCache, ImageSet
from ...store.layout import DEFAULT_SPLITS
from ...store.rows import ranges
from ...store.store import choose_set

_IMAGES = 64  # read and written at once


@dataclass(frozen=True)
class Selection:
    """What is exported."""

    cache: FeatureCache  # from where
    images: ImageSet | None  # the image set, if one is exported
    captions: CaptionSet | None  # the caption set, if one is exported
    rows: dict[str, np.ndarray]  # the image rows of each split, without those that failed

    def batches(self, split: str) -> Iterator[np.ndarray]:
        """Yield the image rows of a split, some at a time."""
        rows = self.rows[split]
        for first in range(0, len(rows), _IMAGES):
            yield rows[first : first + _IMAGES]

    def image_array(self, name: str, rows: np.ndarray) -> np.ndarray:
        """Read one array of the image set at these image rows; of several views the first, the image as it is."""
        assert self.images is not None
        gathers = {"local": self.images.local, "global": self.images.global_}
        return gathers[name](rows) if name in gathers else self.images.array(name, rows)

    def caption_rows(self, rows: np.ndarray) -> np.ndarray:
        """Return the rows of the captions of these image rows, without captions that failed."""
        captions = ranges(self.cache.caption_start[rows], self.cache.caption_count[rows])
        kept: np.ndarray = captions[self._read(captions)]
        return kept

    def caption_counts(self, rows: np.ndarray) -> np.ndarray:
        """Return how many captions each of these image rows has, without captions that failed."""
        starts, counts = self.cache.caption_start[rows], self.cache.caption_count[rows]
        owners = np.repeat(np.arange(len(rows)), counts)[self._read(ranges(starts, counts))]
        return np.bincount(owners, minlength=len(rows)).astype(np.int32)

    def _read(self, captions: np.ndarray) -> np.ndarray:
        """Return which captions did not fail; all, if none of their features are exported."""
        return np.ones(len(captions), dtype=bool) if self.captions is None else self.captions.status[captions] == OK


def select(cache: FeatureCache, prefixes: Sequence[str], splits: Sequence[str], modalities: Sequence[str]) -> Selection:
    """Choose the sets that `prefixes` mean, without any the only ones of `modalities`, and the samples of `splits`.

    Raises:
        CacheError: a set or split is missing or incomplete, sets are too many, or every image of a split failed.
    """
    sets = [cache.set_at(path) for path in _choose(cache, prefixes, modalities)]
    images = next((features for features in sets if isinstance(features, ImageSet)), None)
    captions = next((features for features in sets if isinstance(features, CaptionSet)), None)
    unknown = [split for split in splits if split not in cache.splits]
    wanted = [split for split in cache.splits if split in splits]
    if not wanted or (unknown and tuple(splits) != DEFAULT_SPLITS):
        there = ", ".join(cache.splits)
        raise CacheError(f"{cache.url} has no split {', '.join(unknown)}; it has {there}: choose with --splits")
    for features in sets:
        for split in wanted:
            require_complete(features, split)
    rows = {split: np.arange(*cache.splits[split]) for split in wanted}
    if images is not None:
        rows = {split: every[images.status[every] == OK] for split, every in rows.items()}
    if empty := [split for split, kept in rows.items() if not len(kept)]:
        raise CacheError(f"{cache.url}: every image of split '{empty[0]}' failed; choose others with --splits")
    return Selection(cache, images, captions, rows)


def _choose(cache: FeatureCache, prefixes: Sequence[str], modalities: Sequence[str]) -> list[str]:
    """Return the paths of the sets to export, at most one of each modality and one at least."""
    there = cache.set_paths()
    chosen = {
        choose_set(cache.url, prefix, there, [path for path in there if cache.fits(path, prefix)], " with --set")
        for prefix in prefixes
    }
    if not prefixes:
        chosen = set(cache.set_paths(*modalities))
    for modality in ("images", "captions"):
        several = sorted(path for path in chosen if path.startswith(f"{modality}/"))
        if len(several) > 1:
            raise CacheError(
                f"{cache.url}: only one set of {modality} fits in an export; choose with --set: {', '.join(several)}"
            )
    if "captions" not in modalities and (not chosen or any(path.startswith("captions/") for path in chosen)):
        raise CacheError(
            f"{cache.url}: SCAN's layout holds one set of images and the captions' texts, not"
            f" {', '.join(sorted(chosen)) or 'features of captions alone'}; use --to hdf5 or another --set"
        )
    if not chosen:
        raise CacheError(f"{cache.url}: there is no feature set to export; run `xret extract`")
    return sorted(chosen)
