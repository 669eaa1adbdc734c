"""What the splits of a store share: files of equal bytes, texts, and pictures that look alike."""

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import combinations

import numpy as np

from ..data.digests import BYTES
from ..progress import Progress
from ..wording import counted
from .sets import OK, ImageSet
from .store import FeatureCache

_SPLITS = ("train", "val", "test")
_BLOCK = 4096  # samples that are compared with as many others


@dataclass(frozen=True)
class Leaks:
    """How much stands in several of train, val and test."""

    sentence: str  # what of these there is, with an example of each, without a full stop; "" if there is nothing
    pictures: int  # different files that are in more than one split
    captions: int  # of test, whose text stands in train
    copies: int  # pictures of test whose file is that of another there, each of whose captions has several right images


def find_leaks(cache: FeatureCache) -> Leaks:
    """Compare digests of files, where a feature set has them, and texts as they are; a split ``other`` is left out."""
    digests, parts = cache.known_digests(), list[str]()
    ranges = {split: cache.splits[split] for split in _SPLITS if split in cache.splits}
    known = {split: first + np.flatnonzero(digests[first:last].any(axis=1)) for split, (first, last) in ranges.items()}
    splits, rows = np.repeat([*known], [*map(len, known.values())]), np.concatenate([[], *known.values()]).astype(int)
    _, first, which = np.unique(digests[rows].view(f"S{BYTES}").ravel(), return_index=True, return_inverse=True)
    same = first[which]  # where each of `rows` has the same picture for the first time
    leaking = np.flatnonzero(splits[same] != splits)
    pictures = len(np.unique(same[leaking]))
    asked, training = (
        cache.in_blocks(cache.caption_texts, *cache.captions_of(*ranges.get(split, (0, 0))))
        for split in ("test", "train")
    )
    times = Counter(asked)
    taught = {text for text in training if text in times}
    captions = sum(times[text] for text in taught)
    if pictures:
        number = f"{counted(pictures, 'picture')} {'is' if pictures == 1 else 'are'}"
        places = (int(same[leaking[0]]), int(leaking[0]))
        names = [f"{cache.file_names(rows[at], rows[at] + 1)[0]} ({splits[at]})" for at in places]
        parts.append(f"{number} in more than one split, such as {' and '.join(names)}")
    if captions:
        example = next(text for text in times if text in taught)
        parts.append(f"{captions:,} of {counted(times.total(), 'caption')} of test stand in train as well: '{example}'")
    if copies := int((splits == "test").sum()) - len(np.unique(same[splits == "test"])):
        tested = int(np.diff(ranges["test"])[0])
        parts.append(
            f"{copies:,} of {counted(tested, 'picture')} of test {'is' if copies == 1 else 'are'} the same file"
            " as another there"
        )
    return Leaks("; ".join(parts), pictures, captions, copies)


@dataclass(frozen=True)
class NearPair:
    """A picture of val or test, and the one of another split that is most like it."""

    cosine: float  # of their global features, less the mean
    split: str
    image: str  # file name
    other_split: str
    other: str


def near_pairs(features: ImageSet, threshold: float) -> list[NearPair]:
    """Compare each picture of val with those of train, and each of test with both; the most alike come first.

    Of a picture and another split the nearest is returned, if the cosine of their global features is `threshold` or
    more. The mean of all is taken away before: without it, even unlike pictures are near each other.
    """
    names = features.cache.file_names(0, features.cache.images)
    found = {split: np.arange(*features.cache.splits[split]) for split in _SPLITS if split in features.cache.splits}
    rows = {split: of_split[features.status[of_split] == OK] for split, of_split in found.items()}
    sums = [
        features.global_(block).sum(0, dtype=np.float64) for of_split in rows.values() for block in _blocks(of_split)
    ]
    mean = np.float32(np.sum(sums, axis=0) / max(1, sum(map(len, rows.values()))))

    def units(block: np.ndarray) -> np.ndarray:
        values = features.global_(block).astype(np.float32) - mean
        return np.asarray(values / np.maximum(np.linalg.norm(values, axis=1, keepdims=True), 1e-12))

    pairs = []
    sides = list(combinations(rows, 2))
    with Progress("compared", sum(len(rows[one]) * len(rows[other]) for other, one in sides), "pairs") as progress:
        for other, split in sides:
            for block in _blocks(rows[split]):
                queries, best, nearest = units(block), np.full(len(block), -np.inf), np.zeros(len(block), np.int64)
                for others in _blocks(rows[other]):
                    cosines = queries @ units(others).T
                    peaks = cosines.max(1)
                    nearest, best = np.where(peaks > best, others[cosines.argmax(1)], nearest), np.maximum(best, peaks)
                    progress.update(cosines.size)
                pairs += [
                    NearPair(float(min(best[at], 1.0)), split, names[block[at]], other, names[nearest[at]])
                    for at in np.flatnonzero(best >= threshold)
                ]
    return sorted(pairs, key=lambda pair: -pair.cosine)


def _blocks(rows: np.ndarray) -> Iterator[np.ndarray]:
    return (rows[first : first + _BLOCK] for first in range(0, len(rows), _BLOCK))
