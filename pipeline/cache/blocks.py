"""Which samples each shard of a feature set holds."""

from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from .feature_cache import FeatureCache


@dataclass(frozen=True)
class Blocks:
    """Which images each shard holds: `length` of them, the last shard of a split fewer."""

    length: int
    splits: dict[str, tuple[int, int]]  # rows of images [first, last) of each split, in row order

    @classmethod
    def choose(cls, splits: dict[str, tuple[int, int]], length: int | None = None, views: int = 1) -> "Blocks":
        """Take `length`, or one that gives the largest split 16 shards, of at most 512 views of images."""
        largest = max(last - first for first, last in splits.values())
        return cls(length or min(max(8, 512 // views // 8 * 8), -(-largest // 16 // 8) * 8 or 8), splits)

    @cached_property
    def _bounds(self) -> np.ndarray:
        """The rows of images [first, last) of each shard, int64 [shards, 2]."""
        bounds = []
        for begin, end in self.splits.values():
            first = np.arange(begin, end, self.length)
            bounds.append(np.stack([first, np.minimum(first + self.length, end)], axis=1))
        return np.concatenate(bounds)

    def __len__(self) -> int:
        return len(self._bounds)

    def count(self, split: str) -> int:
        """Return how many shards a split has."""
        first, last = self.splits[split]
        return -(-(last - first) // self.length)

    def of_split(self, split: str) -> range:
        """Return the shards of a split."""
        return range(*np.searchsorted(self._bounds[:, 0], self.splits[split]).tolist())

    def images(self, shard: int) -> tuple[int, int]:
        """Return the rows of images [first, last) that `shard` holds."""
        first, last = self._bounds[shard].tolist()
        return first, last

    def shard_of(self, images: np.ndarray) -> np.ndarray:
        """Return the shard of each image row."""
        return np.searchsorted(self._bounds[:, 0], images, side="right") - 1

    def array_rows(self, images: np.ndarray) -> np.ndarray:
        """Return the row in a set's arrays of each image row."""
        shards = self.shard_of(images)
        rows: np.ndarray = shards * self.length + images - self._bounds[shards, 0]
        return rows


def caption_array_rows(cache: "FeatureCache", blocks: Blocks, shard_captions: int) -> np.ndarray:
    """Return the row in a caption set's arrays of every caption row, int64 [M]."""
    shards = blocks.shard_of(cache.caption_image)
    first = np.array([cache.caption_start[blocks.images(s)[0]] for s in range(len(blocks))], dtype=np.int64)
    rows: np.ndarray = shards * shard_captions + np.arange(cache.captions) - first[shards]
    return rows
