"""What an extraction would take: tasks, bytes and hours, estimated by timing a few batches."""

import math
import os
import time
from contextlib import closing
from dataclasses import dataclass
from typing import Any

import numpy as np

from ..cache import Blocks, FeatureSet
from ..cache.earlier import caption_keys, image_keys, sets_of_all
from ..cache.facts import SetFacts
from ..cache.known_samples import find_samples
from ..cache.layout import choose_splits, find_cache
from ..data.digests import BYTES, Digests
from ..data.manifest import Manifest
from ..data.regions import REGION_ARRAYS
from ..data.samples import ImageSample, Samples
from ..device import pick_device
from ..encoders import TextEncoder, VisualEncoder
from ..errors import SampleError
from ..wording import counted
from .extraction import as_begun, load_captions, with_min_count
from .options import Options
from .schedule import count_workers
from .tasks import decode, encode
from .updates.reuse import EarlierSets, earlier, find_earlier, forgetting
from .updates.update import Target, choose_target

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
    found: int  # samples of the others that other generations of the cache have
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
        url: the cache; shards that are done in it are counted, and samples that its other generations have, for which
            pictures are read and compared.
        options: as for `extraction.extract`.
        images: plan for so many images of which nothing is there, with splits and captions in the same proportion;
            None: for the data set.

    Raises:
        ManifestError: the data set cannot be read.
        EncoderError: an encoder cannot be made.
        SampleError: none of the pictures that were tried can be read.
        CacheError: as for `count_workers`; or the cache is damaged.
    """
    anew = options.repair or options.update
    samples = find_samples(manifest, url, skip=options.on_error == "skip", anew=anew)
    options = with_min_count(options, samples, url)
    wanted = choose_splits(samples, options.splits)
    device = str(pick_device(options.device))
    workers = count_workers(options.scheduler) if options.scheduler else 1
    ratio = images / len(samples.images) if images else 1.0
    splits = _scaled(samples.splits, ratio)
    total = max(last for _, last in splits.values())
    captions = round(ratio * sum(len(image.captions) for image in samples.images))
    digests, target = Digests(samples, manifest.images), Target(url)
    if not images:
        target = choose_target(url, samples, manifest, digests, options.update)
    cache = None if images else find_cache(target.url, samples)
    sets = []
    where = None if images else target.url
    for cost in _costs(manifest, samples, options, device, captions / max(total, 1), where):
        there = cache.set_at(cost.path) if cache and cost.path in cache.set_paths() else None
        length, earlier_sets = options.shard_images, None
        if cache or target.is_new:
            length, earlier_sets = find_earlier(target.url, cost.path, cost.facts, options, target.is_new)
        # A set keeps its own shards.
        blocks = there.blocks if there else Blocks.choose(splits, length, cost.views)
        progress = None if images else _progress(samples, blocks, wanted, there, cost, digests, earlier_sets)
        sets.append(_set_plan(cost, blocks, wanted, workers, progress))
    by = f"{counted(workers, 'worker')} of {options.scheduler}" if options.scheduler else device
    return Plan(samples.dataset, total, captions, by, tuple(sets))


@dataclass(frozen=True)
class _Cost:
    """What one feature set costs: samples, bytes and views an image, files a shard, samples a second."""

    modality: str
    facts: SetFacts
    of_image: float
    bytes: float
    views: int
    files: int
    rate: float  # of one worker

    @property
    def path(self) -> str:
        return f"{self.modality}/{self.facts.name}"


def _set_plan(
    cost: _Cost, blocks: Blocks, splits: list[str], workers: int, progress: tuple[int, int, int] | None
) -> SetPlan:
    """Return the plan of a set; `progress` is what `_progress` gives, None: nothing is done."""
    tasks = sum(blocks.count(split) for split in splits)  # of any number of images, without listing them
    ranges = [blocks.splits[split] for split in splits]
    samples = round(cost.of_image * sum(last - first for first, last in ranges))
    done, found, left = progress or (0, 0, samples)
    rate = workers * cost.rate
    return SetPlan(
        name=cost.facts.name,
        modality=cost.modality,
        samples=samples,
        tasks=tasks,
        done=done,
        found=found,
        shard_images=blocks.length,
        bytes=round(cost.bytes * blocks.length * tasks),
        files=cost.files * tasks,
        per_second=rate,
        hours=left / rate / 3600,
    )


def _progress(
    samples: Samples,
    blocks: Blocks,
    splits: list[str],
    there: FeatureSet | None,
    cost: _Cost,
    digests: Digests,
    sets: EarlierSets | None,
) -> tuple[int, int, int]:
    """Return how many shards are done, how many samples of the others are found again, and how many are computed."""
    shards = [shard for split in splits for shard in blocks.of_split(split)]
    done = there.done() if there else np.zeros(len(blocks), dtype=bool)
    rest = [image for shard in shards if not done[shard] for image in samples.images[slice(*blocks.images(shard))]]
    left = len(rest) if cost.modality == "images" else sum(len(image.captions) for image in rest)
    found = _found(rest, cost, digests, sets) if rest and sets else 0
    return int(done[shards].sum()), found, left - found


def _found(images: list[ImageSample], cost: _Cost, digests: Digests, sets: EarlierSets) -> int:
    """Return how many of these images, or of their captions, have features in other generations."""
    if cost.modality == "images":
        of_files = np.frombuffer(b"".join(digests.of(images)), dtype=np.uint8).reshape(-1, BYTES)
        keys = image_keys(of_files, [image.id for image in images], cost.views)
    else:
        keys = caption_keys([caption.text for image in images for caption in image.captions])
    with forgetting():
        return sum(len(part.here) for part in earlier(sets).find(keys))


def _costs(
    manifest: Manifest,
    samples: Samples,
    options: Options,
    device: str,
    captions: float,
    url: str | None,
) -> list[_Cost]:
    """Load the encoders and measure each; `captions` is how many an image has, and the cache at `url` may have sets."""
    costs = []
    width = np.dtype(options.dtype).itemsize
    if options.visual:
        encoder = options.load_visual(device)
        if url is not None:
            options, encoder = as_begun(url, options, encoder, device)
        facts = _facts(encoder, "images", options, url)
        rate = _image_rate(encoder, manifest, samples, options)
        views = options.views
        files = 6 + 2 * views + len(encoder.extras)
        costs.append(_Cost("images", facts, 1, _image_bytes(encoder, width, views), views, files, rate))
    if options.text:
        text = load_captions(options, samples, device)
        facts = _facts(text, "captions", options, url)
        texts, item = _some_texts(samples), width * (text.channels or 0)
        tokens = sum(map(len, text.tokenize(texts))) / len(texts)
        size = captions * (tokens * (4 + item) + 17 + item)
        rate = _caption_rate(text, texts, options.batch_size)
        costs.append(_Cost("captions", facts, captions, size, 1, 8 if text.channels else 6, rate))
    return costs


def _facts(encoder: VisualEncoder | TextEncoder, modality: str, options: Options, url: str | None) -> SetFacts:
    facts = SetFacts.of(encoder, options.dtype, {})
    return facts if url is None else facts.named_as(sets_of_all(url, modality))


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
