"""Merges stores that were filled on several machines, shard by shard."""

import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import combinations
from typing import Any

import numpy as np

from ...errors import CacheError
from ...progress import Progress
from ...wording import printable
from ..feature_cache import FeatureCache
from ..feature_sets import FeatureSet
from ..known_samples import samples_of
from ..layout import find_set, open_for_writing, require_place
from ..records import record_failures
from ..storage.generations import store_of
from ..storage.seals import files_of
from .verify import CheckedSet

# Attributes that may differ between parts of one set; earlier versions wrote no grid and no cells.
_OF_ONE_MACHINE = {"failed", "recorded", "asked", "grid", "cells", "source", "command"}


@dataclass(frozen=True)
class MergedSet:
    """A feature set after a merge: shards copied now, there before and in all, and samples that failed."""

    modality: str
    name: str
    shards: int
    shards_before: int
    shards_in_all: int
    failed: int


@dataclass(frozen=True)
class Merge:
    """What a merge has done: the store, its data set, and its feature sets."""

    store: str
    dataset: str
    sets: tuple[MergedSet, ...]


def merge(url: str, sources: Sequence[str]) -> Merge:
    """Copy the finished shards of `sources` into the cache at `url`, which is made if it is not there.

    Each shard is checked at its source, copied whole and then marked, so that a stopped merge goes on where it was. The
    result is bit for bit what an extraction in one place would have written. Everything that can be refused without
    reading the features is refused before anything is written.

    Raises:
        CacheError: a store is missing or damaged, or holds other samples or another set of the same name; a finished
            shard differs between two stores; or another process is writing to the cache.
        OutputError: the cache cannot be written.
    """
    caches = [FeatureCache.open(source) for source in sources]
    if not caches:
        raise CacheError("there is nothing to merge; name at least one store beside the one to merge into")
    store = store_of(url)
    for cache in caches:
        if (cache.store.fs, cache.store.root) == (store.fs, store.root):
            raise CacheError(f"{cache.url} is the store to merge into; name only others after it")
    there = store.exists("zarr.json") and not store.is_unfinished("")
    _check_samples([*caches, *([FeatureCache.open(url)] if there else [])])
    samples = samples_of(caches[0])
    require_place(url, samples)
    parts = [part for cache in caches for part in _parts(cache)]
    if not there:
        _check_sets(parts)
        _check_overlap(parts)
    with open_for_writing(url, samples, caches[0].protocols) as cache:
        held = _parts(cache)
        _check_sets([*held, *parts])
        plan = [(part, shard) for part, shard in _check_overlap([*held, *parts]) if part.cache is not cache]
        with Progress("merge", len(plan), "shards") as progress:
            sets: dict[_Part, FeatureSet] = {}
            for part, shard in plan:
                sets[part] = sets.get(part) or _set_like(part, cache)
                _copy_shard(part, shard, sets[part])
                progress.update(1)
        before = {part.path: len(part.done) for part in held}
        merged = tuple(_summary(part, before.get(part.path, 0)) for part in _parts(cache))
        return Merge(url, cache.dataset, merged)


class _Part:
    """One feature set in one store, with the shards that were finished when this was made.

    The marks are read first: an extraction that goes on meanwhile records what failed before it marks a shard.
    """

    def __init__(self, cache: FeatureCache, path: str) -> None:
        self.cache, self.store, self.path = cache, cache.store, path
        self.done: list[int] = np.flatnonzero(cache.store.read_array(f"{path}/done") == 1).tolist()
        self.features = cache.set_at(path)
        self.checked = CheckedSet(self.features)

    @property
    def facts(self) -> dict[str, Any]:
        """What all parts of one set have in common."""
        return {key: value for key, value in self.features.attributes.items() if key not in _OF_ONE_MACHINE}

    @property
    def splits(self) -> set[str]:
        """The splits of which a shard is finished."""
        blocks = self.features.blocks
        return {split for split in self.cache.splits if set(blocks.of_split(split)) & set(self.done)}

    def files(self, shard: int) -> list[str]:
        """Return the files of one shard, without its mark."""
        arrays = (array for name, array in self.checked.arrays.items() if name != "done")
        return [file for array in arrays for file in files_of(array, shard)]


def _parts(cache: FeatureCache) -> list[_Part]:
    return [_Part(cache, path) for path in cache.set_paths()]


def _check_samples(caches: list[FeatureCache]) -> None:
    first = caches[0]
    for other in caches[1:]:
        if other.manifest_sha256 != first.manifest_sha256:
            raise CacheError(
                f"{other.url} holds other samples than {first.url}: data set '{other.dataset}', manifest"
                f" {other.manifest_sha256[:8]}, not '{first.dataset}', {first.manifest_sha256[:8]}; merge stores that"
                " were extracted from one manifest"
            )
        if replace(other.source, keys="") != replace(first.source, keys=""):  # one pattern can be written in two ways
            changed = sorted({file.name for file in {*other.source.files} ^ {*first.source.files}})
            raise CacheError(
                f"the pictures of {other.url} do not lie in the files of {first.url} ({', '.join(changed[:3])}): they"
                " have changed, or were copied without their times; extract one of the two again"
            )


def _check_sets(parts: list[_Part]) -> None:
    """Refuse parts that cannot become one set, though they have one name or look like halves of one set."""
    for first, second in combinations(parts, 2):
        a, b = first.facts, second.facts
        differing = _differing(a, b)
        where = f"{first.cache.url} and {second.cache.url}"
        if first.path != second.path:
            if _same_features(first, second):
                raise CacheError(
                    f"'{first.path}' and '{second.path}' are the same features under two names in {where}, and would"
                    " be two sets; extract one of them again with its weights in a folder of the other's name"
                )
            if _like_halves(first, second):
                inside = ", ".join(_differing(a["identity"], b["identity"])) or "dtype"
                raise CacheError(
                    f"'{first.path}' and '{second.path}' hold different splits in {where}, but cannot become one set:"
                    f" they differ in {inside}; make one of them again with the options of the other"
                )
        elif "shard_images" in differing:
            raise CacheError(
                f"'{first.path}' has shards of {a['shard_images']} and of {b['shard_images']} images in {where};"
                " extract one of them again with the other's --shard-images"
            )
        elif a["arrays"].keys() ^ b["arrays"].keys() == {"digest"}:
            older = second if "digest" in a["arrays"] else first
            raise CacheError(
                f"an earlier version made '{first.path}' in {older.cache.url}, and did not note of which files it is;"
                " extract that part again with this version, into another store"
            )
        elif differing:
            raise CacheError(
                f"'{first.path}' is not the same set in {where}: they differ in {', '.join(differing)}; make one of"
                " them again with the options of the other"
            )


def _differing(a: dict[str, Any], b: dict[str, Any]) -> list[str]:
    return sorted(key for key in a.keys() | b.keys() if a.get(key) != b.get(key))


def _same_features(first: _Part, second: _Part) -> bool:
    """Return whether two sets are made by one encoder, from folders or files of different names.

    A store that has both of them already cannot be mended by merging otherwise.
    """
    one, two = first.features, second.features
    same = (one.modality, one.fingerprint) == (two.modality, two.fingerprint)
    return same and second.path not in first.cache.set_paths() and first.path not in second.cache.set_paths()


def _like_halves(first: _Part, second: _Part) -> bool:
    """Return whether two sets of one encoder in two stores have no split in common."""
    encoders = [(part.features.modality, part.features.attributes["encoder"]) for part in (first, second)]
    return (
        first.cache is not second.cache
        and encoders[0] == encoders[1]
        and bool(first.splits and second.splits)
        and not first.splits & second.splits
    )


def _check_overlap(parts: list[_Part]) -> list[tuple[_Part, int]]:
    """Return each finished shard with the first part that has it; the other parts must have the same bytes."""
    holder: dict[tuple[str, int], _Part] = {}
    twice = []
    for part in parts:
        for shard in part.done:
            if holder.setdefault((part.path, shard), part) is not part:
                twice.append((holder[part.path, shard], part, shard))
    if twice:
        with Progress("compare", len(twice), "shards") as progress:
            for first, second, shard in twice:
                _check_equal(first, second, shard)
                progress.update(1)
    return [(part, shard) for (_, shard), part in holder.items()]


def _check_equal(first: _Part, second: _Part, shard: int) -> None:
    for name in first.files(shard):
        if first.store.read_bytes(name) != second.store.read_bytes(name):
            raise CacheError(
                f"shard {shard} of '{first.path}' is finished in {first.cache.url} and in {second.cache.url}, but"
                f" {name.removeprefix(first.path + '/')} differs; find the sound one with `xret cache verify`, or"
                " remove the set from one store with `xret cache rm`"
            )


def _set_like(part: _Part, cache: FeatureCache) -> FeatureSet:
    """Return the set of that name in `cache`, made with the part's own metadata if it is not there yet."""
    store = cache.store
    if features := find_set(cache, part.path):
        begun, there = features.attributes["recorded"], part.features.attributes["recorded"]
        if changed := [f"{key} {begun.get(key)} (there {there.get(key)})" for key in _differing(begun, there)]:
            note = f"Note: unlike {part.cache.url}, '{features.name}' was begun with {', '.join(changed)}."
            print(printable(note), file=sys.stderr)
        return features
    store.start_group(part.path)
    arrays = list(part.features.attributes["arrays"])
    for array in arrays:
        metadata = f"{part.path}/{array}/zarr.json"
        store.write_bytes(metadata, part.store.read_bytes(metadata))
    store.seal_group(part.path, {**part.features.attributes, "failed": {}}, arrays)
    return cache.set_at(part.path)


def _copy_shard(part: _Part, shard: int, features: FeatureSet) -> None:
    cache = features.cache
    damage = part.checked.damage(shard)
    if damage:
        raise CacheError(
            f"{part.cache.url}: shard {shard} of '{damage[0].array}' is damaged; repair that store and merge again,"
            " which goes on from here"
        )
    for name in part.files(shard):
        cache.store.write_bytes(name, part.store.read_bytes(name))
    ids = cache.ids(*features.blocks.images(shard))
    record_failures(features, ids, {key: part.features.failed[key] for key in ids if key in part.features.failed})
    cache.store.open_array(f"{part.path}/done", writable=True)[shard] = 1


def _summary(part: _Part, before: int) -> MergedSet:
    features = part.features
    in_all, failed = len(features.blocks), len(features.failures)
    return MergedSet(features.modality, features.name, len(part.done) - before, before, in_all, failed)
