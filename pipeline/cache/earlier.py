"""Features that another generation of a cache has, found by what they are of: a picture's file, a caption's text."""

import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from ..data.digests import BYTES, NONE, digest
from ..errors import CacheError
from ..wording import printable
from .feature_cache import FeatureCache
from .feature_sets import FEATURES, OK, CaptionSet, FeatureSet, ImageSet
from .storage.folder import home_of
from .storage.generations import current, numbers
from .storage.store import Store


def equal_sets(url: str, path: str, fingerprint: str) -> list[FeatureSet]:
    """Return the sets at `path` of that fingerprint in other generations than `url`, those of the last one first.

    A generation that is damaged has none.

    Args:
        url: of a cache, which stands for its current generation, or of one of its generations, which need not be there.
        path: ``images/NAME`` or ``captions/NAME``.
        fingerprint: of the set.
    """
    home_url, number = home_of(url)
    own = number or current(Store(home_url))
    others = (one for one in _generations(url) if one.generation != own and path in one.set_paths())
    found = (features for other in others for features in _sound(other, [path]))
    return [features for features in found if features.fingerprint == fingerprint]


def sets_of_all(url: str, modality: str) -> list[FeatureSet]:
    """Return the sets of ``images`` or ``captions`` in all generations of the cache at `url`, the last ones first.

    What is damaged is left out; `url` is as of `equal_sets`.
    """
    return [features for one in _generations(url) for features in _sound(one, one.set_paths(modality))]


def _generations(url: str) -> Iterator[FeatureCache]:
    """Yield the generations of the cache at `url`, the last one first, without those that are damaged."""
    home_url, _ = home_of(url)
    for number in reversed(numbers(Store(home_url))):
        try:
            yield FeatureCache.open(home_url, generation=number)
        except CacheError:
            continue


def _sound(cache: FeatureCache, paths: Sequence[str]) -> Iterator[FeatureSet]:
    """Yield the sets at these paths, without those that are damaged."""
    for path in paths:
        try:
            yield cache.set_at(path)
        except CacheError:
            continue


def knows_samples(features: FeatureSet) -> bool:
    """Return whether a set says of which content its features are; those of images that are older do not."""
    return features.channels is not None and (
        isinstance(features, CaptionSet) or "digest" in features.attributes["arrays"]
    )


def image_keys(digests: np.ndarray, ids: list[str], views: int) -> np.ndarray:
    """Return what decides the features of each image, S16 [B]: its file, and of several views its id as well.

    Args:
        digests: of the files, uint8 [B,16].
        ids: of the images; they decide what views show.
        views: of an image.
    """
    if views == 1:
        return _as_keys(list(map(bytes, digests)))
    pairs = zip(digests, ids, strict=True)
    return _as_keys([NONE if bytes(file) == NONE else digest(bytes(file) + key.encode()) for file, key in pairs])


def caption_keys(texts: list[str]) -> np.ndarray:
    """Return what decides the features of each caption, S16 [B]: its text."""
    return _as_keys([digest(text.encode()) for text in texts])


def _as_keys(digests: list[bytes]) -> np.ndarray:
    return np.frombuffer(b"".join(digests), dtype=f"S{BYTES}")


@dataclass(frozen=True)
class FoundRows:
    """Rows of a shard that another set has: here, counted from the shard's first, and the rows of samples there."""

    features: FeatureSet
    here: np.ndarray
    there: np.ndarray


class Earlier:
    """Equal feature sets, looked through for features that need not be computed again; one that is damaged has none."""

    def __init__(self, sets: Sequence[FeatureSet]) -> None:
        self._known: list[_Known] = []
        for features in sets:
            try:
                self._known.append(_Known(features))
            except CacheError as error:
                where = f"'{features.name}' of generation {features.cache.generation}"
                print(printable(f"Note: nothing is taken from {where}, which is damaged ({error})."), file=sys.stderr)

    def find(self, keys: np.ndarray) -> list[FoundRows]:
        """Return where the features of these keys are, S16 [B]."""
        left, found = np.arange(len(keys)), []
        left = left[keys != NONE]
        for known in self._known:
            rows = known.rows_of(keys[left])
            if (rows >= 0).any():
                found.append(FoundRows(known.features, left[rows >= 0], rows[rows >= 0]))
            left = left[rows < 0]
        return found

    def whole(self, features: FeatureSet, keys: np.ndarray) -> tuple[FeatureSet, int] | None:
        """Return the shard of another set whose files `features` can share: it holds just these keys in this order."""
        wanted = digest(keys.tobytes())
        for known in self._known:
            shard = known.shards.get(wanted)
            if shard is not None and _alike(features, known.features):
                return known.features, shard
        return None


class _Known:
    """A set, and where it has the features of a key."""

    def __init__(self, features: FeatureSet) -> None:
        self.features = features
        keys, done = _keys_of(features), features.done()
        self._bounds = [features.rows_in(shard) for shard in range(len(done))]
        usable = features.status == OK
        for (first, last), finished in zip(self._bounds, done.tolist(), strict=True):
            usable[first:last] &= finished
        rows = np.flatnonzero(usable)
        order = np.argsort(keys[rows], kind="stable")
        self._keys, self._rows = keys[rows][order], rows[order]
        self.shards = {
            digest(keys[first:last].tobytes()): shard
            for shard, (first, last) in enumerate(self._bounds)
            if usable[first:last].all()
        }

    def rows_of(self, keys: np.ndarray) -> np.ndarray:
        """Return the row of samples that has each key, int64 [B]; -1: none has."""
        if not len(self._keys):
            return np.full(len(keys), -1, dtype=np.int64)
        at = np.minimum(np.searchsorted(self._keys, keys), len(self._keys) - 1)
        return np.where(self._keys[at] == keys, self._rows[at], -1)


def _keys_of(features: FeatureSet) -> np.ndarray:
    cache = features.cache
    if isinstance(features, ImageSet):
        ids = cache.ids(0, cache.images) if features.views > 1 else []
        return image_keys(features.of_samples("digest"), ids, features.views)
    return caption_keys(cache.caption_texts(0, cache.captions))


def _alike(features: FeatureSet, other: FeatureSet) -> bool:
    """Return whether a shard of one set has the same files as one of the other."""
    for name in FEATURES:
        one, two = (each.cache.store.open_array(f"{each.path}/{name}") for each in (features, other))
        if (one.chunks, one.shards, one.shape[1:], one.dtype) != (two.chunks, two.shards, two.shape[1:], two.dtype):
            return False
    return True
