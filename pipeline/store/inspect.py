"""What a store holds, whether all of it is sound, and the removal of a set."""

from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from itertools import combinations
from typing import Any

import numpy as np

from ..errors import CacheError
from ..progress import Progress
from .folder import Folder, is_sealed
from .leaks import Leaks, find_leaks
from .rows import StoredArray
from .samples import MODALITIES
from .sets import FAILED, NOT_DONE, OK, CaptionSet, FeatureSet, ImageSet
from .store import FeatureCache, choose_set


@dataclass(frozen=True)
class Damage:
    """A part of a store that is damaged."""

    array: str  # path of the array or group
    chunk: int | None = None  # None: its metadata
    samples: tuple[int, int] | None = None  # affected rows [first, last) of images or captions


@dataclass(frozen=True)
class Differing:
    """Two sets of images that have features of different pictures under the same names."""

    sets: tuple[str, str]  # their paths
    images: int  # that differ
    example: str  # the file name of one


@dataclass(frozen=True)
class Verification:
    """What `verify` found: chunks that are done, samples that could not be read, what is damaged, what differs."""

    chunks: int
    failed_samples: tuple[dict[str, str], ...]
    damaged: tuple[Damage, ...]
    differing: tuple[Differing, ...] = ()
    leaks: Leaks | None = None  # None: something is damaged

    @property
    def ok(self) -> bool:
        """Whether nothing is damaged, and all sets are of the same pictures."""
        return not (self.damaged or self.differing)

    def to_json(self) -> dict[str, Any]:
        """Return all fields, and ``ok``."""
        return {"ok": self.ok, **asdict(self)}


def describe(url: str) -> dict[str, Any]:
    """Return what the store at `url` holds, as JSON has it; CacheError if there is none."""
    cache = FeatureCache.open(url)
    return {
        "store": url,
        **{key: getattr(cache, key) for key in ("dataset", "manifest_sha256", "images", "captions")},
        "splits": {name: last - first for name, (first, last) in cache.splits.items()},  # images
        "bytes": cache.folder.size(),
        "sets": [_describe(cache.set_at(path)) for path in cache.set_paths()],
        "leaks": asdict(find_leaks(cache)),
    }


def _describe(features: ImageSet | CaptionSet) -> dict[str, Any]:
    width = features.channels or (features.global_channels if features.kind == "global" else None)
    rows = [features.rows] if isinstance(features, ImageSet) and features.channels else []
    chunks = {split: len(features.chunks_of(split)) for split in features.cache.splits}
    finished = int((features.status != NOT_DONE).sum())
    facts = ("modality", "name", "kind", "dtype", "fingerprint", "identity", "chunk_rows")
    return {
        **{key: getattr(features, key) for key in facts},
        "shape": (*rows, width) if width else (),  # of a sample's local features, or of a ``global`` set
        "views": features.views,
        "spec": features.attributes.get("spec"),  # what loads the encoder again; None: the set was imported
        "recorded": features.attributes["recorded"],  # versions, device and batch size of its creation
        # Chunks that hold all of their rows of a split, of all its chunks.
        "done": {split: (count - len(features.missing([split])), count) for split, count in chunks.items()},
        "percent": 100 * finished / max(1, features.samples),  # of the samples
        "failed": len(features.failures),
        "bytes": features.cache.folder.size(features.path),
    }


def stores_at(url: str) -> list[str]:
    """Return the stores at `url`: itself if it is one, else those directly in that folder.

    CacheError: neither a store nor a folder that holds one is there.
    """
    folder = Folder(url)
    if folder.exists("zarr.json"):
        return [url]
    stores = [f"{folder.url}/{name}" for name in folder.names("") if folder.exists(f"{name}/zarr.json")]
    if not stores:
        raise CacheError(f"{url} is neither a feature store nor a folder that holds one; name another place")
    return stores


def remove_set(url: str, name: str) -> tuple[str, int]:
    """Delete the feature set at ``images/NAME`` or ``captions/NAME``, also a damaged one; return its path and bytes.

    CacheError: there is no set of this whole name, or several; or another process is writing to the store.
    """
    cache = FeatureCache.open(url)
    paths = [
        f"{modality}/{one}" for modality in MODALITIES for one in cache.folder.names(modality) if one != "zarr.json"
    ]
    path = choose_set(url, name, paths, [path for path in paths if name in (path, path.partition("/")[2])])
    size = cache.folder.size(path)
    with cache.folder.one_writer():
        cache.folder.remove(f"{path}/zarr.json")  # its attributes first: a stopped removal leaves an unfinished set
        cache.folder.remove(path)
    return path, size


def verify(url: str) -> Verification:
    """Read every chunk of the store at `url`; CacheError if there is no store."""
    cache = FeatureCache.open(url)
    damaged = [Damage(path or "/") for path in ("", "samples", *MODALITIES) if not is_sealed(cache.folder, path)]
    damaged += [] if damaged else _damaged_samples(cache)
    if damaged:  # without its samples nothing else can be judged
        return Verification(0, (), tuple(damaged))
    sets = []
    for modality in MODALITIES:
        for name in cache.folder.names(modality):
            path = f"{modality}/{name}"
            if name == "zarr.json" or b'"attributes": {}' in (cache.folder.read(f"{path}/zarr.json")[0] or b""):
                continue  # a set whose creation was stopped
            if is_sealed(cache.folder, path):
                sets.append(cache.set_at(path))
            else:
                damaged.append(Damage(path))
    chunks, failed = 0, []
    with Progress("verify", sum(features.chunks for features in sets), "chunks") as progress:
        for features in sets:
            written = features.written()
            chunks += len(written)
            found: list[Damage] = []
            for chunk in written:
                samples = features.rows_in(chunk)
                found += [Damage(f"{features.path}/{name}", chunk, samples) for name in damaged_arrays(features, chunk)]
                progress.update(1)
            try:
                failed += [{"id": key, "reason": reason} for key, reason in features.failures]
            except CacheError:
                found = found or [Damage(f"{features.path}/status")]
            damaged += found
    if damaged:
        return Verification(chunks, tuple(failed), tuple(damaged))
    return Verification(chunks, tuple(failed), (), tuple(_differing(sets)), find_leaks(cache))


def _differing(sets: Sequence[ImageSet | CaptionSet]) -> Iterator[Differing]:
    for one, other in combinations([features for features in sets if isinstance(features, ImageSet)], 2):
        if len(rows := one.differing(other)):
            example = one.cache.file_names(int(rows[0]), int(rows[0]) + 1)[0]
            yield Differing((one.path, other.path), len(rows), example)


def damaged_arrays(features: FeatureSet, chunk: int) -> list[str]:
    """Return the names of the arrays of which a chunk that is done is missing, damaged or has impossible values."""
    values: dict[str, np.ndarray] = {}
    damaged = []
    for name, array, data in features.contents(chunk):
        try:
            values[name] = array.decoded(chunk, data)
        except CacheError:
            damaged.append(name)
    if damaged:
        return damaged
    status = values["status"]
    if not np.isin(status, (OK, FAILED, NOT_DONE)).all():
        damaged.append("status")
    if (status == FAILED).any() and not features.cache.folder.exists(f"{features.path}/status/failed.{chunk}.jsonl"):
        damaged.append("status")
    done = status == OK
    damaged += [name for name in ("start", "length", "size") if name in values and (values[name][done] < 0).any()]
    for name in ("local", "global"):
        if name in values and not _is_finite(np.asarray(values[name]), name, values, features):
            damaged.append(name)
    return damaged


def damaged_chunks(features: FeatureSet) -> list[int]:
    """Return the chunks that are done and damaged."""
    return [chunk for chunk in features.written() if damaged_arrays(features, chunk)]


def _is_finite(values: np.ndarray, name: str, arrays: dict[str, Any], features: FeatureSet) -> bool:
    good = np.asarray(arrays["status"]) == OK
    if name == "local" and features.modality == "captions":
        good = np.arange(len(values)) < int(np.asarray(arrays["length"])[good].sum())
    return bool(np.isfinite(values[good]).all())


def _damaged_samples(cache: FeatureCache) -> list[Damage]:
    damaged = []
    for name, array in sorted(cache.group["samples"].arrays()):  # type: ignore[union-attr]
        for chunk in range(array.nchunks):
            stored = StoredArray(cache.folder, array)
            try:
                stored.decoded(chunk, *cache.folder.read(stored.file(chunk)))
            except CacheError:
                damaged.append(Damage(f"samples/{name}", chunk))
    return damaged
