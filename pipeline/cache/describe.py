"""What a cache holds: data set, splits, and of each feature set its shape, its size on disk and what is finished."""

import math
from typing import Any

import numpy as np
import zarr
from zarr.abc.codec import BytesBytesCodec

from ..errors import CacheError
from .feature_cache import FeatureCache
from .feature_sets import OK, CaptionSet, ImageSet
from .store import Store


def describe(url: str) -> dict[str, Any]:
    """Return what the cache at `url` holds: data set, splits, and each feature set with its completeness by split.

    Of a set, ``bytes_per_value`` are the bytes of all its files for each feature value that is stored, None before the
    first; uncompressed and without checksums, marks or the smaller arrays they would be ``raw_bytes_per_value``.
    ``padding`` is the share of the stored values that belong to no sample: all shards of a set are of one length, a
    split's last one as well, and so are all images of one number of rows.

    Raises:
        CacheError: no cache is there, or it is damaged.
    """
    cache = FeatureCache.open(url)
    sets = [_describe_set(cache.image_set(name)) for name in cache.set_names("images")]
    sets += [_describe_set(cache.caption_set(name)) for name in cache.set_names("captions")]
    return {
        "store": url,
        "dataset": cache.dataset,
        "manifest_sha256": cache.manifest_sha256,
        "images": cache.images,
        "captions": cache.captions,
        "splits": {name: last - first for name, (first, last) in cache.splits.items()},
        "bytes": cache.store.size(""),
        "sets": sets,
    }


def stores_at(url: str) -> list[str]:
    """Return the stores at `url`: itself if it is one, else those directly in that folder.

    Raises:
        CacheError: neither a store nor a folder that holds one is there.
    """
    folder = Store(url)
    if folder.exists("zarr.json"):
        return [url]
    stores = [f"{url.rstrip('/')}/{name}" for name in folder.names("") if folder.exists(f"{name}/zarr.json")]
    if not stores:
        raise CacheError(f"{url}: there is neither a feature cache nor a folder that holds one; name another place")
    return stores


def _describe_set(features: ImageSet | CaptionSet) -> dict[str, Any]:
    done = features.done()
    marks = {split: done[features.blocks.of_split(split)] for split in features.cache.splits}
    finished = sum(features.samples_in(shard) for shard in np.flatnonzero(done).tolist())
    size = features.cache.store.size(features.path)
    array = features.cache.store.open_array(f"{features.path}/{'local' if features.channels else 'token'}")
    stored = int(done.sum()) * _shard_values(features, array)
    # The checksum stands among the codecs, but makes nothing smaller.
    codecs = [codec.to_dict()["name"] for codec in array.compressors if isinstance(codec, BytesBytesCodec)]
    rows = [features.rows] if isinstance(features, ImageSet) else []
    return {
        "modality": features.modality,
        "name": features.name,
        "kind": features.kind,
        "dtype": features.dtype,
        "shape": [*rows, features.channels] if features.channels else [],
        "fingerprint": features.fingerprint,
        "identity": features.identity,
        "recorded": features.attributes["recorded"],
        "shard_images": features.blocks.length,
        "done": {split: [int(shards.sum()), len(shards)] for split, shards in marks.items()},
        "percent": 100 * finished / len(features.status),
        "failed": len(features.failed),
        "bytes": size,
        "codec": " ".join(str(name) for name in codecs if name != "crc32c") or "none",
        "bytes_per_value": size / stored if stored else None,
        "raw_bytes_per_value": np.dtype(array.dtype).itemsize,
        "padding": 1 - _sample_values(features) / stored if stored else None,
    }


def _shard_values(features: ImageSet | CaptionSet, array: zarr.Array) -> int:
    """Count the feature values that a file of `array`, local or token, and one of the global features hold."""
    local = math.prod(array.shards or array.chunks)
    if features.global_channels is None:
        return local
    return local + features.attributes.get("shard_captions", features.blocks.length) * features.global_channels


def _sample_values(features: ImageSet | CaptionSet) -> int:
    """Count the feature values of the samples that are there; of token ids, the ids."""
    good = features.status == OK
    local = int(features.length[good].sum(dtype=np.int64)) * (features.channels or 1)
    return local + int(good.sum()) * (features.global_channels or 0)
