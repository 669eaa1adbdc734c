"""A command of `training.py` that reads a cache: `epoch`."""

import itertools
import tempfile
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import click
import numpy as np
import torch
from PIL import Image
from reading import make_store
from sizes import small
from torch import Tensor
from training_parts import VOCABULARY, WORD_IDS, Step, flops_of, medians, print_table, seconds_of

from xret.heads.model import FeatureFacts
from xret.heads.recipes.recipe import Recipe, load_recipe
from xret.pipeline.device import pick_device
from xret.pipeline.encoders import EncoderSpec, load_visual
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
@small(
    visual="squeezenet1_1",
    image_size=64,
    images=40,
    network_images=2,
    steps=1,
    rounds=1,
    settings=("data.batch_size=20", "model.dim=16"),
)
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
    encoder = load_visual(EncoderSpec(visual, "random:0", image_size=image_size), device)
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
        placement="memory",
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


def device_of(name: str) -> torch.device:
    """Return a device, or say in a sentence that it is not here."""
    try:
        return pick_device(name)
    except XretError as error:
        raise click.ClickException(str(error)) from error
