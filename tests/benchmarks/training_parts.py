"""What the benchmarks of training share: clocks, a training step, generated batches, and the products of a step."""

import multiprocessing
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from math import prod
from pathlib import Path
from statistics import median
from typing import Any

import click
import torch
from sizes import VOCABULARY
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from training_reference import make_reference

from xret.heads.model import Facts, FeatureFacts, build_losses, build_model
from xret.heads.recipes.recipe import Recipe
from xret.heads.training.gradients import Gradients
from xret.heads.training.objective import Objective
from xret.heads.training.optimisation import autocast_dtype, build_optimizer, set_rates
from xret.pipeline.device import on_host, send
from xret.pipeline.reading.batches import Batch
from xret.pipeline.reading.features import Features

aten = torch.ops.aten
PRODUCTS = {aten.mm.default, aten.addmm.default, aten.bmm.default, aten.baddbmm.default}
WORD_IDS = (FeatureFacts("words", None, None, VOCABULARY),)
BEHIND_WARMUP = 1.0  # epochs; the losses are those of the hardest negatives


def seconds_of(work: Callable[[], Any], device: torch.device) -> float:
    """Run once and return how long it took: by the clock on a GPU, on a CPU the processor's time of this process.

    With one thread these are the same, but that other programs on the machine do not count.
    """
    if device.type == "cpu":
        began = time.process_time()
        work()
        return time.process_time() - began
    torch.cuda.synchronize(device)
    began = time.perf_counter()
    work()
    torch.cuda.synchronize(device)
    return time.perf_counter() - began


def medians(jobs: dict[str, Callable[[], Any]], rounds: int, device: torch.device) -> dict[str, float]:
    """Return the median of each job's seconds; they take turns, and a first round warms up."""
    times = defaultdict(list)
    for _ in range(rounds + 1):
        for name, work in jobs.items():
            times[name].append(seconds_of(work, device))
    return {name: median(found[1:]) for name, found in times.items()}


def print_table(head: Sequence[str], rows: Sequence[Sequence[object]]) -> None:
    """Print a markdown table."""
    for row in (head, ["---"] * len(head), *rows):
        click.echo("| " + " | ".join(map(str, row)) + " |")


def freshly(work: Callable[..., Any], *given: Any) -> Any:
    """Run in a process of its own: what earlier work gave back must not be taken for free memory."""
    server = multiprocessing.get_context("forkserver")
    server.set_forkserver_preload(["xret.heads.training.objective"])  # imported once
    with ProcessPoolExecutor(1, server) as pool:
        return pool.submit(work, *given).result()


def status_mb(key: str) -> float:
    """Return a figure of this process's status in MB (Linux)."""
    line = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith(key))
    return int(line.split()[1]) * 1024 / 1e6


class Step:
    """One step of a training as `heads.training.trainer.Trainer` takes it, after the warm-up of the losses.

    Args:
        recipe: says the head, its losses and its optimiser.
        images: facts of the image features.
        captions: facts of the caption features.
        device: where to train.
        reference: with the parts of `training_reference` in the place of ours.
    """

    def __init__(
        self,
        recipe: Recipe,
        images: Facts,
        captions: Facts,
        device: torch.device,
        reference: bool = False,
    ) -> None:
        torch.manual_seed(0)
        self.recipe = recipe
        self.model = build_model(recipe, images, captions).train()
        if reference:
            make_reference(self.model, recipe)
        self.model.to(device)
        self.losses = build_losses(recipe, captions).to(device)
        self.optimizer = build_optimizer(self.model, self.losses, recipe.optimizer)
        self.precision = autocast_dtype(recipe.runtime.precision, device)
        self.scaler = torch.amp.GradScaler(device.type, enabled=self.precision is torch.float16)
        self.objective = Objective(recipe, self.model, self.losses)
        self.objective.precision, self.objective.mask = self.precision, captions[0].vocabulary_size or 0
        self.gradients = Gradients(self.objective, self.optimizer, self.scaler)

    def __call__(self, batch: Batch) -> Callable[[], Tensor]:
        """Take a step; return what waits for its loss and terms."""
        set_rates(self.optimizer, self.recipe.schedule, self.recipe.optimizer.lr, BEHIND_WARMUP)
        read = self.gradients(batch, BEHIND_WARMUP)
        self.scaler.step(self.optimizer)
        self.scaler.update()
        return read


def roi_batch(images: int, captions: int, regions: int, channels: int) -> Batch:
    """Return a generated batch: float16 regions, and captions of 8 to 16 words, about as long as Flickr30K's."""
    length = torch.randint(8, 17, (captions,))
    token = torch.randint(1, VOCABULARY, (captions, int(length.max())))
    token.masked_fill_(torch.arange(token.shape[1]) >= length[:, None], 0)
    local = torch.randn(images, regions, channels).half()
    owner = torch.arange(captions) * images // captions
    rows = torch.full((images,), regions)
    return Batch(Features(rows, local=local), Features(length, token=token), owner, torch.arange(captions))


def on_device(batch: Batch, device: torch.device) -> Batch:
    """Return a batch in a device's memory."""

    def moved(features: Features) -> Features:
        parts = vars(features) | {"length": send(on_host(features.length), device)}
        return Features(
            **{key: x.to(device) if key != "length" and isinstance(x, Tensor) else x for key, x in parts.items()}
        )

    owner = send(on_host(batch.caption_image), device)
    return Batch(moved(batch.images), moved(batch.captions), owner, batch.caption_index)


Operand = tuple[tuple[int, ...], tuple[int, ...], torch.dtype]


class Watched(TorchDispatchMode):
    """Notes the matrix products of what runs on a CPU within it.

    Attributes:
        products: how often each was formed: the operation, and of each operand shape, strides and type.
    """

    def __init__(self) -> None:
        super().__init__()
        self.products: Counter[tuple[Any, tuple[Operand, ...]]] = Counter()

    @property
    def flops(self) -> int:
        """Of the products."""
        return sum(
            count * 2 * prod(operands[-2][0]) * operands[-1][0][-1] for (_, operands), count in self.products.items()
        )

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func in PRODUCTS:
            self.products[func, tuple((tuple(x.shape), x.stride(), x.dtype) for x in args)] += 1
        return func(*args, **(kwargs or {}))


def replay(products: Counter[tuple[Any, tuple[Operand, ...]]]) -> Callable[[], None]:
    """Return what forms noted products again, and nothing else, on random operands of the same shapes and strides."""
    made: dict[Operand, Tensor] = {}
    for _, operands in products:
        for shape, stride, dtype in operands:
            size = 1 + sum((n - 1) * step for n, step in zip(shape, stride, strict=True))
            made[shape, stride, dtype] = torch.randn(size).to(dtype).as_strided(shape, stride)

    @torch.no_grad()
    def run() -> None:
        for (func, operands), count in products.items():
            matrices = [made[operand] for operand in operands]
            for _ in range(count):
                func(*matrices)

    return run
