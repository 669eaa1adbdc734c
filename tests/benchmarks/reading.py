"""How fast batches come out of a store, against a plain memory-mapped array's sequential rate in the same run.

`speed` makes a store of random features, `regions` x `channels` float16 an image, and five captions of word ids; the
same images lie in one plain file beside it, which `memmap` copies in order, 64 MB at a time, into memory that is used
again. Rounds take turns and the fastest of each counts. `cold`: the files are dropped from the page cache before each
(Linux; a hypervisor below may keep them). Prints one JSON line a figure: rates of image features, `ratio` to `memmap`.
`waiting` is the share of an epoch for which whoever is busy for `--step-ms` with each batch waits for the next one.

    python tests/benchmarks/reading.py speed --images 8192 --device cuda --step-ms 30

`shuffle` trains heads with whole and with block-shuffled epochs, seed by seed, and prints the best validation RSUM: the
difference of the means should lie within the seed noise of the whole shuffle.

    python tests/benchmarks/reading.py shuffle STORE --recipe vsepp --seeds 5
"""

import itertools
import json
import mmap
import os
import shutil
import statistics
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import click
import numpy as np
import torch

from xret.heads.recipes.recipe import load_recipe
from xret.heads.training.training import train
from xret.pipeline.data.samples import Caption, ImageSample, Samples
from xret.pipeline.reading.batches import Batches, stored_batches
from xret.pipeline.reading.prefetch import block_order
from xret.pipeline.store import Blocks, FeatureCache
from xret.pipeline.store.facts import SetFacts
from xret.pipeline.store.layout import create_caption_set, create_image_set, open_for_writing

CAPTIONS, WORDS = 5, 12
PART = 1 << 26  # bytes that `memmap` copies at once
PLAIN = "plain.f16"


def make_store(folder: Path, images: int, regions: int, channels: int) -> FeatureCache:
    """Write a store of one split, and the same images' features as one file beside it."""
    captions = tuple(Caption("words", k) for k in range(CAPTIONS))
    samples = [ImageSample(str(number), f"{number}.jpg", "train", -1, captions) for number in range(images)]
    everything = Samples("bench", tuple(samples), {"train": (0, images)}, "0")
    with open_for_writing(str(folder / "s.zarr"), everything, ["full"]) as cache, (folder / PLAIN).open("wb") as plain:
        blocks = Blocks.choose(cache.splits)
        facts = SetFacts("regions", "roi", {"encoder": "random"}, "float16", channels, channels, {})
        create_image_set(cache, facts, regions, blocks)
        words = SetFacts("words", "words", {"encoder": "words"}, "int32", None, None, {})
        counts = [last - first for first, last in map(blocks.images, range(len(blocks)))]
        create_caption_set(cache, words, blocks, [n * CAPTIONS * WORDS for n in counts], {"vocabulary": ["", "words"]})
        image_set, caption_set = cache.image_set(), cache.caption_set()
        rng = np.random.default_rng(0)
        per_shard, token_shard = caption_set.attributes["shard_captions"], caption_set.attributes["shard_tokens"]
        for shard, count in enumerate(counts):
            noise = rng.integers(0, 1 << 14, (blocks.length, regions, channels), dtype=np.uint16).view(np.float16)
            plain.write(noise[:count].tobytes())  # as the shards are written: pages of a file are not all equally fast
            arrays = {
                "local": noise,
                "global": noise[:, 0],
                "length": np.full(blocks.length, regions, np.int32),
                "size": np.zeros((blocks.length, 2), np.int32),
                "status": (np.arange(blocks.length) >= count).astype(np.uint8),
            }
            texts = {
                "start": shard * token_shard + np.arange(per_shard) * WORDS,
                "length": np.full(per_shard, WORDS, np.int32),
                "status": (np.arange(per_shard) >= count * CAPTIONS).astype(np.uint8),
                "token": np.ones(token_shard, np.int32),
            }
            for features, values in ((image_set, arrays), (caption_set, texts)):
                for name, rows in values.items():
                    cache.store.write_shard(f"{features.path}/{name}", shard, rows)
                cache.store.write_shard(f"{features.path}/done", shard, np.ones(1, np.uint8))
    os.sync()
    return FeatureCache.open(str(folder / "s.zarr"))


def drop(folder: Path, maps: Iterable[np.ndarray]) -> None:
    """Let the system forget the content of all files below `folder`; pages in a map have to leave it first."""
    for mapped in {id(owner): owner for owner in map(owner_of, maps)}.values():
        mapped.madvise(mmap.MADV_DONTNEED)
    for path in folder.rglob("*"):
        if path.is_file():
            with path.open("rb") as file:
                os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def owner_of(array: np.ndarray) -> mmap.mmap:
    """Return the memory map that an array is a view of."""
    owner: Any = array
    while not isinstance(owner, mmap.mmap):
        owner = owner.obj if isinstance(owner, memoryview) else owner.base
    return owner


def mapped_by(batches: Batches) -> Iterator[np.ndarray]:
    """Yield one array of each shard of images that is open."""
    for rows in batches.image_set._rows.values():
        for shard in rows._shards.values():
            yield shard._data


def memmap(plain: np.ndarray, into: np.ndarray) -> None:
    """Copy an array in order, into the same memory again and again."""
    for first in range(0, len(plain), len(into)):
        rows = plain[first : first + len(into)]
        into[: len(rows)] = rows


def epoch_of(batches: Batches, batch_size: int, number: Iterator[int], step: float = 0.0) -> None:
    """Take an epoch's batches, busy for `step` seconds with each."""
    for _ in batches.epoch(unit="image", batch_size=batch_size, seed=0, epoch=next(number)):
        if batches.device.type == "cuda":
            torch.cuda.synchronize()
        time.sleep(step)


def seconds_of(work: Callable[[], object]) -> float:
    """Run once and return how long it took."""
    began = time.perf_counter()
    work()
    return time.perf_counter() - began


def say(**found: object) -> None:
    """Print one JSON line."""
    click.echo(json.dumps(found))


@click.group()
def main() -> None:
    """How fast batches come out of a store, and what a block shuffle costs in quality."""


@main.command()
@click.option("--images", default=2048, show_default=True)
@click.option("--regions", default=36, show_default=True)
@click.option("--channels", default=2048, show_default=True)
@click.option("--batch-size", default=200, show_default=True)
@click.option("--rounds", default=3, show_default=True)
@click.option("--step-ms", default=100.0, show_default=True, help="What a step takes when waiting is measured.")
@click.option("--device", type=click.Choice(["cpu", "cuda"]), default="cpu", show_default=True)
@click.option("--folder", type=click.Path(path_type=Path), help="Where to make the store; by default a temporary one.")
def speed(
    images: int,
    regions: int,
    channels: int,
    batch_size: int,
    rounds: int,
    step_ms: float,
    device: str,
    folder: Path | None,
) -> None:
    """Measure rates against a memory-mapped array, and the share of time that a training waits."""
    work = Path(tempfile.mkdtemp(dir=folder))
    try:
        cache = make_store(work, images, regions, channels)
        plain = np.memmap(work / PLAIN, np.float16, "r", shape=(images, regions, channels))
        into = np.zeros((max(1, PART // plain[0].nbytes), *plain.shape[1:]), plain.dtype)
        sets = cache.image_set(), cache.caption_set()
        fields = {"image_fields": {"local"}, "caption_fields": {"token"}}
        number = itertools.count()
        split = {
            name: stored_batches(*sets, "train", device=device, placement=name, **fields)
            for name in ("stream", "mapped", "pinned", "device")
        }
        opening = seconds_of(lambda: epoch_of(split["stream"], batch_size, number))
        say(what="first epoch, which checks every byte", seconds=round(opening, 3))
        jobs = {"memmap": partial(memmap, plain, into)}
        jobs |= {name: partial(epoch_of, batches, batch_size, number) for name, batches in split.items()}
        for cold in (False, True):
            names = [name for name in jobs if not cold or name in ("memmap", "mapped", "stream")]
            times: dict[str, list[float]] = {name: [] for name in names}
            for _ in range(rounds):
                for name in names:
                    if cold:
                        drop(work, [plain, *mapped_by(split["mapped"])])
                    times[name].append(seconds_of(jobs[name]))
            for name in names:
                rate = plain.nbytes / min(times[name]) / 1e6
                ratio = min(times["memmap"]) / min(times[name])
                say(what=name, cold=cold, mb_per_second=round(rate), ratio=round(ratio, 2))
                if name == "stream" and not cold:
                    rows = np.random.default_rng(0).choice(images, 64, replace=False)
                    array = cache.store.open_array(f"{sets[0].path}/local")
                    oindex = plain[:64].nbytes / seconds_of(lambda: array.oindex[rows]) / 1e6  # noqa: B023
                    say(what="oindex", mb_per_second=round(oindex, 1), stream_is=f"{rate / oindex:.0f} times as fast")
        for name, batches in split.items():
            whole = seconds_of(lambda: epoch_of(batches, batch_size, number, step_ms / 1000))  # noqa: B023
            say(what=name, step_ms=step_ms, waiting=round(batches.waited / whole, 4))
    finally:
        shutil.rmtree(work)


@main.command()
@click.argument("store")
@click.option("--recipe", default="vsepp", show_default=True)
@click.option("--set", "settings", multiple=True, help="Recipe keys, KEY=VALUE.")
@click.option("--seeds", default=3, show_default=True)
@click.option("--group", type=int, help="Blocks, of 64 images, that are mixed; by default as many as in training.")
@click.option("--device", default="auto", show_default=True)
def shuffle(store: str, recipe: str, settings: tuple[str, ...], seeds: int, group: int | None, device: str) -> None:
    """Train with whole and with block-shuffled epochs, and compare the validation RSUM."""
    epoch = Batches.epoch
    found: dict[str, list[float]] = {"mapped": [], "stream": []}
    with tempfile.TemporaryDirectory() as work:
        for seed, order in itertools.product(range(seeds), found):

            def ordered(self: Batches, order: str = order, **words: Any) -> Iterator[Any]:
                self.placement = order  # type: ignore[assignment]
                return epoch(self, **words)

            with (
                patch.object(Batches, "epoch", ordered),
                patch("xret.pipeline.reading.batches.block_order", partial(block_order, group=group)),
            ):
                summary = train(
                    store, load_recipe(recipe, list(settings)), f"{work}/{order}{seed}", seed=seed, device=device
                )
            found[order].append(round(summary.best_rsum, 2))
            say(order=order, seed=seed, rsum=found[order][-1])
    whole, blocks = found["mapped"], found["stream"]
    say(
        whole=round(statistics.mean(whole), 2),
        whole_std=round(statistics.stdev(whole), 2),
        block=round(statistics.mean(blocks), 2),
        block_std=round(statistics.stdev(blocks), 2),
        difference=round(statistics.mean(blocks) - statistics.mean(whole), 2),
    )


if __name__ == "__main__":
    main()
