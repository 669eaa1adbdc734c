"""What an extraction would take: tasks, bytes and hours, estimated by timing a few batches."""

import math
import os
import sys
import time
from contextlib import closing
from dataclasses import dataclass
from typing import Any

import numpy as np

from ..cache import Blocks, FeatureCache
from ..cache.facts import SetFacts
from ..cache.known_samples import find_samples
from ..cache.layout import choose_splits, find_cache
from ..data.manifest import Manifest
from ..data.regions import REGION_ARRAYS
from ..data.samples import Samples
from ..device import pick_device
from ..encoders import TextEncoder, VisualEncoder
from ..errors import SampleError
from ..wording import counted
from .extraction import as_begun, load_captions
from .options import Options
from .schedule import count_workers
from .tasks import decode, encode

_PROBE = 2  # batches timed, after one to warm up
_TEXTS = 20_000  # captions whose length is counted


@dataclass(frozen=True)
class SetPlan:
    """What one feature set would take."""

    name: str  # the set
    modality: str  # ``images`` or ``captions``
    samples: int  # of the splits that are wanted
    tasks: int  # one a shard
    done: int  # tasks that are done already
    shard_images: int  # images of a shard
    bytes: int  # of the set when it is finished
    files: int  # of the set when it is finished
    per_second: float  # samples that are encoded in a second
    hours: float  # left


@dataclass(frozen=True)
class Plan:
    """What an extraction would take."""

    dataset: str  # the manifest's name
    images: int  # of the data set, or as many as it is planned for
    captions: int  # likewise
    by: str  # what computes
    sets: tuple[SetPlan, ...]  # the feature sets


def plan(manifest: Manifest, url: str, options: Options, images: int | None = None) -> Plan:
    """Return what extracting a data set would take. Rates are of a few batches that are encoded here and thrown away.

    Args:
        manifest: the data set.
        url: the cache; shards that are done in it are counted.
        options: as for `extraction.extract`.
        images: plan for so many images, with splits and captions in the same proportion; None: for the data set.

    Raises:
        ManifestError: the data set cannot be read.
        EncoderError: an encoder cannot be made.
        SampleError: none of the pictures that were tried can be read.
        CacheError: as for `count_workers`.
    """
    anew = options.repair or options.update
    samples = find_samples(manifest, url, skip=options.on_error == "skip", anew=anew)
    wanted = choose_splits(samples, options.splits)
    device = str(pick_device(options.device))
    workers = count_workers(options.scheduler) if options.scheduler else 1
    ratio = images / len(samples.images) if images else 1.0
    splits = _scaled(samples.splits, ratio)
    total = max(last for _, last in splits.values())
    captions = round(ratio * sum(len(image.captions) for image in samples.images))
    cache = None if images else find_cache(url, samples)
    if options.update and not images:
        note = "files are not compared; what --update finds in other generations counts as if it were computed."
        print(f"Note: for a plan {note}", file=sys.stderr)
    sets = []
    for cost in _costs(manifest, samples, options, device, captions / max(total, 1), cache):
        there = cache.set_at(cost.path) if cache and cost.path in cache.set_paths() else None
        # A set keeps its own shards.
        blocks = there.blocks if there else Blocks.choose(splits, options.shard_images, cost.views)
        tasks = sum(blocks.count(split) for split in wanted)  # of any number of images, without listing them
        done = sum(int(there.done()[blocks.of_split(split)].sum()) for split in wanted) if there else 0
        count = round(cost.of_image * sum(splits[split][1] - splits[split][0] for split in wanted))
        rate, (modality, name) = workers * cost.rate, cost.path.split("/")
        sets.append(
            SetPlan(
                name=name,
                modality=modality,
                samples=count,
                tasks=tasks,
                done=done,
                shard_images=blocks.length,
                bytes=round(cost.bytes * blocks.length * tasks),
                files=cost.files * tasks,
                per_second=rate,
                hours=count * (1 - done / tasks) / rate / 3600,
            )
        )
    by = f"{counted(workers, 'worker')} of {options.scheduler}" if options.scheduler else device
    return Plan(samples.dataset, total, captions, by, tuple(sets))


@dataclass(frozen=True)
class _Cost:
    """What one feature set costs: its path, samples, bytes and views an image, files a shard, samples a second."""

    path: str
    of_image: float
    bytes: float
    views: int
    files: int
    rate: float  # of one worker


def _costs(
    manifest: Manifest, samples: Samples, options: Options, device: str, captions: float, cache: FeatureCache | None
) -> list[_Cost]:
    """Load the encoders and measure each; `captions` is how many an image has, `cache` where sets may be already."""
    costs = []
    width = np.dtype(options.dtype).itemsize
    if options.visual:
        encoder = options.load_visual(device)
        if cache is not None:
            options, encoder = as_begun(cache, options, encoder, device)
        path = _path(encoder, "images", options, cache)
        rate = _image_rate(encoder, manifest, samples, options)
        views = options.views
        files = 6 + 2 * views + len(encoder.extras)
        costs.append(_Cost(path, 1, _image_bytes(encoder, width, views), views, files, rate))
    if options.text:
        text = load_captions(options, samples, device)
        path = _path(text, "captions", options, cache)
        texts, item = _some_texts(samples), width * (text.channels or 0)
        tokens = sum(map(len, text.tokenize(texts))) / len(texts)
        size = captions * (tokens * (4 + item) + 17 + item)
        rate = _caption_rate(text, texts, options.batch_size)
        costs.append(_Cost(path, captions, size, 1, 8 if text.channels else 6, rate))
    return costs


def _path(encoder: VisualEncoder | TextEncoder, modality: str, options: Options, cache: FeatureCache | None) -> str:
    facts = SetFacts.of(encoder, options.dtype, {})
    return f"{modality}/{(facts if cache is None else facts.named_as_in(cache, modality)).name}"


def _scaled(splits: dict[str, tuple[int, int]], ratio: float) -> dict[str, tuple[int, int]]:
    scaled, first = {}, 0
    for name, (_, end) in splits.items():
        last = round(end * ratio)
        scaled[name] = (first, max(last, first + 1))
        first = scaled[name][1]
    return scaled


def _image_bytes(encoder: VisualEncoder, item: int, views: int) -> int:
    """Return the bytes of one image in all arrays."""
    extras = sum(
        encoder.rows * math.prod(shape) * np.dtype(dtype).itemsize
        for shape, dtype, _ in (REGION_ARRAYS[name] for name in encoder.extras)
    )
    features = views * item * (encoder.rows * encoder.channels + encoder.global_channels)
    return features + extras + 29  # length, size, status, digest


def _image_rate(encoder: VisualEncoder, manifest: Manifest, samples: Samples, options: Options) -> float:
    """Return images a second: threads read while the encoder works, so the slower of the two decides."""
    count = min((_PROBE + 1) * options.batch_size, len(samples.images))
    decoded: list[Any] = []
    problem: SampleError | None = None
    began = time.perf_counter()
    with closing(samples.open_pictures(manifest.images, count)) as pictures:
        for image in samples.images[:count]:
            try:
                decoded.append(decode(encoder, pictures.open(image.file_name), image.id)[0])
            except SampleError as error:
                problem = error
    if not decoded and problem is not None:
        raise problem
    read = (time.perf_counter() - began) / len(decoded)
    batches = [decoded[start : start + options.batch_size] for start in range(0, len(decoded), options.batch_size)]
    timed = batches[1:] or batches
    encode(encoder, batches[0])
    began = time.perf_counter()
    for batch in timed:
        encode(encoder, batch)
    seconds = (time.perf_counter() - began) / sum(map(len, timed))
    return 1 / max(seconds, read / (options.workers or os.cpu_count() or 1))


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
    starts = np.linspace(0, max(len(ids) - batch_size, 0), 2 * _PROBE + 1).astype(int)
    encoder.encode(by_length[:batch_size])
    began = time.perf_counter()
    batches = [by_length[start : start + batch_size] for start in starts]
    for batch in batches:
        encoder.encode(batch)
    return 1 / (tokenise + (time.perf_counter() - began) / sum(map(len, batches)))
