"""Creating feature sets: what is known of one before its features are computed, and the shapes of its arrays."""

import hashlib
import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import numpy as np

from ..data.images import DIGEST_BYTES
from ..errors import CacheError
from .folder import NewArray, begin_group, write_group
from .regions import REGION_ARRAYS
from .sets import NOT_DONE, CaptionSet, ImageSet
from .store import FeatureCache

CHUNK_BYTES = 8 << 20  # of a chunk
GLOBAL_CHUNK_BYTES = 32 << 20  # the same where a sample has a single vector, so that a million make few files
DTYPES = ("float16", "float32")
_OfImage: TypeAlias = tuple[tuple[str, ...], tuple[int, ...], str, float]  # its dimensions, shape, dtype and fill
_PICTURE_ARRAYS: dict[str, _OfImage] = {  # which a set may have
    "size": (("side",), (2,), "int32", -1),
    "digest": (("byte",), (DIGEST_BYTES,), "uint8", 0),
    "stamp": (("bytes_and_time",), (2,), "int64", 0),
}


def require_dtype(dtype: str) -> None:
    """Raise CacheError for a dtype that features are not stored in."""
    if dtype not in DTYPES:
        why = "Zarr has no bfloat16; " if dtype == "bfloat16" else ""
        raise CacheError(f"--dtype {dtype}: {why}choose float16, which reaches up to 65,504, or float32")


def misfit(peaks: np.ndarray, rows_where: Callable[[np.ndarray], np.ndarray], dtype: Any) -> tuple[int, str] | None:
    """Return the first sample of finite features [n,…,C] that a dtype cannot hold, and why; None where all fit.

    `peaks` [n,…] has the largest magnitude of each row of C values; `rows_where` takes a mask [n,…] to the rows there.

    It cannot hold a value beyond it, nor a row of C values that would be off by more than a hundredth of its length:
    such values are near its smallest, or become 0. A few tiny values in a row of larger ones are no loss.
    """
    limits = np.finfo(dtype)
    if (large := np.argwhere(peaks > float(limits.max))).size:
        return int(large[0][0]), f"a value of {peaks[tuple(large[0])]:.3g} is beyond {limits.dtype}"
    # Above this peak, even a million values that are each off by half the smallest step are off by less.
    small = (peaks > 0) & (peaks < 1e5 * float(limits.smallest_subnormal))
    if not small.any():
        return None
    rows = rows_where(small).astype(np.float64)
    lost = np.linalg.norm(rows - rows.astype(dtype), axis=-1) > 1e-2 * np.linalg.norm(rows, axis=-1)
    if lost.any():
        place = np.argwhere(small)[lost][0]
        return int(place[0]), f"values of {peaks[tuple(place)]:.3g} at most are too small for {limits.dtype}"
    return None


def fingerprint(identity: Mapping[str, Any], dtype: str) -> str:
    """Return the SHA-256 of what decides a set's features: encoder, weights, preprocessing, layer, dtype."""
    text = json.dumps({**identity, "dtype": dtype}, sort_keys=True, ensure_ascii=True)
    return hashlib.sha256(text.encode()).hexdigest()


@dataclass(frozen=True)
class SetFacts:
    """What is known of a set before it is created; `FeatureSet` explains most fields."""

    encoder: str  # the set's name before ``@``
    kind: str
    identity: dict[str, Any]
    dtype: str
    channels: int | None
    global_channels: int | None
    recorded: dict[str, Any] = field(default_factory=dict)  # versions and the like, which do not decide the features
    space: str | None = None
    rows: int = 1  # of images: local rows; the most, where they vary
    views: int = 1  # of an image; above one, features have an axis of views after that of the images
    arrays: tuple[str, ...] = ()  # of images: also names in `_PICTURE_ARRAYS` and `REGION_ARRAYS`
    extra: dict[str, Any] = field(default_factory=dict)  # further attributes; those that are None are left out


def image_set(cache: FeatureCache, facts: SetFacts, *, most: int | None = None) -> ImageSet:
    """Return the image set of these facts, created empty if it is not there; `most` images are in a chunk at most.

    Without channels there are no local features.
    """
    views, view = ((facts.views,), ("view",)) if facts.views > 1 else ((), ())
    values = (facts.global_channels or 0) + facts.rows * (facts.channels or 0)
    image_bytes = facts.views * values * np.dtype(facts.dtype).itemsize
    chunk = _chunk_rows(image_bytes, cache.images, most, facts.channels is None)
    of_image: dict[str, _OfImage] = {}
    if facts.channels is not None:
        of_image["local"] = (*view, "row", "channel"), (*views, facts.rows, facts.channels), facts.dtype, np.nan
        of_image["length"] = (), (), "int32", -1
    of_image["global"] = (*view, "global_channel"), (*views, facts.global_channels or 0), facts.dtype, np.nan
    for name in facts.arrays:
        if name in REGION_ARRAYS:
            shape, dtype, fill = REGION_ARRAYS[name]
            of_image[name] = ("row", *("corner" for _ in shape)), (facts.rows, *shape), dtype, fill
        else:
            of_image[name] = _PICTURE_ARRAYS[name]
    of_image["status"] = (), (), "uint8", NOT_DONE
    arrays = {
        name: NewArray(("image", *dimensions), (cache.images, *shape), chunk, dtype, fill)
        for name, (dimensions, shape, dtype, fill) in of_image.items()
    }
    counts = {"rows": facts.rows, **({"views": facts.views} if views else {})}
    return ImageSet(cache, _create("images", cache, facts, counts, arrays))


def caption_set(
    cache: FeatureCache, facts: SetFacts, lengths: np.ndarray | None, *, most: int | None = None
) -> CaptionSet:
    """Return the caption set of these facts, created empty if it is not there; `most` captions are in a chunk at most.

    `lengths` are the tokens of each caption, int [M]; None: there are global features alone.
    """
    item, captions = np.dtype(facts.dtype).itemsize, cache.captions
    mean = float(lengths.mean()) if lengths is not None and len(lengths) else 0.0
    bytes_of_caption = mean * (4 + (facts.channels or 0) * item) + (facts.global_channels or 0) * item
    chunk = _chunk_rows(bytes_of_caption, captions, most, lengths is None)
    arrays: dict[str, NewArray] = {}
    if lengths is not None:
        starts = np.arange(0, captions, chunk)
        tokens = max(1, int(np.add.reduceat(lengths.astype(np.int64), starts).max())) if captions else 1
        total = tokens * len(starts)
        arrays["token"] = NewArray(("token",), (total,), tokens, "int32")
        if facts.channels is not None:
            shape = (total, facts.channels)
            arrays["local"] = NewArray(("token", "channel"), shape, tokens, facts.dtype, np.nan)
        arrays["start"] = NewArray(("caption",), (captions,), chunk, "int64", -1)
        arrays["length"] = NewArray(("caption",), (captions,), chunk, "int32", -1)
    if facts.global_channels is not None:
        shape = (captions, facts.global_channels)
        arrays["global"] = NewArray(("caption", "global_channel"), shape, chunk, facts.dtype, np.nan)
    arrays["status"] = NewArray(("caption",), (captions,), chunk, "uint8", NOT_DONE)
    return CaptionSet(cache, _create("captions", cache, facts, {}, arrays))


def _create(
    modality: str, cache: FeatureCache, facts: SetFacts, counts: dict[str, int], arrays: Mapping[str, NewArray]
) -> str:
    """Return the name of a set, where its weights may have had another one; created empty if it is not there.

    ``fingerprint`` among the attributes marks it as whole.
    """
    digest, folder = fingerprint(facts.identity, facts.dtype), cache.folder
    for path in cache.set_paths(modality):
        if (features := cache.set_at(path)).fingerprint == digest:
            return features.name
    name = f"{facts.encoder}@{digest[:8]}"
    path = f"{modality}/{name}"
    if name in folder.names(modality):  # a creation was stopped
        folder.remove(path)
    begin_group(folder, path)
    known = {key: value for key, value in vars(facts).items() if key not in ("extra", "rows", "views", "arrays")}
    known |= {"fingerprint": digest, **facts.extra}
    known = {key: value for key, value in known.items() if value is not None or "channels" in key}
    write_group(folder, path, {**known, **counts, "arrays": [*arrays]}, arrays)
    return name


def _chunk_rows(row_bytes: float, rows: int, most: int | None, is_global: bool) -> int:
    """Return how many samples a chunk has: as many as fit its bytes, at least one."""
    fitting = int((GLOBAL_CHUNK_BYTES if is_global else CHUNK_BYTES) // max(1.0, row_bytes))
    return max(1, min(fitting, rows, most or rows))
