"""What every similarity costs, against the bare matrix product of the same elements in the same run.

`scoring`: all images with all captions in blocks, as an evaluation does (COCO 5K by default). `evaluation`: the same,
and recalls and median ranks in both directions. `training`: one batch, forward and backward. Rounds take turns; the
fastest of each counts. Prints one JSON line a similarity.

    python tests/benchmarks/similarity.py --images 1000 --captions 5000 --part scoring --part training

`ratio` is time over the bare product's, `extra_mb` the peak of memory over inputs and result (on a CPU of the
process, so that it is rough; Linux only).
"""

import ctypes
import itertools
import json
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import click
import torch
from torch import Tensor

from xret.heads.evaluation.metrics import ranks, recall_table
from xret.heads.modules.embedding import Gaussian, Sequence, each
from xret.heads.modules.similarity import SIMILARITIES, blocks, in_blocks

Embeddings = Tensor | Gaussian | Sequence
PARTS = ("scoring", "evaluation", "training")


def embeddings(kind: str, count: int, elements: int, dim: int, device: str) -> Embeddings:
    """Return random embeddings of a kind; `elements` is the size of sets and the length of sequences."""
    if kind == "vector":
        return torch.randn(count, dim, device=device)
    if kind == "gaussian":
        return Gaussian(torch.randn(count, dim, device=device), torch.randn(count, dim, device=device))
    rows = torch.randn(count, elements, dim, device=device)
    return rows if kind == "set" else Sequence(rows, torch.full((count,), elements, device=device))


def rows_of(embedding: Embeddings) -> Tensor:
    """Return what the bare product multiplies, `[elements, D]`."""
    return (embedding if isinstance(embedding, Tensor) else embedding[0]).flatten(0, -2)


def bare_scoring(images: Tensor, captions: Tensor, block: tuple[int, int]) -> None:
    """Multiply in blocks of `block` rows, into the same memory again and again."""
    for top in range(0, len(images), block[0]):
        left = images[top : top + block[0]]
        for begin in range(0, len(captions), block[1]):
            left @ captions[begin : begin + block[1]].T


def evaluation(similarity: Any, images: Embeddings, captions: Embeddings, caption_image: Tensor) -> None:
    """Score, rank and take the recalls, as `xret eval` does with embeddings."""
    recall_table(*ranks(in_blocks(similarity, images, captions), caption_image))


def bare_training(images: Tensor, captions: Tensor) -> None:
    """Multiply, forward and backward."""
    product = images @ captions.T
    product.backward(torch.ones_like(product))


def train_step(similarity: Any, images: Embeddings, captions: Embeddings) -> None:
    """Compare, forward and backward."""
    values = similarity(images, captions)
    values.backward(torch.ones_like(values))


def with_gradients(embedding: Embeddings) -> Embeddings:
    """Return a copy whose tensors collect gradients."""
    return each(lambda x: x.detach().clone().requires_grad_(x.is_floating_point()), embedding)


def seconds_of(work: Callable[[], Any], device: str) -> float:
    """Run once and return how long it took."""
    begin = time.perf_counter()
    work()
    if device == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter() - begin


def peak_mb(work: Callable[[], Any], device: str) -> float:
    """Return by how much memory in use grows at most while `work` runs, in MB."""
    if device == "cuda":
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        work()
        torch.cuda.synchronize()
        return (torch.cuda.max_memory_allocated() - before) / 1e6
    ctypes.CDLL(None).malloc_trim(0)  # glibc: what earlier work left is not to be taken for free memory
    Path("/proc/self/clear_refs").write_text("5")  # Linux: the peak begins anew
    before = status_mb("VmRSS")
    work()
    return status_mb("VmHWM") - before


def status_mb(key: str) -> float:
    """Return a figure of this process's status in MB."""
    line = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith(key))
    return int(line.split()[1]) * 1024 / 1e6


def report(what: str, jobs: dict[str, tuple[Callable[[], Any], Callable[[], Any], float]], rounds: int, device: str):
    """Time every job `(similarity, bare product, MB of its result)` in turn with its bare product, and print."""
    for name, (work, bare, result_mb) in jobs.items():
        extra = peak_mb(work, device) - result_mb  # the first run, which also warms up
        seconds_of(bare, device)
        times = [(seconds_of(work, device), seconds_of(bare, device)) for _ in range(rounds)]
        best, best_bare = (min(column) for column in zip(*times, strict=True))
        found = {"what": what, "similarity": name, "seconds": round(best, 4), "bare_seconds": round(best_bare, 4)}
        click.echo(json.dumps({**found, "ratio": round(best / best_bare, 3), "extra_mb": round(extra)}))


@click.command()
@click.option("--images", default=5000, show_default=True)
@click.option("--captions", default=25000, show_default=True)
@click.option("--train-images", default=128, show_default=True)
@click.option("--train-captions", default=640, show_default=True)
@click.option("--elements", default=4, show_default=True, help="Size of the sets.")
@click.option("--rows", default=20, show_default=True, help="Length of the sequences of cross-attention.")
@click.option("--dim", default=1024, show_default=True)
@click.option("--rounds", default=3, show_default=True)
@click.option("--device", type=click.Choice(["cpu", "cuda"]), default="cpu", show_default=True)
@click.option("--part", "wanted", multiple=True, type=click.Choice(PARTS), help="Only these; else all.")
@click.option(
    "--similarity",
    "names",
    multiple=True,
    type=click.Choice(list(SIMILARITIES)),
    help="Only these; else all but cross-attention, which takes very much longer.",
)
def main(
    images: int,
    captions: int,
    train_images: int,
    train_captions: int,
    elements: int,
    rows: int,
    dim: int,
    rounds: int,
    device: str,
    wanted: tuple[str, ...],
    names: tuple[str, ...],
) -> None:
    """Print one JSON line a similarity and part."""
    torch.manual_seed(0)
    chosen = names or tuple(name for name in SIMILARITIES if name != "cross-attention")
    kinds = {name: SIMILARITIES[name].embedding for name in chosen}
    parts = {name: SIMILARITIES[name]().to(device).eval() for name in chosen}

    def sides(kind: str, *counts: int) -> list[Embeddings]:
        size = rows if kind == "sequence" else elements
        return [embeddings(kind, count, size, dim, device) for count in counts]

    caption_image = torch.arange(captions, device=device) * images // captions
    for kind, part in itertools.product(dict.fromkeys(kinds.values()), PARTS[:2]):
        if part not in (wanted or PARTS):
            continue
        left, right = sides(kind, images, captions)
        flat, flat_right = rows_of(left), rows_of(right)
        side = blocks.side(left, right)
        block = side * len(flat) // images, side * len(flat_right) // captions
        work = in_blocks if part == "scoring" else partial(evaluation, caption_image=caption_image)
        jobs = {
            name: (
                partial(work, parts[name], left, right),
                lambda flat=flat, other=flat_right, block=block: bare_scoring(flat, other, block),
                images * captions * 4 / 1e6,
            )
            for name in chosen
            if kinds[name] == kind
        }
        report(part, jobs, rounds, device)
    for kind in dict.fromkeys(kinds.values()) if "training" in (wanted or PARTS) else ():
        left, right = map(with_gradients, sides(kind, train_images, train_captions))
        flat, flat_right = (rows_of(side).detach().clone().requires_grad_() for side in (left, right))
        jobs = {
            name: (
                lambda name=name, left=left, right=right: train_step(parts[name].train(), left, right),
                lambda flat=flat, other=flat_right: bare_training(flat, other),
                0.0,
            )
            for name in chosen
            if kinds[name] == kind
        }
        report("training", jobs, rounds, device)


if __name__ == "__main__":
    main()
