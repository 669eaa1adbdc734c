"""The work of one task: one shard, read, encoded and written once. Runs on any Dask worker."""

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from ..cache.feature_cache import FAILED, OK, CaptionSet, FeatureCache, FeatureSet, ImageSet
from ..data.regions import Regions, lay_out, shard_arrays
from ..device import pick_device
from ..encoders import TextEncoder, encoding, load_text, load_visual
from ..encoders.words import WordsEncoder
from ..errors import CacheError, EncoderError, SampleError

# Whom to tell of encoded samples, by feature set: a shard takes long. Only tasks in the same process are heard.
METERS: dict[str, Callable[[int], None]] = {}


@dataclass(frozen=True)
class Job:
    """What the tasks of one feature set have in common.

    Attributes:
        url: the cache.
        set_name: the feature set.
        encoder: the encoder's name.
        weights: its weights, as on the command line.
        image_size: side of the square input, pixels.
        folder: the manifest's image folder.
        device: where it runs; ``auto`` is decided where the task runs.
        batch_size: samples encoded at once.
        skip: record a sample that cannot be read and go on, instead of stopping.
        settings: further arguments of `encoders.load_visual` or `encoders.load_text`.
    """

    url: str
    set_name: str
    encoder: str
    weights: str
    image_size: int
    folder: str
    device: str
    batch_size: int
    skip: bool
    settings: Mapping[str, Any] = field(default_factory=dict)


@dataclass
class Receipt:
    """What a finished task tells: the shard, its samples, those that failed, and where the time went."""

    shard: int
    samples: int
    failed: dict[str, str] = field(default_factory=dict)
    seconds: dict[str, float] = field(default_factory=lambda: {"read": 0.0, "encode": 0.0, "write": 0.0})

    def timed(self, share: str, began: float) -> float:
        """Add the time since `began` to a share of the work; return the time now."""
        now = time.perf_counter()
        self.seconds[share] += now - began
        return now


def write_image_shard(job: Job, shard: int) -> Receipt:
    """Encode the images of one shard and write it.

    Raises:
        SampleError: an image cannot be read, and the job does not skip.
        CacheError: a value does not fit the set's dtype, or the weights are no longer the set's.
    """
    cache = FeatureCache.open(job.url)
    features = cache.image_set(job.set_name)
    device = str(pick_device(job.device))
    encoder = load_visual(job.encoder, job.weights, job.image_size, device, **job.settings)
    _check_identity(features, encoder.identity)
    first, last = features.blocks.images(shard)
    names, ids = cache.file_names(first, last), cache.ids(first, last)
    receipt = Receipt(shard, last - first)
    arrays = shard_arrays(
        features.blocks.length,
        features.rows,
        encoder.channels,
        encoder.global_channels,
        features.dtype,
        encoder.extras,
    )
    for start in range(0, last - first, job.batch_size):
        began = time.perf_counter()
        rows, decoded = [], []
        for row in range(start, min(start + job.batch_size, last - first)):
            try:
                image, arrays["size"][row] = encoder.decode(Path(job.folder, names[row]))
            except SampleError as error:
                if not job.skip:
                    advice = "mend or remove it, or go on with --on-error skip"
                    raise SampleError(error.sample, f"{error.reason}; {advice}") from error
                arrays["status"][row], receipt.failed[ids[row]] = FAILED, f"{names[row]}: {error.reason}"
            else:
                rows.append(row)
                decoded.append(image)
        began = receipt.timed("read", began)
        if rows:
            with encoding(device):
                began = time.perf_counter()  # waiting for the device is nobody's work
                encoded = encoder.encode(torch.stack(decoded) if encoder.kind == "grid" else decoded)
                receipt.timed("encode", began)
            _put(arrays, rows, encoded, features, [names[row] for row in rows])
        _tell(job, min(job.batch_size, last - first - start))
    _write(features, arrays, shard, receipt)
    return receipt


def _put(
    arrays: dict[str, np.ndarray],
    rows: list[int],
    encoded: "tuple[np.ndarray, np.ndarray] | list[Regions]",
    features: ImageSet,
    names: list[str],
) -> None:
    """Lay a batch out in the shard's arrays."""
    if isinstance(encoded, list):
        for row, regions, name in zip(rows, encoded, names, strict=True):
            _check_range(regions.local[None], features, [name])
            lay_out(arrays, row, replace(regions, size=tuple(arrays["size"][row])))
    else:
        local, global_ = encoded
        _check_range(local, features, names)
        arrays["local"][rows], arrays["global"][rows] = local, global_
        arrays["length"][rows], arrays["status"][rows] = local.shape[1], OK


def write_caption_shard(job: Job, shard: int) -> Receipt:
    """Tokenise, and where the encoder has states encode, the captions of one shard and write it.

    Raises:
        CacheError: a value does not fit the set's dtype, or the weights are no longer the set's.
    """
    cache = FeatureCache.open(job.url)
    features = cache.caption_set(job.set_name)
    images = features.blocks.images(shard)
    first = int(cache.caption_start[images[0]])
    last = first + int(cache.caption_count[slice(*images)].sum())
    texts = cache.caption_texts(first, last)
    receipt = Receipt(shard, last - first)
    began = time.perf_counter()
    size, tokens = features.attributes["shard_captions"], features.attributes["shard_tokens"]
    device = str(pick_device(job.device))
    encoder: TextEncoder
    if features.vocabulary is not None:
        encoder = WordsEncoder(features.vocabulary)
    else:
        encoder = load_text(job.weights, device, **job.settings)
    _check_identity(features, encoder.identity)
    ids = encoder.tokenize(texts)
    lengths = np.array([len(caption) for caption in ids], dtype=np.int64)
    starts = np.cumsum(lengths) - lengths
    began = receipt.timed("read", began)
    arrays = {
        "token": np.zeros(tokens, dtype=np.int32),
        "start": np.zeros(size, dtype=np.int64),
        "length": np.zeros(size, dtype=np.int32),
        "status": np.full(size, 255, dtype=np.uint8),
    }
    arrays["token"][: lengths.sum()] = np.concatenate([np.asarray(caption, dtype=np.int32) for caption in ids])
    arrays["start"][: len(ids)] = starts + shard * tokens
    arrays["length"][: len(ids)] = lengths
    arrays["status"][: len(ids)] = OK
    if encoder.channels is None or encoder.global_channels is None:
        _tell(job, len(ids))
    else:
        local = np.full((tokens, encoder.channels), np.nan, dtype=features.dtype)
        global_ = np.full((size, encoder.global_channels), np.nan, dtype=features.dtype)
        by_length = np.argsort(lengths, kind="stable")  # a batch of like lengths carries little padding
        for start in range(0, len(ids), job.batch_size):
            rows = by_length[start : start + job.batch_size]
            with encoding(device):
                began = time.perf_counter()
                encoded = encoder.encode([ids[row] for row in rows])
                assert encoded is not None, "its states have channels"
                began = receipt.timed("encode", began)
            states, pooled = encoded
            _check_range(states[:, None], features, [texts[row] for row in np.repeat(rows, lengths[rows])])
            target = np.concatenate([np.arange(starts[row], starts[row] + lengths[row]) for row in rows])
            local[target], global_[rows] = states, pooled
            _tell(job, len(rows))
        arrays |= {"local": local, "global": global_}
    _write(features, arrays, shard, receipt)
    return receipt


def _tell(job: Job, samples: int) -> None:
    meter = METERS.get(job.set_name)
    if meter is not None:
        meter(samples)


def _write(features: FeatureSet, arrays: dict[str, np.ndarray], shard: int, receipt: Receipt) -> None:
    began = time.perf_counter()
    for name, values in arrays.items():
        features.cache.store.write_shard(f"{features.path}/{name}", shard, values)
    receipt.timed("write", began)


def _check_identity(features: ImageSet | CaptionSet, identity: dict) -> None:
    if features.identity != identity:
        raise EncoderError(
            f"the weights or preprocessing of '{features.attributes['encoder']}' here are not those that"
            f" '{features.name}' was begun with; extract again with the same weights on every worker"
        )


def _check_range(local: np.ndarray, features: FeatureSet, names: list[str]) -> None:
    """Refuse values that the set's dtype cannot hold; `local` is [samples, rows, channels]."""
    peak = np.abs(local).max(axis=(1, 2))
    for name, value in zip(names, peak.tolist(), strict=True):
        if not np.isfinite(value):
            raise CacheError(f"'{name}': the encoder gave NaN or infinity; check its weights")
        if value > float(np.finfo(features.dtype).max):
            raise CacheError(
                f"'{name}': an activation of {value:.3g} is beyond {features.dtype}; extract with --dtype float32"
            )
