"""Checks a cache from end to end: metadata, checksums, missing files, counts and values."""

from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import zarr

from ...errors import StoreError
from ...progress import Progress
from ..feature_cache import MODALITIES, FeatureCache
from ..feature_sets import FAILED, OK, FeatureSet
from ..layout import TEXTS
from ..storage.folder import forbidden
from ..storage.generations import store_of
from ..storage.seals import files_of, seal_of_file, seals
from ..storage.store import Store


@dataclass(frozen=True)
class Damage:
    """A part of a cache that is damaged."""

    array: str  # path of the array or group
    shard: int | None = None  # which of its shards; None: its metadata
    samples: tuple[int, int] | None = None  # affected rows [first, last) of images or captions, where they are known


@dataclass(frozen=True)
class FailedSample:
    """A sample that could not be read; that is no damage."""

    id: str
    reason: str


@dataclass(frozen=True)
class Verification:
    """What `verify` found."""

    shards: int  # finished ones that were read
    failed_samples: tuple[FailedSample, ...]  # of all sets
    damaged: tuple[Damage, ...]  # all damage

    @property
    def ok(self) -> bool:
        """Whether nothing is damaged."""
        return not self.damaged

    def to_json(self) -> dict[str, Any]:
        """Return all fields, and ``ok``."""
        return {"ok": self.ok, **asdict(self)}


def verify(url: str) -> Verification:
    """Read every file of the cache at `url`.

    Raises:
        CacheError: no cache is there.
    """
    store = store_of(url)
    if not store.exists("zarr.json"):
        FeatureCache.open(url)  # says what is wrong
    damaged = [Damage(node or "/") for group in ("", "samples", *MODALITIES) for node in _nodes(store, group)]
    damaged += [] if damaged else _samples(store)
    if damaged:  # without its samples nothing else in the cache can be judged
        return Verification(0, (), tuple(damaged))
    cache = FeatureCache.open(url)
    sets = []
    for path in cache.set_paths():
        nodes = store.inspect_group(path)[1]
        damaged += [Damage(node) for node in nodes]
        sets += [] if nodes else [CheckedSet(cache.set_at(path))]
    with Progress("verify", sum(len(checked.features.blocks) for checked in sets), "shards") as progress:
        for checked in sets:
            for shard in range(len(checked.features.blocks)):
                damaged += checked.damage(shard)
                progress.update(1)
    failed = (FailedSample(key, why) for checked in sets for key, why in checked.features.failures)
    return Verification(sum(checked.done for checked in sets), tuple(failed), tuple(damaged))


def broken_shards(features: FeatureSet) -> list[int]:
    """Return the finished shards of a set that are damaged or hold samples that failed."""
    checked = CheckedSet(features)
    ids = features.cache.ids(0, features.cache.images) if features.failed else []
    failed = np.array([row for row, key in enumerate(ids) if key in features.failed], dtype=np.int64)
    of_failed = set(features.blocks.shard_of(failed).tolist())
    return [shard for shard in range(len(features.blocks)) if checked.damage(shard) or shard in of_failed]


class CheckedSet:
    """One feature set under examination; nothing but its sealed metadata is trusted.

    Attributes:
        features: the set.
        arrays: all its arrays by name, also ``done``.
        done: how many finished shards `damage` has seen.
    """

    def __init__(self, features: FeatureSet) -> None:
        self.features, self._store = features, features.cache.store
        names = features.attributes["arrays"]
        self.arrays = {name: self._store.open_array(f"{features.path}/{name}") for name in names}
        self.done = 0

    def damage(self, shard: int) -> list[Damage]:
        """Return what is damaged of one shard; one that is not done has no damage."""
        marks = self.arrays["done"]
        mark, intact = _read(self._store, marks, shard)
        if intact and mark[0] == 1:
            self.done += 1
            return [self._damage(name, shard) for name in self._damaged_arrays(shard)]
        never_written = not intact and not any(map(self._store.exists, files_of(marks, shard)))
        return [] if never_written or (intact and mark[0] == 0) else [self._damage("done", shard)]

    def _damaged_arrays(self, shard: int) -> list[str]:
        """Return the arrays whose files are damaged, or if none is, whose values are impossible."""
        damaged: list[str] = []
        values: dict[str, np.ndarray] = {}
        for name in self.features.array_names():
            read, intact = _read(self._store, self.arrays[name], shard)
            values |= {name: read} if intact else {}
            damaged += [] if intact else [name]
        if "seal" in self.arrays:
            damaged += self._misplaced(shard, values)
        if damaged:
            return damaged
        first, last = self.features.rows_in(shard)
        status = values["status"][: last - first]
        damaged += [] if np.isin(status, (OK, FAILED)).all() else ["status"]
        if self.features.modality == "images" and not self._records(shard, status == FAILED):
            # Whoever writes meanwhile records what failed before the shard is marked.
            self.features = type(self.features)(self.features.cache, self.features.name)
            damaged += [] if self._records(shard, status == FAILED) else ["status"]
        return damaged + [
            name for name in ("local", "global") if name in values and not self._finite(name, values, status == OK)
        ]

    def _records(self, shard: int, failed: np.ndarray) -> bool:
        """Return whether the set's attributes name those samples of a shard that failed."""
        ids = self.features.cache.ids(*self.features.rows_in(shard))
        return np.array_equal([key in self.features.failed for key in ids], failed)

    def _misplaced(self, shard: int, values: dict[str, np.ndarray]) -> list[str]:
        """Return the arrays with intact files that are not those that were written here."""
        seal, intact = _read(self._store, self.arrays["seal"], shard)
        if not intact:
            return ["seal"]
        found, at = [], 0
        for name in self.features.array_names():
            files = files_of(self.arrays[name], shard)
            expected, at = seal[0, at : at + len(files)].tolist(), at + len(files)
            if name in values and seals(self.arrays[name], shard, values[name]) != expected:
                found.append(name)
        return found

    def _finite(self, name: str, values: dict[str, np.ndarray], good: np.ndarray) -> bool:
        """Return whether the valid rows of the good samples are finite."""
        array, lengths = values[name], values["length"][: len(good)]
        if name == "global":
            return bool(np.isfinite(array[: len(good)][good]).all())
        if self.features.modality == "captions":
            return bool(np.isfinite(array[: lengths.sum()]).all())  # packed, none fails
        rows = np.moveaxis(array[: len(good)][good], -2, 1)  # before an axis of views, if there is one
        valid = np.arange(rows.shape[1]) < lengths[good][:, None]
        return bool(np.isfinite(rows[valid]).all())

    def _damage(self, name: str, shard: int) -> Damage:
        return Damage(f"{self.features.path}/{name}", shard, self.features.rows_in(shard))


def _nodes(store: Store, group: str) -> list[str]:
    if store.is_unfinished(group):
        store.read_group(group)  # says so
    return store.inspect_group(group)[1]


def _samples(store: Store) -> list[Damage]:
    attributes, _ = store.inspect_group("samples")
    damaged = []
    for name in attributes["arrays"]:
        array = store.open_array(f"samples/{name}")
        for chunk in range(-(-array.shape[0] // array.chunks[0])):
            values, intact = _read(store, array, chunk)
            sealed = attributes.get("seals", {}).get(name)  # none of an earlier version
            here = sealed is None or seal_of_file(array.path, values, len(values), 0, chunk) == sealed[chunk]
            if not (intact and here):
                rows = (chunk * array.chunks[0], min((chunk + 1) * array.chunks[0], array.shape[0]))
                # Of a byte array, which rows are affected is not known.
                damaged.append(Damage(f"samples/{name}", chunk, None if name in TEXTS else rows))
    return damaged


def _read(store: Store, array: "zarr.Array[Any]", shard: int) -> tuple[np.ndarray, bool]:
    """Return one shard of an array, and whether its files are there and their checksums fit."""
    rows = (array.shards or array.chunks)[0]
    try:
        values = np.asarray(array[shard * rows : (shard + 1) * rows])
    except StoreError:
        raise
    except PermissionError as error:
        raise forbidden(str(error.filename)) from error
    except Exception:  # whatever a damaged file makes a codec raise, it is damage
        return np.empty(0), False
    # Of an empty file of several blocks Zarr makes zeros.
    return values, all(map(store.is_written, files_of(array, shard)))
