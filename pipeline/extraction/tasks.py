"""The tasks that encode: one shard, read, encoded and written once. They run on any Dask worker."""

import time
from contextlib import closing
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from ..cache import FAILED, OK, CaptionSet, FeatureCache, FeatureSet, ImageSet
from ..cache.earlier import caption_keys, image_keys
from ..cache.rows import ranges
from ..data.digests import as_row, digest_at, digest_of
from ..data.images import PictureFile
from ..data.regions import Regions, lay_out
from ..data.sources import PictureReader
from ..device import pick_device
from ..encoders import TextEncoder, VisualEncoder, encoding
from ..encoders.words import WordsEncoder
from ..errors import CacheError, EncoderError, SampleError
from .options import Options
from .shards import Receipt, tell, write_shard
from .updates.reuse import EarlierSets, Taken, take_captions, take_images


@dataclass(frozen=True)
class Job:
    """What the tasks of one feature set have in common."""

    url: str  # the cache
    set_name: str  # the feature set
    folder: str  # where the names of pictures, or of the files that hold them, start
    options: Options  # with absolute paths; the device ``auto`` is decided where the task runs
    writer: str | None = None  # on an object store, whose lease it is to write under
    earlier: EarlierSets | None = None  # what other generations have of the set; None: all is computed


def write_image_shard(job: Job, shard: int) -> Receipt:
    """Encode the images of one shard and write it.

    Raises:
        SampleError: an image cannot be read, and the job does not skip.
        CacheError: a value does not fit the set's dtype.
        EncoderError: the weights are no longer the set's.
    """
    features = FeatureCache.open(job.url, job.writer).image_set(job.set_name)
    device = str(pick_device(job.options.device))
    encoder = job.options.load_visual(device)
    _check_identity(features, encoder.identity)
    first, last = features.rows_in(shard)
    names, ids = features.cache.file_names(first, last), features.cache.ids(first, last)
    arrays = features.blank_shard()
    receipt = Receipt(shard, last - first)
    with closing(features.cache.open_pictures(job.folder, first, last)) as pictures:
        began = time.perf_counter()
        taken = _taken_images(job, features, pictures, names, ids, arrays)
        receipt.timed("read", began)
        if taken.shared is not None:
            if _is_shared(job, features, shard, arrays, taken, receipt):
                return receipt
            return write_image_shard(replace(job, earlier=None), shard)
        receipt.found = int(taken.samples.sum())
        tell(job.url, job.set_name, receipt.found)
        left = np.flatnonzero(~taken.samples).tolist()
        for start in range(0, len(left), job.options.batch_size):
            began = time.perf_counter()
            batch = left[start : start + job.options.batch_size]
            decoded = {}
            for row in batch:
                try:
                    of_file = arrays["digest"][row] if "digest" in arrays else None
                    decoded[row], arrays["size"][row] = _decode(job, encoder, pictures, names[row], ids[row], of_file)
                except SampleError as error:
                    if job.options.on_error == "fail":
                        raise
                    arrays["status"][row] = FAILED
                    receipt.fail(ids[row], f"{names[row]}: {error.reason}")
            receipt.timed("read", began)
            if decoded:
                with encoding(device):
                    began = time.perf_counter()  # waiting for the device is nobody's work
                    encoded = encode(encoder, list(decoded.values()))
                    receipt.timed("encode", began)
                _put(arrays, list(decoded), encoded, features, [names[row] for row in decoded])
            tell(job.url, job.set_name, len(batch))
    write_shard(features, shard, arrays, receipt)
    return receipt


def _taken_images(
    job: Job,
    features: ImageSet,
    pictures: PictureReader,
    names: list[str],
    ids: list[str],
    arrays: dict[str, np.ndarray],
) -> Taken:
    if job.earlier is None or "digest" not in arrays:
        return Taken(np.zeros(len(ids), dtype=bool))
    for row, name in enumerate(names):
        arrays["digest"][row] = as_row(digest_at(pictures, name))
    keys = image_keys(arrays["digest"][: len(ids)], ids, features.views)
    return take_images(job.earlier, features, keys, arrays)


def _is_shared(
    job: Job, features: FeatureSet, shard: int, arrays: dict[str, np.ndarray], taken: Taken, receipt: Receipt
) -> bool:
    """Write a shard whose features lie in the files of another set; return False where those are lost or damaged."""
    try:
        write_shard(features, shard, arrays, receipt, taken.shared)
    except (CacheError, FileNotFoundError):
        return False
    receipt.found = receipt.samples
    tell(job.url, job.set_name, receipt.found)
    return True


def decode(encoder: VisualEncoder, picture: PictureFile | Path, key: str) -> tuple[Any, tuple[int, int]]:
    """Read an image as `VisualEncoder.decode` does, or its views; `key` is its id."""
    if (views := getattr(encoder, "decode_views", None)) is not None:
        found: tuple[Any, tuple[int, int]] = views(picture, key)
        return found
    return encoder.decode(picture)


def encode(encoder: VisualEncoder, decoded: list[Any]) -> "tuple[np.ndarray, np.ndarray] | list[Regions]":
    """Encode images as `decode` returned them."""
    return encoder.encode(torch.stack(decoded) if encoder.kind == "grid" else decoded)


def _decode(
    job: Job, encoder: VisualEncoder, pictures: PictureReader, name: str, key: str, of_file: np.ndarray | None
) -> tuple[Any, tuple[int, int]]:
    """Open and read a picture; `of_file`, uint8 [16], becomes the digest of its file."""
    try:
        picture = pictures.open(name)
        if of_file is not None:
            of_file[:] = as_row(digest_of(picture))
        return decode(encoder, picture, key)
    except SampleError as error:
        if job.options.on_error == "skip":
            raise
        raise SampleError(
            error.sample, f"{error.reason}; repair or remove it, or go on with --on-error skip"
        ) from error


def _put(
    arrays: dict[str, np.ndarray],
    rows: list[int],
    encoded: "tuple[np.ndarray, np.ndarray] | list[Regions]",
    features: ImageSet,
    names: list[str],
) -> None:
    """Lay a batch out in the shard's arrays."""
    arrays["status"][rows] = OK
    if isinstance(encoded, list):
        for row, regions, name in zip(rows, encoded, names, strict=True):
            _check_range(regions.local[None], features, [name])
            lay_out(arrays, row, regions)
    else:
        local, global_ = encoded
        layered = features.identity.get("encoder") == "hf"
        _check_range(local, features, names, " or another --visual-layer" if layered else "")
        _check_range(global_, features, names)
        arrays["local"][rows], arrays["global"][rows], arrays["length"][rows] = local, global_, features.rows


def write_caption_shard(job: Job, shard: int) -> Receipt:
    """Tokenise the captions of one shard, encode them if the set has states, and write it; errors as for images."""
    features = FeatureCache.open(job.url, job.writer).caption_set(job.set_name)
    first, last = features.rows_in(shard)
    texts = features.cache.caption_texts(first, last)
    receipt = Receipt(shard, last - first)
    began = time.perf_counter()
    device = str(pick_device(job.options.device))
    words = features.vocabulary
    encoder: TextEncoder = job.options.load_text(device) if words is None else WordsEncoder(words)
    _check_identity(features, encoder.identity)
    ids = encoder.tokenize(texts)
    receipt.timed("read", began)
    arrays = features.blank_shard()
    lengths = np.array([len(caption) for caption in ids], dtype=np.int64)
    starts = np.cumsum(lengths) - lengths
    arrays["token"][: lengths.sum()] = np.concatenate(ids)
    arrays["start"][: len(ids)] = starts + shard * len(arrays["token"])
    arrays["length"][: len(ids)], arrays["status"][: len(ids)] = lengths, OK
    if features.channels is None:
        tell(job.url, job.set_name, len(ids))
    else:
        taken = _taken_captions(job, features, texts, arrays)
        if taken.shared is not None and _is_shared(job, features, shard, arrays, taken, receipt):
            return receipt
        if taken.shared is not None:  # it could not be
            return write_caption_shard(replace(job, earlier=None), shard)
        receipt.found = int(taken.samples.sum())
        tell(job.url, job.set_name, receipt.found)
        _encode_captions(job, features, encoder, texts, ids, arrays, np.flatnonzero(~taken.samples), receipt)
    write_shard(features, shard, arrays, receipt)
    return receipt


def _taken_captions(job: Job, features: CaptionSet, texts: list[str], arrays: dict[str, np.ndarray]) -> Taken:
    if job.earlier is None:
        return Taken(np.zeros(len(texts), dtype=bool))
    return take_captions(job.earlier, features, caption_keys(texts), arrays)


def _encode_captions(
    job: Job,
    features: CaptionSet,
    encoder: TextEncoder,
    texts: list[str],
    ids: list[list[int]],
    arrays: dict[str, np.ndarray],
    left: np.ndarray,
    receipt: Receipt,
) -> None:
    """Fill the local features [tokens,C] and the global features [captions,C] of those captions of a shard."""
    lengths = arrays["length"][: len(ids)]
    starts = arrays["start"][: len(ids)] - arrays["start"][0]
    by_length = left[
        np.argsort(lengths[left], kind="stable")
    ]  # a batch of captions of like length carries little padding
    for first in range(0, len(left), job.options.batch_size):
        rows = by_length[first : first + job.options.batch_size]
        with encoding(str(pick_device(job.options.device))):
            began = time.perf_counter()
            encoded = encoder.encode([ids[row] for row in rows])
            receipt.timed("encode", began)
        assert encoded is not None, "its states have channels"
        states, pooled = encoded
        _check_range(states[:, None], features, [texts[row] for row in np.repeat(rows, lengths[rows])])
        _check_range(pooled, features, [texts[row] for row in rows])
        arrays["local"][ranges(starts[rows], lengths[rows])], arrays["global"][rows] = states, pooled
        tell(job.url, job.set_name, len(rows))


def _check_identity(features: ImageSet | CaptionSet, identity: dict[str, Any]) -> None:
    if features.identity != identity:
        raise EncoderError(
            f"the weights or preprocessing of '{features.attributes['encoder']}' here are not those that"
            f" '{features.name}' was begun with; extract again with the same weights on every worker"
        )


def _check_range(values: np.ndarray, features: FeatureSet, names: list[str], way: str = "") -> None:
    """Refuse values that the set's dtype cannot hold; their first axis is the samples. `way` is another way on."""
    peak = np.abs(values).reshape(len(values), -1).max(axis=1)
    for name, value in zip(names, peak.tolist(), strict=True):
        if not np.isfinite(value):
            raise CacheError(f"'{name}': the encoder gave NaN or infinity; check its weights")
        if value > float(np.finfo(features.dtype).max):
            raise CacheError(
                f"'{name}': an activation of {value:.3g} is beyond {features.dtype}; extract with --dtype float32{way}"
            )
