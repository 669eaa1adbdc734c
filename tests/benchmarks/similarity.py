"""What every similarity costs, against the bare matrix product of the same elements in the same run.

`scoring`: all images with all captions in blocks, as an evaluation does (COCO 5K by default). `evaluation`: the same,
and recalls and median ranks in both directions. Rounds take turns; the fastest of each counts. Prints one JSON line a
similarity: `ratio` is time over the bare product's, `extra_mb` the peak of memory over inputs and result (of the
process, so that it is rough; Linux only).

    python tests/benchmarks/similarity.py --images 1000 --captions 5000
"""

import ctypes
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import click
import torch
from sizes import say, seconds_of, small
from torch import Tensor
from training_parts import status_mb

from xret.heads.evaluation.metrics import ranks, recall_table
from xret.heads.modules.embedding import Gaussian, Sequence
from xret.heads.modules.similarity import SIMILARITIES, in_blocks
from xret.heads.modules.similarity.shared import block_side

Embeddings = Tensor | Gaussian | Sequence
USUAL = tuple(name for name in SIMILARITIES if name != "cross-attention")  # which takes very much longer


def embeddings(kind: str, count: int, dim: int) -> Embeddings:
    """Return random embeddings of a kind: sets of four elements, sequences of twenty."""
    if kind == "vector":
        return torch.randn(count, dim)
    if kind == "gaussian":
        return Gaussian(torch.randn(count, dim), torch.randn(count, dim))
    if kind == "set":
        return torch.randn(count, 4, dim)
    return Sequence(torch.randn(count, 20, dim), torch.full((count,), 20))


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


def peak_mb(work: Callable[[], Any]) -> float:
    """Return by how much the memory of this process grows at most while `work` runs, in MB."""
    ctypes.CDLL(None).malloc_trim(0)  # glibc: what earlier work left is not to be taken for free memory
    Path("/proc/self/clear_refs").write_text("5")  # Linux: the peak begins anew
    before = status_mb("VmRSS")
    work()
    return status_mb("VmHWM") - before


@click.command()
@click.option("--images", default=5000, show_default=True)
@click.option("--captions", default=25000, show_default=True)
@click.option("--rounds", default=3, show_default=True)
@small(images=20, captions=40, dim=16, rounds=1, names=tuple(SIMILARITIES))
def main(images: int, captions: int, rounds: int, dim: int = 1024, names: tuple[str, ...] = USUAL) -> None:
    """Print one JSON line a similarity and part."""
    torch.manual_seed(0)
    caption_image = torch.arange(captions) * images // captions
    for name in names:
        kind, similarity = SIMILARITIES[name].embedding, SIMILARITIES[name]().eval()
        left, right = (embeddings(kind, count, dim) for count in (images, captions))
        flat, other, side = rows_of(left), rows_of(right), block_side(left, right)
        product = partial(bare, flat, other, (side * len(flat) // images, side * len(other) // captions))
        parts = {"scoring": in_blocks, "evaluation": partial(evaluation, caption_image=caption_image)}
        for part, work in parts.items():
            job = partial(work, similarity, left, right)
            extra = peak_mb(job) - images * captions * 4 / 1e6  # the first run, which also warms up
            seconds_of(product)
            times = [(seconds_of(job), seconds_of(product)) for _ in range(rounds)]
            ours, theirs = (min(column) for column in zip(*times, strict=True))
            seconds = {"seconds": round(ours, 4), "bare_seconds": round(theirs, 4)}
            say(what=part, similarity=name, **seconds, ratio=round(ours / theirs, 3), extra_mb=round(extra))


if __name__ == "__main__":
    main()
