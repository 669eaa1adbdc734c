"""What a cache holds: of each feature set its shape, its size and what is finished; and the removal of a set."""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import zarr
from zarr.abc.codec import BytesBytesCodec

from ...errors import CacheError
from ...files import partials_in
from ..feature_cache import MODALITIES, FeatureCache, choose_set
from ..feature_sets import OK, CaptionSet, ImageSet
from ..storage.folder import GENERATIONS
from ..storage.generations import Generation, generations, store_of
from ..storage.lease import alone
from ..storage.store import Store


@dataclass(frozen=True)
class SetContents:
    """What is known of a feature set."""

    modality: str  # ``images`` or ``captions``
    name: str
    kind: str  # one of `rules.KINDS`
    dtype: str  # ``float16``, ``float32``, or ``int32`` of token ids
    # of a sample's local features: (rows, channels), of captions (channels,), of words (); of kind ``global`` theirs
    shape: tuple[int, ...]
    views: int  # of an image; of captions 1
    fingerprint: str  # SHA-256 of what decides the features
    identity: Mapping[str, Any]  # the same, readable
    recorded: Mapping[str, Any]  # what was noted when the set was begun
    shard_images: int  # images in a shard
    done: Mapping[str, tuple[int, int]]  # shards done and shards in all, by split
    percent: float  # of the samples whose shards are done
    failed: int  # samples that could not be read
    bytes: int  # of all its files
    codec: str  # what compresses its values, or ``none``
    bytes_per_value: float | None  # `bytes` for each feature value that is stored; None before the first
    raw_bytes_per_value: int  # the same uncompressed and without checksums, marks or the smaller arrays
    padding: float | None  # share of the stored values that belong to no sample, as all shards have one length

    @property
    def path(self) -> str:
        """``images/NAME`` or ``captions/NAME``."""
        return f"{self.modality}/{self.name}"


@dataclass(frozen=True)
class Contents:
    """What a cache holds."""

    store: str  # where it lies
    dataset: str  # the manifest's name
    manifest_sha256: str  # of the samples
    images: int  # of the data set
    captions: int  # of the data set
    splits: Mapping[str, int]  # images of each split
    bytes: int  # of all files of this generation
    sets: tuple[SetContents, ...]  # the feature sets
    generation: int  # the number of this one
    generations: tuple[Generation, ...]  # all that are there


@dataclass(frozen=True)
class Removal:
    """A feature set to remove: its path, ``images/NAME`` or ``captions/NAME``, and the bytes of its files."""

    removed: str
    bytes: int


def describe(url: str) -> Contents:
    """Return what the cache at `url` holds.

    Raises:
        CacheError: no cache is there, or it is damaged.
    """
    cache = FeatureCache.open(url)
    return Contents(
        store=url,
        dataset=cache.dataset,
        manifest_sha256=cache.manifest_sha256,
        images=cache.images,
        captions=cache.captions,
        splits={name: last - first for name, (first, last) in cache.splits.items()},
        bytes=sum(cache.store.size(name) for name in cache.store.names("") if name != GENERATIONS),
        sets=tuple(_describe_set(cache.set_at(path)) for path in cache.set_paths()),
        generation=cache.generation,
        generations=generations(cache.url),
    )


def stores_at(url: str) -> list[str]:
    """Return the stores at `url`: itself if it is one, else those directly in that folder.

    Raises:
        CacheError: neither a store nor a folder that holds one is there.
    """
    if store_of(url).exists("zarr.json"):
        return [url]
    folder = Store(url)
    stores = [f"{url.rstrip('/')}/{name}" for name in folder.names("") if folder.exists(f"{name}/zarr.json")]
    if not stores:
        raise CacheError(f"{url} is neither a feature cache nor a folder that holds one; name another place")
    return stores


def partials_at(url: str) -> list[Path]:
    """Return what killed writers left, or living ones write, in the store or directly in the folder at `url`."""
    folder = Store(url)
    if not folder.is_local:
        return []
    root = Path(folder.root)
    return partials_in(root) if folder.exists("zarr.json") else list(root.glob("*.partial"))


def set_to_remove(url: str, prefix: str) -> Removal:
    """Return which feature set `prefix` means, even if it is damaged or half removed; errors as for `choose_set`."""
    cache = FeatureCache.open(url)
    paths = [f"{modality}/{name}" for modality in MODALITIES for name in cache.store.names(modality)]
    paths = [path for path in paths if not path.endswith("/zarr.json")]
    path = choose_set(url, prefix, paths, [path for path in paths if cache.fits(path, prefix)])
    return Removal(path, cache.store.size(path))


def remove_set(url: str, prefix: str) -> Removal:
    """Delete the feature set that `prefix` means.

    What a stopped removal leaves counts as unfinished: an extraction or another removal clears it away.

    Raises:
        CacheError: as for `set_to_remove`, or another process is writing to the cache.
    """
    home = Store(FeatureCache.open(url).url)
    with alone(home):
        store = FeatureCache.open(url, home.writer).store
        removal = set_to_remove(url, prefix)
        path = removal.removed
        store.start_group(path)
        for name in store.names(path):
            if name != "zarr.json":  # this says that the set is unfinished, and goes last
                store.remove(f"{path}/{name}")
        store.remove(path)
    return removal


def _describe_set(features: ImageSet | CaptionSet) -> SetContents:
    done = features.done()
    marks = {split: done[features.blocks.of_split(split)] for split in features.cache.splits}
    finished = sum(features.samples_in(shard) for shard in np.flatnonzero(done).tolist())
    size = features.cache.store.size(features.path)
    largest = next(name for name in ("local", "token", "global") if name in features.array_names())
    array = features.cache.store.open_array(f"{features.path}/{largest}")
    stored = int(done.sum()) * _shard_values(features, array)
    # The checksum stands among the codecs, but makes nothing smaller.
    codecs = [codec.to_dict()["name"] for codec in array.compressors if isinstance(codec, BytesBytesCodec)]
    rows = [features.rows] if isinstance(features, ImageSet) and features.channels else []
    width = features.channels or (features.global_channels if features.kind == "global" else None)
    return SetContents(
        modality=features.modality,
        name=features.name,
        kind=features.kind,
        dtype=features.dtype,
        shape=(*rows, width) if width else (),
        views=_views(features),
        fingerprint=features.fingerprint,
        identity=features.identity,
        recorded=features.attributes["recorded"],
        shard_images=features.blocks.length,
        done={split: (int(shards.sum()), len(shards)) for split, shards in marks.items()},
        percent=100 * finished / len(features.status),
        failed=len(features.failures),
        bytes=size,
        codec=" ".join(str(name) for name in codecs if name != "crc32c") or "none",
        bytes_per_value=size / stored if stored else None,
        raw_bytes_per_value=np.dtype(array.dtype).itemsize,
        padding=1 - _sample_values(features, done) / stored if stored else None,
    )


def _shard_values(features: ImageSet | CaptionSet, array: "zarr.Array[Any]") -> int:
    """Count the feature values of a shard; `array` are its local features or tokens."""
    samples: int = (array.shards or array.chunks)[0]
    local = samples * math.prod(array.shape[1:])
    if features.global_channels is None or features.kind == "global":
        return local
    samples = features.attributes.get("shard_captions", features.blocks.length)
    return local + samples * features.global_channels * _views(features)


def _sample_values(features: ImageSet | CaptionSet, done: np.ndarray) -> int:
    """Count the feature values, or token ids, of the samples in the shards that are `done`."""
    good = features.status == OK
    for shard in np.flatnonzero(~done).tolist():  # another process may have finished it meanwhile
        good[slice(*features.rows_in(shard))] = False
    local = int(features.length[good].sum(dtype=np.int64)) * (features.channels or 1)
    return (local + int(good.sum()) * (features.global_channels or 0)) * _views(features)


def _views(features: ImageSet | CaptionSet) -> int:
    return features.views if isinstance(features, ImageSet) else 1
