"""Which samples each shard of a feature set holds."""

from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True)
class Blocks:
    """Which images each shard holds: `length` of them, the last shard of a split fewer.

    Args:
        length: images in a shard.
        splits: rows of images [first, last) of each split, in row order.
    """

    length: int
    splits: dict[str, tuple[int, int]]

    @classmethod
    def choose(cls, splits: dict[str, tuple[int, int]], length: int | None = None) -> "Blocks":
        """Take `length`, or one that gives the largest split 16 shards, of at most 512 images."""
        largest = max(last - first for first, last in splits.values())
        return cls(length or min(512, -(-largest // 16 // 8) * 8 or 8), splits)

    def of_split(self, split: str) -> range:
        """Return the shards of a split."""
        first = 0
        for name, (begin, end) in self.splits.items():
            last = first + -(-(end - begin) // self.length)
            if name == split:
                return range(first, last)
            first = last
        raise KeyError(split)

    def __len__(self) -> int:
        return sum(-(-(end - begin) // self.length) for begin, end in self.splits.values())

    def images(self, shard: int) -> tuple[int, int]:
        """Return the rows of images [first, last) that `shard` holds."""
        for name, (begin, end) in self.splits.items():
            shards = self.of_split(name)
            if shard in shards:
                first = begin + (shard - shards.start) * self.length
                return first, min(first + self.length, end)
        raise IndexError(shard)

    def shard_of(self, images: np.ndarray) -> np.ndarray:
        """Return the shard of each image row."""
        shards = np.empty(len(images), dtype=np.int64)
        for name, (begin, end) in self.splits.items():
            inside = (images >= begin) & (images < end)
            shards[inside] = self.of_split(name).start + (images[inside] - begin) // self.length
        return shards

    def array_rows(self, images: np.ndarray) -> np.ndarray:
        """Return the row in a set's arrays of each image row."""
        shards = self.shard_of(images)
        first = np.array([self.images(shard)[0] for shard in range(len(self))], dtype=np.int64)
        return shards * self.length + images - first[shards]
