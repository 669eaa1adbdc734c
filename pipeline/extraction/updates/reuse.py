"""What a task takes from other generations of the cache in place of computing it."""

import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import lru_cache
from uuid import uuid4

import numpy as np

from ...cache import CaptionSet, FeatureCache, FeatureSet, ImageSet
from ...cache.earlier import Earlier
from ...cache.feature_sets import FEATURES
from ...cache.rows import ranges
from ...errors import CacheError, StoreError


@dataclass(frozen=True)
class Sources:
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


_LOOKING = threading.Lock()


def earlier(sources: Sources) -> Earlier:
    """Return the features of these sources; a process keeps what it found last until `forgetting` ends."""
    with _LOOKING:
        return _look_through(sources)


@lru_cache(1)
def _look_through(sources: Sources) -> Earlier:
    return Earlier([FeatureCache.open(address).set_at(sources.path) for address in sources.addresses])


@contextmanager
def forgetting() -> Iterator[None]:
    """Let go at the end of what `earlier` found: keys and rows of every sample of the other generations."""
    try:
        yield
    finally:
        _look_through.cache_clear()


def take_images(sources: Sources, features: ImageSet, keys: np.ndarray, arrays: dict[str, np.ndarray]) -> Taken:
    """Fill the arrays of a shard with what other sets have of these keys, S16 [B]; what is damaged there is left out.

    The features themselves stay out where all of them are in the files of one shard.
    """
    found = earlier(sources)
    shared = found.whole(features, keys) if sources.share else None
    names = [name for name in features.array_names() if name != "digest" and not (shared and name in FEATURES)]
    samples = np.zeros(len(keys), dtype=bool)
    for part in found.find(keys):
        assert isinstance(part.features, ImageSet)
        try:
            values = {name: part.features.array(name, part.there) for name in names}
        except StoreError:
            raise
        except CacheError:
            continue
        for name, own in values.items():
            arrays[name][part.here] = own
        samples[part.here] = True
    return _checked(Taken(samples, shared))


def take_captions(sources: Sources, features: CaptionSet, keys: np.ndarray, arrays: dict[str, np.ndarray]) -> Taken:
    """Fill the local and global features of a shard whose captions are tokenised; otherwise as `take_images`."""
    found = earlier(sources)
    shared = found.whole(features, keys) if sources.share else None
    samples = np.zeros(len(keys), dtype=bool)
    lengths = arrays["length"][: len(keys)]
    starts = arrays["start"][: len(keys)] - arrays["start"][0]
    for part in found.find(keys):
        assert isinstance(part.features, CaptionSet)
        try:
            fits = part.features.length[part.there] == lengths[part.here]
            here, there = part.here[fits], part.there[fits]
            local, global_ = (None, None) if shared else (part.features.local(there), part.features.global_(there))
        except StoreError:
            raise
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


def addresses(sets: Sequence[FeatureSet]) -> tuple[str, ...]:
    """Return where sets lie."""
    return tuple(features.cache.address for features in sets)
