"""What every similarity costs, against the bare matrix product of the same elements in the same run.

`scoring`: all images with all captions in blocks, as an evaluation does (COCO 5K by default). `evaluation`: the same,
and recalls and median ranks in both directions. Rounds take turns; the fastest of each counts. Prints one JSON line a
similarity: `ratio` is time over the bare product's, `extra_mb` the peak of memory over inputs and result (on a CPU of
the process, so that it is rough; Linux only).

    python tests/benchmarks/similarity.py --images 1000 --captions 5000 --part scoring
"""

import ctypes
import json
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import click
import torch
from sizes import small
from torch import Tensor
from training_parts import status_mb

from xret.heads.evaluation.metrics import ranks, recall_table
from xret.heads.modules.embedding import Gaussian, Sequence
from xret.heads.modules.similarity import SIMILARITIES, blocks, in_blocks

Embeddings = Tensor | Gaussian | Sequence
PARTS = ("scoring", "evaluation")
USUAL = tuple(name for name in SIMILARITIES if name != "cross-attention")  # which takes very much longer


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


def bare(images: Tensor, captions: Tensor, block: tuple[int, int]) -> None:
    """Multiply in blocks of `block` rows, into the same memory again and again."""
    for top in range(0, len(images), block[0]):
        left = images[top : top + block[0]]
        for begin in range(0, len(captions), block[1]):
            left @ captions[begin : begin + block[1]].T


def evaluation(similarity: Any, images: Embeddings, captions: Embeddings, caption_image: Tensor) -> None:
    """Score, rank and take the recalls, as `xret eval` does with embeddings."""
    recall_table(*ranks(in_blocks(similarity, images, captions), caption_image))


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


@click.command()
@click.option("--images", default=5000, show_default=True)
@click.option("--captions", default=25000, show_default=True)
@click.option("--elements", default=4, show_default=True, help="Size of the sets.")
@click.option("--rows", default=20, show_default=True, help="Length of the sequences of cross-attention.")
@click.option("--dim", default=1024, show_default=True)
@click.option("--rounds", default=3, show_default=True)
@click.option("--device", type=click.Choice(["cpu", "cuda"]), default="cpu", show_default=True)
@click.option("--part", "parts", multiple=True, type=click.Choice(PARTS), default=PARTS, show_default=True)
@click.option("--similarity", "names", multiple=True, type=click.Choice(list(SIMILARITIES)), default=USUAL)
@small(images=20, captions=40, dim=16, rounds=1, names=tuple(SIMILARITIES))
def main(
    images: int,
    captions: int,
    elements: int,
    rows: int,
    dim: int,
    rounds: int,
    device: str,
    parts: tuple[str, ...],
    names: tuple[str, ...],
) -> None:
    """Print one JSON line a similarity and part."""
    torch.manual_seed(0)
    caption_image = torch.arange(captions, device=device) * images // captions
    for name in names:
        kind, similarity = SIMILARITIES[name].embedding, SIMILARITIES[name]().to(device).eval()
        size = rows if kind == "sequence" else elements
        left, right = (embeddings(kind, count, size, dim, device) for count in (images, captions))
        flat, other, side = rows_of(left), rows_of(right), blocks.side(left, right)
        product = partial(bare, flat, other, (side * len(flat) // images, side * len(other) // captions))
        for part in parts:
            work = in_blocks if part == "scoring" else partial(evaluation, caption_image=caption_image)
            job = partial(work, similarity, left, right)
            extra = peak_mb(job, device) - images * captions * 4 / 1e6  # the first run, which also warms up
            seconds_of(product, device)
            times = [(seconds_of(job, device), seconds_of(product, device)) for _ in range(rounds)]
            ours, theirs = (min(column) for column in zip(*times, strict=True))
            found = {"what": part, "similarity": name, "seconds": round(ours, 4), "bare_seconds": round(theirs, 4)}
            click.echo(json.dumps({**found, "ratio": round(ours / theirs, 3), "extra_mb": round(extra)}))


if __name__ == "__main__":
    main()
