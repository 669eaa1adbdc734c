"""What a task takes from other generations of the cache in place of computing it."""

import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import lru_cache
from uuid import uuid4

import numpy as np

from ...cache import CaptionSet, FeatureCache, FeatureSet, ImageSet
from ...cache.earlier import Earlier, equal_sets, knows_samples
from ...cache.facts import SetFacts
from ...cache.feature_sets import FEATURES
from ...cache.rows import ranges
from ...errors import CacheError
from ..options import Options


@dataclass(frozen=True)
class EarlierSets:
    """Where the equal sets of other generations are; a process looks through them once."""

    addresses: tuple[str, ...] = ()
    path: str = ""  # of the set in each
    share: bool = True  # whole shards by their files; else all by values, which are checked as they are read
    token: str = field(default_factory=lambda: uuid4().hex)  # of this extraction: at the next one they may have changed


@dataclass(frozen=True)
class Taken:
    """What a shard takes from others: which of its samples, bool [B], and the set and shard whose files it shares."""

    samples: np.ndarray
    shared: tuple[FeatureSet, int] | None = None


def find_earlier(
    url: str, path: str, facts: SetFacts, options: Options, is_new: bool
) -> tuple[int | None, EarlierSets | None]:
    """Return how many images a shard of a set gets, and which sets of other generations have features of it.

    It has as many as before: shards of one length can be shared. Shards that are repaired are computed; a
    new generation has none, and with `repair` shares no files with others, which may be damaged.

    Args:
        url: of the generation that the set is in, or of the cache, if that is the current one.
        path: ``images/NAME`` or ``captions/NAME``.
        facts: of the set.
        options: of the extraction.
        is_new: whether an update makes the generation.
    """
    equal = equal_sets(url, path, facts.fingerprint)
    length = options.shard_images or (equal[0].blocks.length if equal else None)
    known = [features for features in equal if knows_samples(features)]
    for features in equal:
        if features.channels is not None and features not in known:
            print(
                f"Note: '{features.name}' of generation {features.cache.generation} does not say of which files it is;"
                " all its pictures are computed anew.",
                file=sys.stderr,
            )
    if not known or (options.repair and not is_new):
        return length, None
    return length, EarlierSets(tuple(features.cache.address for features in known), path, share=not options.repair)


_LOOKING = threading.Lock()


def earlier(sets: EarlierSets) -> Earlier:
    """Return the features of these sets; a process keeps what it found last until `forgetting` ends."""
    with _LOOKING:
        return _look_through(sets)


@lru_cache(1)
def _look_through(sets: EarlierSets) -> Earlier:
    return Earlier([FeatureCache.open(address).set_at(sets.path) for address in sets.addresses])


@contextmanager
def forgetting() -> Iterator[None]:
    """Let go at the end of what `earlier` found: keys and rows of every sample of the other generations."""
    try:
        yield
    finally:
        _look_through.cache_clear()


def take_images(sets: EarlierSets, features: ImageSet, keys: np.ndarray, arrays: dict[str, np.ndarray]) -> Taken:
    """Fill the arrays of a shard with what other sets have of these keys, S16 [B]; what is damaged there is left out.

    The features themselves stay out where all of them are in the files of one shard.
    """
    found = earlier(sets)
    shared = found.whole(features, keys) if sets.share else None
    names = [name for name in features.array_names() if name != "digest" and not (shared and name in FEATURES)]
    samples = np.zeros(len(keys), dtype=bool)
    for part in found.find(keys):
        assert isinstance(part.features, ImageSet)
        try:
            values = {name: part.features.array(name, part.there) for name in names}
        except CacheError:
            continue
        for name, own in values.items():
            arrays[name][part.here] = own
        samples[part.here] = True
    return _checked(Taken(samples, shared))


def take_captions(sets: EarlierSets, features: CaptionSet, keys: np.ndarray, arrays: dict[str, np.ndarray]) -> Taken:
    """Fill the local and global features of a shard whose captions are tokenised; otherwise as `take_images`."""
    found = earlier(sets)
    shared = found.whole(features, keys) if sets.share else None
    samples = np.zeros(len(keys), dtype=bool)
    lengths = arrays["length"][: len(keys)]
    starts = arrays["start"][: len(keys)] - arrays["start"][0]
    for part in found.find(keys):
        assert isinstance(part.features, CaptionSet)
        try:
            fits = part.features.length[part.there] == lengths[part.here]
            here, there = part.here[fits], part.there[fits]
            local, global_ = (None, None) if shared else (part.features.local(there), part.features.global_(there))
        except CacheError:
            continue
        if local is not None:
            arrays["local"][ranges(starts[here], lengths[here])], arrays["global"][here] = local, global_
        samples[here] = True
    return _checked(Taken(samples, shared))


def _checked(taken: Taken) -> Taken:
    """Return nothing where files were to be shared and not all is there."""
    if taken.shared is not None and not taken.samples.all():
        return Taken(np.zeros_like(taken.samples))
    return taken
