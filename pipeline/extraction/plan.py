"""What an extraction would take: tasks, bytes and hours, of a few batches that are timed."""

import math
import os
import time
from typing import Any

import numpy as np
import torch

from ..cache.feature_cache import Blocks, FeatureCache, FeatureSet
from ..cache.layout import SetFacts, choose_splits, find_cache
from ..data.manifest import Manifest
from ..data.regions import REGION_ARRAYS
from ..data.samples import Samples, read_samples
from ..device import pick_device
from ..encoders import TextEncoder, VisualEncoder
from ..errors import SampleError
from ..wording import counted
from .extraction import load_captions, load_images
from .options import Options
from .schedule import count_workers

PROBE = 2  # batches timed, behind one to warm up
_TEXTS = 20_000  # captions looked at for their length


def plan(manifest: Manifest, url: str, options: Options, images: int | None = None) -> dict[str, Any]:
    """Return what extracting a data set would take. Rates are of a few batches that are encoded here and thrown away.

    Args:
        manifest: the data set.
        url: the cache; what is done in it already is counted.
        options: as for `extraction.extract`.
        images: plan for a data set of so many images with the same share of splits and captions; None: for this one.

    Returns:
        data set, images, captions, ``by`` (what computes), and for each set name, modality, samples, tasks (one a
        shard), tasks done, images of a shard, bytes and files when finished, samples a second, and hours left.

    Raises:
        ManifestError: the data set cannot be read.
        EncoderError: an encoder cannot be made.
        SampleError: none of the pictures that were tried can be read.
        CacheError: no scheduler answers.
    """
    samples = read_samples(manifest)
    splits = choose_splits(samples, options.splits)
    device = str(pick_device(options.device))
    workers = count_workers(options.scheduler) if options.scheduler else 1
    ratio = images / len(samples.images) if images else 1.0
    rows = _scaled(samples.splits, ratio)
    blocks = Blocks.choose(rows, options.shard_images)
    captions = round(ratio * sum(len(image.captions) for image in samples.images))
    cache = None if images else find_cache(url, samples)
    sets: list[tuple[str, str, int, float, int, float]] = []
    if options.visual:
        encoder = load_images(options, device)
        facts = SetFacts.of(encoder, options.dtype, {})
        size: float = _image_bytes(encoder, np.dtype(options.dtype).itemsize)
        rate = workers * _image_rate(encoder, manifest, samples, options)
        wanted = sum(last - first for name, (first, last) in rows.items() if name in splits)
        arrays = 6 + len(encoder.extras)
        sets.append(("images", facts.name, wanted, size, arrays, rate))
    if options.text:
        text = load_captions(options, samples, device)
        facts = SetFacts.of(text, options.dtype, {})
        texts, share = _some_texts(samples), captions / max(rows[next(reversed(rows))][1], 1)
        tokens = sum(map(len, text.tokenize(texts))) / len(texts)
        width = np.dtype(options.dtype).itemsize * (text.channels or 0)
        size = share * (tokens * (4 + width) + 17 + width)
        rate = workers * _caption_rate(text, texts, options.batch_size)
        wanted = round(share * sum(last - first for name, (first, last) in rows.items() if name in splits))
        sets.append(("captions", facts.name, wanted, size, 7 if text.channels else 5, rate))
    return {
        "dataset": samples.dataset,
        "images": rows[next(reversed(rows))][1],
        "captions": captions,
        "by": f"{counted(workers, 'worker')} of {options.scheduler}" if options.scheduler else device,
        "sets": [_summary(*parts, splits, _find(cache, *parts[:2]), blocks) for parts in sets],
    }


def _summary(
    modality: str,
    name: str,
    samples: int,
    image_bytes: float,
    arrays: int,
    rate: float,
    splits: list[str],
    there: FeatureSet | None,
    blocks: Blocks,
) -> dict[str, Any]:
    """Return the plan of one set; one that is there keeps its own shards, of another length than `blocks` perhaps."""
    blocks = there.blocks if there else blocks
    shards = [shard for split in splits for shard in blocks.of_split(split)]
    tasks, done = len(shards), int(there.done()[shards].sum()) if there else 0
    return {
        "name": name,
        "modality": modality,
        "samples": samples,
        "tasks": tasks,
        "done": done,
        "shard_images": blocks.length,
        "bytes": round(image_bytes * blocks.length * tasks),
        "files": arrays * tasks,
        "per_second": rate,
        "hours": samples * (1 - done / tasks) / rate / 3600,
    }


def _scaled(splits: dict[str, tuple[int, int]], ratio: float) -> dict[str, tuple[int, int]]:
    scaled, first = {}, 0
    for name, (_, end) in splits.items():
        last = round(end * ratio)
        scaled[name] = (first, max(last, first + 1))
        first = scaled[name][1]
    return scaled


def _find(cache: FeatureCache | None, modality: str, name: str) -> FeatureSet | None:
    if cache is None or name not in cache.set_names(modality):
        return None
    return cache.image_set(name) if modality == "images" else cache.caption_set(name)


def _image_bytes(encoder: VisualEncoder, item: int) -> int:
    """Return the bytes of one image in all arrays."""
    extras = sum(
        encoder.rows * math.prod(shape) * np.dtype(dtype).itemsize
        for shape, dtype, _ in (REGION_ARRAYS[name] for name in encoder.extras)
    )
    return item * (encoder.rows * encoder.channels + encoder.global_channels) + extras + 13  # length, size, status


def _image_rate(encoder: VisualEncoder, manifest: Manifest, samples: Samples, options: Options) -> float:
    """Return images a second: threads read while the encoder works, so the slower of the two decides."""
    count = min((PROBE + 1) * options.batch_size, len(samples.images))
    decoded: list[Any] = []
    problem: SampleError | None = None
    began = time.perf_counter()
    for image in samples.images[:count]:
        try:
            decoded.append(encoder.decode(manifest.images / image.file_name)[0])
        except SampleError as error:
            problem = error
    if not decoded and problem is not None:
        raise problem
    read = (time.perf_counter() - began) / len(decoded)
    batches = [decoded[start : start + options.batch_size] for start in range(0, len(decoded), options.batch_size)]
    timed = batches[1:] or batches
    encoder.encode(torch.stack(batches[0]) if encoder.kind == "grid" else batches[0])
    began = time.perf_counter()
    for batch in timed:
        encoder.encode(torch.stack(batch) if encoder.kind == "grid" else batch)
    encode = (time.perf_counter() - began) / sum(map(len, timed))
    return 1 / max(encode, read / (options.workers or os.cpu_count() or 1))


def _some_texts(samples: Samples) -> list[str]:
    step = max(1, len(samples.images) // _TEXTS)
    return [image.captions[number % len(image.captions)].text for number, image in enumerate(samples.images[::step])]


def _caption_rate(encoder: TextEncoder, texts: list[str], batch_size: int) -> float:
    """Return captions a second."""
    began = time.perf_counter()
    ids = encoder.tokenize(texts)
    tokenise = (time.perf_counter() - began) / len(ids)
    if encoder.channels is None:
        return 1 / max(tokenise, 1e-9)
    by_length = sorted(ids, key=len)  # as in a shard: captions of all lengths, like beside like
    starts = np.linspace(0, max(len(ids) - batch_size, 0), 2 * PROBE + 1).astype(int)
    encoder.encode(by_length[:batch_size])
    began = time.perf_counter()
    seen = 0
    for start in starts:
        batch = by_length[start : start + batch_size]
        encoder.encode(batch)
        seen += len(batch)
    return 1 / (tokenise + (time.perf_counter() - began) / seen)
