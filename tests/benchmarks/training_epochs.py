"""Two commands of `training.py` that read a cache: `epoch` and `gpu`."""

import itertools
import os
import tempfile
import time
from collections.abc import Iterable, Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import click
import numpy as np
import torch
from PIL import Image
from reading import CAPTIONS, PLAIN, WORDS, make_store
from torch import Tensor
from training_parts import VOCABULARY, WORD_IDS, Step, flops_of, medians, print_table, roi_batch, seconds_of
from training_reference import OneByOne, on_device

from xret.heads.model import FeatureFacts, feature_facts
from xret.heads.recipes.recipe import Recipe, load_recipe
from xret.pipeline.device import deterministic, pick_device
from xret.pipeline.encoders import load_visual
from xret.pipeline.errors import XretError
from xret.pipeline.reading.batches import Batch, stored_batches
from xret.pipeline.reading.features import Features

CPU = torch.device("cpu")
F30K_IMAGES, F30K_CAPTIONS = 29_000, 145_000  # of the training split
POOLED = 768  # channels of a pooled caption feature
# Name: the recipe, settings of its own, facts of the captions.
HEADS: dict[str, tuple[str, list[str], FeatureFacts]] = {
    "vsepp": ("vsepp", [], WORD_IDS),
    "vse-infty": ("vse-infty", [], WORD_IDS),
    "setdiv": ("setdiv", [], WORD_IDS),
    "linear": ("vsepp", ["adapter.tokens.global=cached"], FeatureFacts("tokens", POOLED, POOLED)),
}


def pictures(folder: Path, count: int) -> list[Path]:
    """Write generated photographs of Flickr30K's usual size."""
    rng = np.random.default_rng(0)
    paths = [folder / f"{number}.jpg" for number in range(count)]
    for path in paths:
        noise = Image.fromarray(rng.integers(0, 256, (47, 63, 3), dtype=np.uint8))
        noise.resize((500, 375), Image.Resampling.BICUBIC).save(path, quality=90)
    return paths


def pooled_captions(batch: Batch, table: Tensor) -> Batch:
    """Return a batch whose captions are pooled features, of a table that lies in memory."""
    found = table[batch.caption_index % len(table)].to(batch.caption_image.device)
    return replace(batch, captions=Features(torch.ones_like(batch.caption_image), global_=found))


def random_words(batch: Batch) -> Batch:
    """Return a batch whose captions are random words; those of the generated store are one word again and again."""
    token = batch.captions.token
    assert token is not None
    return replace(batch, captions=replace(batch.captions, token=torch.randint_like(token, 1, VOCABULARY)))


@click.command()
@click.option("--visual", default="resnet152", show_default=True, help="Any torchvision classification network.")
@click.option("--image-size", default=224, show_default=True)
@click.option("--images", default=1024, show_default=True, help="In the generated cache.")
@click.option("--network-images", default=16, show_default=True, help="On which the network is measured.")
@click.option("--steps", default=3, show_default=True, help="On which each head is measured.")
@click.option("--rounds", default=3, show_default=True, help="Of the network.")
@click.option("--head", "names", multiple=True, type=click.Choice(list(HEADS)), default=tuple(HEADS))
@click.option("--set", "settings", multiple=True, help="Recipe keys, KEY=VALUE, for these heads.")
@click.option("--device", default="cpu", show_default=True)
def epoch(
    visual: str,
    image_size: int,
    images: int,
    network_images: int,
    steps: int,
    rounds: int,
    names: tuple[str, ...],
    settings: tuple[str, ...],
    device: str,
) -> None:
    """An epoch from the cache against one with the frozen backbone in the loop.

    Measured on a subset: heads on a few of their own steps, loading from a generated cache included; the network, of
    random weights, on a few generated photographs, reading them included. A step in the loop is the head's step and the
    network on the step's images, scaled by their number; an image comes once an epoch where a recipe counts images,
    with each of its five captions where it counts captions. Epochs are those of Flickr30K. `linear` is one layer over
    pooled features on either side.
    """
    target = device_of(device)
    encoder = load_visual(visual, "random:0", image_size, device)
    grid = FeatureFacts("grid", encoder.channels, encoder.channels)
    table = torch.randn(10_000, POOLED).half()
    rows = []
    with tempfile.TemporaryDirectory() as work:
        paths = pictures(Path(work), network_images)
        on_images = medians({"network": lambda: encode(encoder, paths)}, rounds, target)["network"] / len(paths)
        pixels = encoder.decode(paths[0])[0][None]
        network_flops = flops_of(lambda: encoder.encode(pixels))
        cache = make_store(Path(work), images, encoder.rows, encoder.channels)
        for name in names:
            recipe_name, own, captions = HEADS[name]
            recipe = load_recipe(recipe_name, [*own, *settings])
            take = Step(recipe, grid, captions, target)
            other = partial(pooled_captions, table=table) if name == "linear" else random_words
            batches = map(other, cache_batches(cache, take, recipe, device))
            seconds, head_images = head_seconds(take, batches, steps, target)
            if target.type != "cpu":  # the counter sees no GRU of cuDNN
                take = Step(recipe, grid, captions, CPU)
            head_flops = flops_of(partial(take, on_cpu(next(batches))))
            in_loop = seconds + head_images * on_images
            an_epoch = (F30K_IMAGES if recipe.data.unit == "image" else F30K_CAPTIONS) / recipe.data.batch_size
            of_network = head_images * network_flops
            rows.append(
                [
                    name,
                    f"{recipe.data.batch_size} {recipe.data.unit}s",
                    f"{head_images:.0f}",
                    f"{seconds:.3g}",
                    f"{in_loop:.3g}",
                    f"{in_loop / seconds:.3g}",
                    f"{head_flops / 1e9:.3g}",
                    f"{of_network / 1e9:.3g}",
                    f"{1 + of_network / head_flops:.3g}",
                    f"{an_epoch * seconds / 60:.3g}",
                    f"{an_epoch * in_loop / 60:.3g}",
                ]
            )
    click.echo(
        f"{visual} at {image_size} pixels: {on_images:.3g} s and {network_flops / 1e9:.3g} GFLOP an image, measured on"
        f" {network_images} images and scaled; heads on {steps} steps each\n"
    )
    head = ["head", "step", "images", "cache, s", "loop, s", "loop / cache", "head, GFLOP", "network, GFLOP"]
    print_table([*head, "FLOP, loop / cache", "epoch from the cache, min", "in the loop, min"], rows)


def on_cpu(batch: Batch) -> Batch:
    """Return a batch in the host's memory."""

    def moved(features: Features) -> Features:
        parts = vars(features).items()
        return Features(**{name: x.cpu() if isinstance(x, torch.Tensor) else x for name, x in parts})

    return Batch(moved(batch.images), moved(batch.captions), batch.caption_image.cpu(), batch.caption_index)


def encode(encoder: Any, paths: list[Path]) -> None:
    """Read pictures and run the network on them."""
    encoder.encode(torch.stack([encoder.decode(path)[0] for path in paths]))


def cache_batches(cache: Any, take: Step, recipe: Recipe, device: str) -> Iterator[Batch]:
    """Yield full batches of a cache for a head, epoch after epoch."""
    batches = stored_batches(
        cache.image_set(),
        cache.caption_set(),
        "train",
        device=device,
        image_fields=take.model.image_fields,
        caption_fields={"token"},
        placement="mapped" if device == "cpu" else "device",
    )
    unit, size = recipe.data.unit, min(recipe.data.batch_size, batches.images)
    for number in itertools.count():
        for batch in batches.epoch(unit=unit, batch_size=size, seed=0, epoch=number):
            if len(batch.images.length if unit == "image" else batch.captions.length) == size:
                yield batch


def head_seconds(take: Step, batches: Iterator[Batch], steps: int, device: torch.device) -> tuple[float, float]:
    """Return the median of a step's seconds, loading included, and its images on average."""
    times, counts = [], []
    for _ in range(steps + 1):

        def one() -> None:
            batch = next(batches)
            counts.append(len(batch.images.length))
            take(batch)

        times.append(seconds_of(one, device))
    return median(times[1:]), float(np.mean(counts))


@click.command()
@click.option("--recipe", "names", multiple=True, default=("setdiv/f30k-butd-bigru", "maxmatch/f30k-butd-bigru"))
@click.option("--set", "settings", multiple=True, help="Recipe keys, KEY=VALUE.")
@click.option("--images", default=F30K_IMAGES, show_default=True, help="In the generated cache, all of them resident.")
@click.option("--regions", default=36, show_default=True)
@click.option("--channels", default=2048, show_default=True)
@click.option("--steps", default=60, show_default=True, help="Of ours a round; of the reference a third.")
@click.option("--rounds", default=3, show_default=True)
@click.option("--workers", default=min(8, os.cpu_count() or 1), show_default=True, help="Of the reference's loader.")
@click.option("--device", default="cuda", show_default=True, help="`cpu` only tries the code, with small sizes.")
@click.option("--folder", type=click.Path(path_type=Path), help="Where to make the cache; by default a temporary one.")
def gpu(
    names: tuple[str, ...],
    settings: tuple[str, ...],
    images: int,
    regions: int,
    channels: int,
    steps: int,
    rounds: int,
    workers: int,
    device: str,
    folder: Path | None,
) -> None:
    """Whole steps with loading against the reference with its one-image-at-a-time loader, on a GPU, by the clock.

    FLOP are counted on a batch on the CPU. Minutes are of 80 epochs of Flickr30K without validation.
    """
    target = device_of(device)
    rows = []
    with tempfile.TemporaryDirectory(dir=folder) as work, deterministic(target):
        cache = make_store(Path(work), images, regions, channels)
        facts = feature_facts(cache.image_set())
        one_by_one = OneByOne(Path(work) / PLAIN, (images, regions, channels), CAPTIONS, WORDS)
        for name in names:
            recipe = load_recipe(name, list(settings))
            ours = Step(recipe, facts, WORD_IDS, target)
            try:
                theirs = Step(recipe, facts, WORD_IDS, target, reference=True)
            except ValueError as error:
                raise click.ClickException(str(error)) from error
            size = min(recipe.data.batch_size, images)
            batches = cache_batches(cache, ours, recipe, device)
            loader = one_by_one.loader(size, workers, target.type == "cuda")
            found: dict[str, list[tuple[float, float]]] = {"ours": [], "reference": []}
            for _ in range(rounds + 1):
                found["ours"].append(by_the_clock(ours, map(random_words, batches), steps))
                plain = (on_device(batch, target) for batch in itertools.chain.from_iterable(itertools.repeat(loader)))
                found["reference"].append(by_the_clock(theirs, map(random_words, plain), max(1, steps // 3)))
            torch.set_num_threads(os.cpu_count() or 1)
            batch = roi_batch(size, CAPTIONS * size, regions, channels)
            flops = flops_of(partial(Step(recipe, facts, WORD_IDS, CPU), batch))
            torch.set_num_threads(1)
            step_of = {who: [median(column) for column in zip(*times[1:], strict=True)] for who, times in found.items()}
            for who, (seconds, waiting) in step_of.items():
                ratio = f"{step_of['reference'][0] / seconds:.2f}"
                minutes = f"{80 * F30K_IMAGES / recipe.data.batch_size * seconds / 60:.1f}"
                of_step = [f"{1e3 * seconds:.1f}", ratio, f"{100 * waiting:.1f}%", f"{size / seconds:.0f}"]
                rows.append([name, who, *of_step, f"{flops / seconds / 1e12:.3g}", minutes])
    where = torch.cuda.get_device_name(target) if target.type == "cuda" else "a CPU"
    click.echo(f"{images} images of {regions} x {channels}, {CAPTIONS} captions each, on {where}\n")
    head = ["recipe", "", "step, ms", "times as fast (aim 3)", "waiting for data (aim 2%)", "images/s", "TFLOP/s"]
    print_table([*head, "80 epochs of Flickr30K, min (aim 6)"], rows)


def by_the_clock(take: Step, batches: Iterable[Batch], steps: int) -> tuple[float, float]:
    """Return the seconds of a step with loading, and the share of them in which it waits for its batch.

    A first batch and step are not counted: a loader starts its workers with it.
    """
    stream = iter(batches)
    take(next(stream))
    waited = 0.0
    began = time.perf_counter()
    for _ in range(steps):
        asked = time.perf_counter()
        batch = next(stream)
        waited += time.perf_counter() - asked
        take(batch)  # ends with the loss on the host, and so with the step before last complete
    whole = time.perf_counter() - began
    return whole / steps, waited / whole


def device_of(name: str) -> torch.device:
    """Return a device, or say in a sentence that it is not here."""
    try:
        return pick_device(name)
    except XretError as error:
        raise click.ClickException(str(error)) from error
