"""How fast batches come out of a store, against a plain memory-mapped array's sequential rate in the same run.

`speed` makes a store of random features, `regions` x `channels` float16 an image, and five captions of word ids; the
same images lie in one plain file beside it, which `memmap` copies in order, 64 MB at a time, into memory that is used
again, and `DataLoader` reads them through `xret.FeatureDataset`, in whole blocks as images with their captions, or in
pairs as float32, where an image is read for each of its captions. Rounds take turns and the fastest of each counts.
Prints one JSON line a figure: rates of image features, `ratio` to `memmap`. `waiting` is the share of an epoch for
which whoever is busy for `--step-ms` with each batch waits for the next one.

    python tests/benchmarks/reading.py speed --images 8192 --step-ms 30

`shuffle` trains heads with whole and with block-shuffled epochs, seed by seed, and prints the best validation RSUM: the
difference of the means should lie within the seed noise of the whole shuffle.

    python tests/benchmarks/reading.py shuffle STORE --recipe vsepp --seeds 5
"""

import itertools
import os
import statistics
import tempfile
import time
from collections import deque
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import click
import numpy as np
from sizes import VOCABULARY, say, seconds_of, small
from torch.utils.data import DataLoader

from xret.heads.recipes.recipe import load_recipe
from xret.heads.training.train import train
from xret.pipeline.data.image_columns import Caption, Images, ImageSample
from xret.pipeline.data.samples import Samples
from xret.pipeline.reading.batches import Batches, stored_batches
from xret.pipeline.reading.dataset import FeatureDataset
from xret.pipeline.store import OK, FeatureCache
from xret.pipeline.store.create import SetFacts, caption_set, image_set
from xret.pipeline.store.store import open_for_writing

CAPTIONS = 5
PART = 1 << 26  # bytes that `memmap` copies at once
PLAIN = "plain.f16"


def make_store(folder: Path, images: int, regions: int, channels: int, val: int = 0) -> FeatureCache:
    """Write a store, of whose images the last are for validation, and their features as one file beside it.

    Captions are random words, in numbers about as Flickr30K's.
    """
    splits = {"train": (0, images - val)} | ({"val": (images - val, images)} if val else {})
    of = {number: name for name, rows in splits.items() for number in range(*rows)}
    samples = [
        ImageSample(
            str(number), f"{number}.jpg", of[number], -1, tuple(Caption(f"{number} {k}", k) for k in range(CAPTIONS))
        )
        for number in range(images)
    ]
    everything = Samples("bench", Images.of(samples), splits, "0")
    vocabulary = ["", *(f"word{number}" for number in range(1, VOCABULARY))]
    words = SetFacts("words", "words", {"encoder": "words"}, "int32", None, None, extra={"vocabulary": vocabulary})
    grid = SetFacts(
        "regions", "roi", {"encoder": "random"}, "float16", channels, channels, rows=regions, arrays=("size",)
    )
    rng = np.random.default_rng(0)
    with open_for_writing(str(folder / "s.zarr"), everything, ["full"]) as cache, (folder / PLAIN).open("wb") as plain:
        features = image_set(cache, grid)
        for chunk in range(features.chunks):
            arrays = features.blank(chunk)
            count = len(arrays["status"])
            arrays["local"] = rng.integers(0, 1 << 14, (count, regions, channels), dtype=np.uint16).view(np.float16)
            arrays["global"] = arrays["local"][:, 0]
            arrays["length"][:], arrays["size"][:], arrays["status"][:] = regions, 0, OK
            plain.write(arrays["local"].tobytes())  # as chunks are written: pages of a file are not all equally fast
            features.write(chunk, arrays)
        lengths = rng.integers(8, 17, images * CAPTIONS).astype(np.int32)
        texts = caption_set(cache, words, lengths)
        for chunk in range(texts.chunks):
            arrays, own = texts.blank(chunk), lengths[slice(*texts.rows_in(chunk))]
            arrays["start"] = chunk * texts.stored("token").chunk_rows + own.cumsum() - own
            arrays["token"] = rng.integers(1, VOCABULARY, len(arrays["token"]), dtype=np.int32)
            arrays["length"], arrays["status"][:] = own, OK
            texts.write(chunk, arrays)
    os.sync()
    return FeatureCache.open(str(folder / "s.zarr"))


def memmap(plain: np.ndarray, into: np.ndarray) -> None:
    """Copy an array in order, into the same memory again and again."""
    for first in range(0, len(plain), len(into)):
        rows = plain[first : first + len(into)]
        into[: len(rows)] = rows


def epoch_of(batches: Batches, batch_size: int, number: Iterator[int], step: float = 0.0) -> None:
    """Take an epoch's batches, busy for `step` seconds with each."""
    for _ in batches.epoch(unit="image", batch_size=batch_size, seed=0, epoch=next(number)):
        time.sleep(step)


@click.group()
def main() -> None:
    """How fast batches come out of a store, and what a block shuffle costs in quality."""


@main.command()
@click.option("--images", default=2048, show_default=True)
@click.option("--step-ms", default=100.0, show_default=True, help="What a step takes when waiting is measured.")
@small(images=64, regions=4, channels=16, batch_size=16, rounds=1, step_ms=1.0)
def speed(
    images: int, step_ms: float, regions: int = 36, channels: int = 2048, batch_size: int = 200, rounds: int = 3
) -> None:
    """Measure rates against a memory-mapped array, and the share of time that a training waits."""
    with tempfile.TemporaryDirectory() as folder:
        cache = make_store(Path(folder), images, regions, channels)
        plain = np.memmap(Path(folder) / PLAIN, np.float16, "r", shape=(images, regions, channels))
        into = np.zeros((max(1, PART // plain[0].nbytes), *plain.shape[1:]), plain.dtype)
        sets, number = (cache.image_set(), cache.caption_set()), itertools.count()
        fields = {"image_fields": {"local"}, "caption_fields": {"token"}}
        split = {name: stored_batches(*sets, "train", placement=name, **fields) for name in ("stream", "memory")}
        opening = seconds_of(lambda: epoch_of(split["stream"], batch_size, number))
        say(what="first epoch, which checks every byte", seconds=round(opening, 3))
        jobs = {"memmap": partial(memmap, plain, into)}
        jobs |= {name: partial(epoch_of, batches, batch_size, number) for name, batches in split.items()}
        named: dict[str, Any] = {"fields": ["local", "token"]}
        pairs, blocks = FeatureDataset(cache.url, **named), FeatureDataset(cache.url, **named, unit="image", dtype=None)
        for workers in (0, 2):
            how: dict[str, Any] = {"num_workers": workers, "collate_fn": pairs.collate}
            loader: DataLoader[Any] = DataLoader(blocks, batch_sampler=blocks.batch_sampler(batch_size), **how)
            jobs[f"DataLoader, blocks of images, {workers} workers"] = partial(deque, loader, 0)
        loader = DataLoader(pairs, batch_size * CAPTIONS, collate_fn=pairs.collate)
        jobs["DataLoader, pairs"] = partial(deque, loader, 0)
        times: dict[str, list[float]] = {name: [] for name in jobs}
        for _ in range(rounds):
            for name, work in jobs.items():
                times[name].append(seconds_of(work))
        for name, found in times.items():
            rate, ratio = plain.nbytes / min(found) / 1e6, min(times["memmap"]) / min(found)
            say(what=name, mb_per_second=round(rate), ratio=round(ratio, 2))
        rows = np.random.default_rng(0).choice(images, 64, replace=False)
        oindex = plain[:64].nbytes / seconds_of(lambda: sets[0].cache.array(f"{sets[0].path}/local").oindex[rows]) / 1e6
        streamed = plain.nbytes / min(times["stream"]) / 1e6
        say(what="oindex", mb_per_second=round(oindex, 1), stream_is=f"{streamed / oindex:.0f} times as fast")
        for name, batches in split.items():
            whole = seconds_of(partial(epoch_of, batches, batch_size, number, step_ms / 1000))
            busy = batches.steps("image", batch_size) * step_ms / 1000
            say(what=name, step_ms=step_ms, waiting=round(max(0.0, 1 - busy / whole), 4))


@main.command()
@click.argument("store")
@click.option("--recipe", default="vsepp", show_default=True)
@click.option("--set", "settings", multiple=True, help="Recipe keys, KEY=VALUE.")
@click.option("--seeds", default=3, show_default=True)
@small(seeds=1, settings=("model.dim=16", "data.batch_size=12", "schedule.epochs=1"))
def shuffle(store: str, recipe: str, settings: tuple[str, ...], seeds: int) -> None:
    """Train with whole and with block-shuffled epochs, and compare the validation RSUM."""
    found: dict[str, list[float]] = {"memory": [], "stream": []}
    with tempfile.TemporaryDirectory() as work:
        for seed, order in itertools.product(range(seeds), found):
            chosen = load_recipe(recipe, [*settings, f"runtime.cache={order}"])
            summary = train(store, chosen, f"{work}/{order}{seed}", seed=seed)
            found[order].append(round(summary.best_rsum, 2))
            say(order=order, seed=seed, rsum=found[order][-1])
    means = {order: round(statistics.mean(rsums), 2) for order, rsums in found.items()}
    spread = {order: round(statistics.stdev(rsums), 2) for order, rsums in found.items() if seeds > 1}
    say(mean=means, std=spread, difference=round(means["stream"] - means["memory"], 2))


if __name__ == "__main__":
    main()
