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
from extraction import same_picture
from reading import make_store
from sizes import small
from torch import Tensor
from training_parts import WORD_IDS, Step, medians, print_table, seconds_of

from xret.heads.model import Facts, FeatureFacts
from xret.heads.recipes.recipe import Recipe, load_recipe
from xret.pipeline.device import pick_device
from xret.pipeline.encoders.registry import load_visual
from xret.pipeline.encoders.spec import EncoderSpec
from xret.pipeline.errors import XretError
from xret.pipeline.reading.batches import Batch, stored_batches
from xret.pipeline.reading.features import Features
from xret.pipeline.reading.placement import Placement

CPU = torch.device("cpu")
F30K_IMAGES, F30K_CAPTIONS = 29_000, 145_000  # of the training split
POOLED = 768  # channels of a pooled caption feature
SMALL = ["data.batch_size=20", "model.dim=16"]
# Name: the recipe, settings of its own, facts of the captions.
HEADS: dict[str, tuple[str, list[str], Facts]] = {
    "vsepp": ("vsepp", [], WORD_IDS),
    "vse-infty": ("vse-infty", [], WORD_IDS),
    "setdiv": ("setdiv", [], WORD_IDS),
    "linear": ("vsepp", ["adapter.tokens.global=cached"], (FeatureFacts("tokens", POOLED, POOLED),)),
}


def pooled_captions(batch: Batch, table: Tensor) -> Batch:
    """Return a batch whose captions are pooled features, of a table that lies in memory."""
    found = table[batch.caption_index % len(table)].to(batch.caption_image.device)
    return replace(batch, captions=Features(torch.ones_like(batch.caption_image), global_=found))


@click.command()
@click.option("--steps", default=3, show_default=True, help="On which each head is measured.")
@small(images=40, steps=1, tiny=True)
def epoch(steps: int, images: int = 1024, tiny: bool = False) -> None:
    """An epoch from the cache against one with ResNet-152, frozen, in the loop, on a CPU.

    Heads are measured on a few of their own steps, loading from a generated cache included; the network, of random
    weights, on a generated photograph, reading it included. A step in the loop is the head's step and the network on
    the step's images; an image comes once an epoch where a recipe counts images, with each of its five captions where
    it counts captions. Epochs are those of Flickr30K. `linear` is one layer over pooled features on either side.
    """
    name, size, settings = ("squeezenet1_1", 64, SMALL) if tiny else ("resnet152", 224, [])
    encoder = load_visual(EncoderSpec(name, "random:0", image_size=size), "cpu")
    grid = (FeatureFacts("grid", encoder.channels, encoder.channels),)
    table, rows = torch.randn(10_000, POOLED).half(), []
    with tempfile.TemporaryDirectory() as work:
        paths = sorted((same_picture(Path(work, "pictures"), 2 if tiny else 16, 433).parent / "images").iterdir())
        on_images = medians({"network": lambda: encode(encoder, paths)}, 3, CPU)["network"] / len(paths)
        cache = make_store(Path(work), images, encoder.rows, encoder.channels)
        for name, (recipe_name, own, captions) in HEADS.items():
            recipe = load_recipe(recipe_name, [*own, *settings])
            take = Step(recipe, grid, captions, CPU)
            batches = cache_batches(cache, take, recipe, "cpu")
            if name == "linear":
                batches = map(partial(pooled_captions, table=table), batches)
            seconds, head_images = head_seconds(take, batches, steps, CPU)
            in_loop, data = seconds + head_images * on_images, recipe.data
            an_epoch = (F30K_IMAGES if data.unit == "image" else F30K_CAPTIONS) / data.batch_size / 60
            figures = (seconds, in_loop, in_loop / seconds, an_epoch * seconds, an_epoch * in_loop)
            rows.append([name, f"{data.batch_size} {data.unit}s", *(f"{one:.3g}" for one in figures)])
    head = ["head", "step", "cache, s", "loop, s", "loop / cache", "epoch from the cache, min", "in the loop, min"]
    print_table(head, rows)


def encode(encoder: Any, paths: list[Path]) -> None:
    """Read pictures and run the network on them."""
    encoder.encode(torch.stack([encoder.decode(path)[0] for path in paths]))


def cache_batches(
    cache: Any, take: Step, recipe: Recipe, device: str, placement: Placement = "memory"
) -> Iterator[Batch]:
    """Yield full batches of a cache for a head, epoch after epoch."""
    fields = {"image_fields": take.model.image_fields, "caption_fields": {"token"}}
    batches = stored_batches(
        cache.image_set(), cache.caption_set(), "train", device=device, placement=placement, **fields
    )
    unit, size = recipe.data.unit, min(recipe.data.batch_size, batches.images)
    for number in itertools.count():
        for batch in batches.epoch(unit=unit, batch_size=size, seed=0, epoch=number, captions=recipe.data.captions):
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
