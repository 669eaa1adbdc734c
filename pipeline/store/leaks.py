"""What the splits of a store share: files of equal bytes, texts, and pictures that look alike."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import combinations

import numpy as np

from ..progress import Progress
from ..wording import counted
from .sets import OK, ImageSet
from .store import FeatureCache

_SPLITS = ("train", "val", "test")
_BLOCK = 4096  # samples that are compared with as many others
_LOOKED_UP = 1 << 20  # samples that are looked up together


@dataclass(frozen=True)
class Leaks:
    """How much stands in several of train, val and test."""

    sentence: str  # what of these there is, with an example of each, without a full stop; "" if there is nothing
    pictures: int  # different files that are in more than one split
    captions: int  # of test, whose text stands in train
    copies: int  # pictures of test whose file is that of another there, each of whose captions has several right images


def find_leaks(cache: FeatureCache) -> Leaks:
    """Compare digests of files, where a feature set has them, and texts as they are; a split ``other`` is left out."""
    parts, spans = list[str](), {split: cache.splits[split] for split in _SPLITS if split in cache.splits}
    # Half of each digest, which tells files apart as well; zeros are not known.
    digests = cache.known_digests().view(np.int64)[:, 0]
    others = [spans[split] for split in spans if split != "train"]
    held = np.concatenate([begin + np.flatnonzero(digests[begin:end]) for begin, end in [(0, 0), *others]])
    files, first, which = np.unique(digests[held], return_index=True, return_inverse=True)
    taught = _first(files, lambda begin, end: digests[begin:end], spans.get("train", (0, 0)))
    first = np.where(taught < 0, held[first], taught)[which]  # where each of `held` is for the first time
    ends = np.array([last for _, last in spans.values()])
    split_of, its = (np.searchsorted(ends, rows, side="right") for rows in (first, held))
    leaking = np.flatnonzero(split_of != its)
    if pictures := len(np.unique(which[leaking])):
        number = f"{counted(pictures, 'picture')} {'is' if pictures == 1 else 'are'}"
        row, of = int(leaking[0]), [*spans]
        places = (int(first[row]), of[split_of[row]]), (int(held[row]), of[its[row]])
        names = [f"{cache.file_names(at, at + 1)[0]} ({split})" for at, split in places]
        parts.append(f"{number} in more than one split, such as {' and '.join(names)}")
    asked, training = (cache.captions_of(*spans.get(split, (0, 0))) for split in ("test", "train"))

    def hashes(start: int, stop: int) -> np.ndarray:
        return cache.text_hashes(np.arange(start, stop))

    texts, which_text = np.unique(hashes(*asked), return_inverse=True)
    again = np.flatnonzero((_first(texts, hashes, training) >= 0)[which_text])
    if captions := len(again):
        example = cache.caption_texts(asked[0] + int(again[0]), asked[0] + int(again[0]) + 1)[0]
        parts.append(
            f"{captions:,} of {counted(len(which_text), 'caption')} of test stand in train as well: '{example}'"
        )
    tested = which[held >= spans["test"][0]] if "test" in spans else which[:0]
    if copies := len(tested) - len(np.unique(tested)):
        pictures_of_test = counted(spans["test"][1] - spans["test"][0], "picture")
        parts.append(
            f"{copies:,} of {pictures_of_test} of test {'is' if copies == 1 else 'are'} the same file as another there"
        )
    return Leaks("; ".join(parts), pictures, captions, copies)


def taught_in(other: FeatureCache, cache: FeatureCache) -> list[int]:
    """Return the rows of images of test whose files are in train of another store."""
    known = {*map(bytes, other.known_digests()[slice(*other.splits.get("train", (0, 0)))])}
    digests, tested = cache.known_digests(), range(*cache.splits.get("test", (0, 0)))
    return [row for row in tested if digests[row].any() and bytes(digests[row]) in known]


def _first(wanted: np.ndarray, read: Callable[[int, int], np.ndarray], span: tuple[int, int]) -> np.ndarray:
    """Return the first row of a span that has each of the sorted numbers, -1 where none has; `read` gives theirs."""
    first = np.full(len(wanted), -1)
    for begin in range(*span, _LOOKED_UP) if len(wanted) else ():
        numbers = read(begin, min(begin + _LOOKED_UP, span[1]))
        at = np.searchsorted(wanted, numbers).clip(max=len(wanted) - 1)
        there = np.flatnonzero((wanted[at] == numbers) & (first[at] < 0))[::-1]  # of several the first comes last
        first[at[there]] = begin + there
    return first


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
