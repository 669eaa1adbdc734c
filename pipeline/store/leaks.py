"""What the splits of a store share: files of equal bytes, texts, and pictures that look alike."""

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from ..data.digests import NONE
from ..progress import Progress
from ..wording import counted
from .sets import OK, ImageSet
from .store import FeatureCache

_SPLITS = ("train", "val", "test")
_BLOCK = 4096  # samples that are compared with as many others
_TEXTS = 16384  # read together


@dataclass(frozen=True)
class Leaks:
    """How much stands in several of train, val and test."""

    sentence: str  # what of these there is, with an example of each, without a full stop; "" if there is nothing
    pictures: int  # different files that are in more than one split
    captions: int  # of test, whose text stands in train
    copies: int  # images of test whose file is that of another there, which is not counted


def find_leaks(cache: FeatureCache) -> Leaks:
    """Compare digests of files, where a feature set has them, and texts as they are; a split ``other`` is left out."""
    digests, names = cache.known_digests(), cache.file_names(0, cache.images)
    first: dict[bytes, tuple[str, int]] = {}
    shared: dict[bytes, tuple[str, str]] = {}
    copies: list[tuple[str, str]] = []
    of_test: dict[bytes, int] = {}
    for split in (split for split in _SPLITS if split in cache.splits):
        for row in range(*cache.splits[split]):
            if (digest := digests[row].tobytes()) == NONE:
                continue
            other, at = first.setdefault(digest, (split, row))
            if other != split:
                shared.setdefault(digest, (f"{names[at]} ({other})", f"{names[row]} ({split})"))
            if split == "test" and of_test.setdefault(digest, row) != row:
                copies.append((names[row], names[of_test[digest]]))
    texts = Counter(text for block in _texts(cache, "test") for text in block)
    taught = {text for block in _texts(cache, "train") for text in block if text in texts}
    captions, parts = sum(texts[text] for text in taught), []
    if shared:
        number = f"{counted(len(shared), 'picture')} {'is' if len(shared) == 1 else 'are'}"
        parts.append(f"{number} in more than one split, such as {' and '.join(next(iter(shared.values())))}")
    if captions:
        example = next(text for text in texts if text in taught)
        parts.append(f"{captions:,} of {counted(texts.total(), 'caption')} of test stand in train as well: '{example}'")
    if copies:
        number = f"{len(copies):,} of {counted(len(of_test) + len(copies), 'picture')} of test"
        parts.append(f"{number} are the same file as another there, such as {' and '.join(copies[0])}")
    return Leaks("; ".join(parts), len(shared), captions, len(copies))


def _texts(cache: FeatureCache, split: str) -> Iterator[list[str]]:
    first, last = cache.captions_of(*cache.splits.get(split, (0, 0)))
    for start in range(first, last, _TEXTS):
        yield cache.caption_texts(start, min(start + _TEXTS, last))


@dataclass(frozen=True)
class NearPair:
    """A picture of val or test, and the one of another split that is most like it."""

    cosine: float  # of their global features, less the mean
    split: str
    image: str  # file name
    other_split: str
    other: str
    same_file: bool  # both files have the same bytes


def near_pairs(features: ImageSet, threshold: float) -> list[NearPair]:
    """Compare each picture of val with those of train, and each of test with both; the most alike come first.

    Of a picture and another split the nearest is returned, if the cosine of their global features is `threshold` or
    more. The mean of all is taken away before: without it, even unlike pictures are near each other.
    """
    cache, digests = features.cache, features.digests
    rows = {split: np.arange(*cache.splits[split]) for split in _SPLITS if split in cache.splits}
    rows = {split: of_split[features.status[of_split] == OK] for split, of_split in rows.items()}
    pairs = [(split, other) for split in rows for other in rows if _SPLITS.index(other) < _SPLITS.index(split)]
    sums = [
        features.global_(block).sum(0, dtype=np.float64) for of_split in rows.values() for block in _blocks(of_split)
    ]
    mean = np.sum(sums, axis=0) / max(1, sum(map(len, rows.values())))

    def units(block: np.ndarray) -> np.ndarray:
        values = features.global_(block).astype(np.float32) - mean.astype(np.float32)
        return np.asarray(values / np.maximum(np.linalg.norm(values, axis=1, keepdims=True), 1e-12))

    found = []
    with Progress("compared", sum(len(rows[one]) * len(rows[other]) for one, other in pairs), "pairs") as progress:
        for split, other in pairs:
            for block in _blocks(rows[split]):
                queries, best, nearest = units(block), np.full(len(block), -np.inf), np.zeros(len(block), np.int64)
                for others in _blocks(rows[other]):
                    cosines = queries @ units(others).T
                    at = cosines.argmax(1)
                    peaks = cosines[np.arange(len(block)), at]
                    nearest, best = np.where(peaks > best, others[at], nearest), np.maximum(best, peaks)
                    progress.update(cosines.size)
                for place in np.flatnonzero(best >= threshold).tolist():
                    one, two = int(block[place]), int(nearest[place])
                    (image,), (twin,) = cache.file_names(one, one + 1), cache.file_names(two, two + 1)
                    same = bool(digests[one].any() and (digests[one] == digests[two]).all())
                    found.append(NearPair(float(min(best[place], 1.0)), split, image, other, twin, same))
    return sorted(found, key=lambda pair: -pair.cosine)


def _blocks(rows: np.ndarray) -> Iterator[np.ndarray]:
    return (rows[first : first + _BLOCK] for first in range(0, len(rows), _BLOCK))
