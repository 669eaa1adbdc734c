"""What a step over a very large batch of pairs costs: against its bare matrix products, and in memory.

    python tests/benchmarks/large_batches.py

A linear layer a side over 768-dimensional global features, with InfoNCE and with the sigmoid loss, `data.chunk=2048`.
Prints a markdown table. One thread of a CPU; its processor time is measured, so that other programs hardly count.
"""

from dataclasses import replace
from pathlib import Path
from statistics import median

import click
import torch
from sizes import small
from training_parts import Step, Watched, freshly, print_table, replay, seconds_of, status_mb

from xret.cli.memory import keep_freed_memory
from xret.heads.model import FeatureFacts
from xret.heads.recipes.recipe import load_recipe
from xret.pipeline.reading.batches import Batch
from xret.pipeline.reading.features import Features

CPU = torch.device("cpu")
WIDTH = 768  # of features and embeddings
CHUNK = 2048
AIM = 1.3
LOSSES = {
    "InfoNCE": [],
    "sigmoid": ["loss.infonce.weight=0", "loss.sigmoid.weight=1"],
}


def step_of(loss: str, chunk: int | None) -> Step:
    """Return a step of a training over cached global features."""
    settings = [f"model.dim={WIDTH}", "adapter.tokens.global=cached", "loss.same_text=negative", *LOSSES[loss]]
    recipe = load_recipe("linear", settings)
    recipe = replace(recipe, data=replace(recipe.data, chunk=chunk))
    return Step(recipe, (FeatureFacts("grid", WIDTH, WIDTH),), (FeatureFacts("tokens", WIDTH, WIDTH),), CPU)


def batch_of(pairs: int) -> Batch:
    """Return generated pairs of float16 global features."""
    torch.manual_seed(1)
    length, own = torch.ones(pairs, dtype=torch.long), torch.arange(pairs)
    images, captions = (Features(length, global_=torch.randn(pairs, WIDTH).half()) for _ in range(2))
    return Batch(images, captions, own, own)


def peak_mb(loss: str, pairs: int, chunk: int | None) -> float:
    """Return by how much a step lets the memory of this process, which must be fresh, grow at most, in MB (Linux)."""
    torch.set_num_threads(1)
    step = step_of(loss, chunk)
    step(batch_of(64))  # whatever libraries keep is there now, the optimiser's state too
    batch = batch_of(pairs)
    Path("/proc/self/clear_refs").write_text("5")  # the peak begins anew
    before = status_mb("VmRSS")
    keep_freed_memory()  # as the command line does
    step(batch)
    return status_mb("VmHWM") - before


def times(loss: str, pairs: int, rounds: int) -> tuple[float, float, float]:
    """Return the seconds of a step, those of its products, and the share of these that nothing recomputed needs."""
    step, batch = step_of(loss, CHUNK), batch_of(pairs)
    with Watched() as seen:
        step(batch)
    products = replay(seen.products)
    found = [(seconds_of(lambda: step(batch), CPU), seconds_of(products, CPU)) for _ in range(rounds)]
    # Cosines and both their gradients; embeddings and the gradients of their weights.
    needed = 3 * 2 * pairs**2 * WIDTH + 2 * 2 * 2 * pairs * WIDTH**2
    return median(one for one, _ in found), median(other for _, other in found), needed / seen.flops


@click.command()
@small(sizes=(64,), whole=64, rounds=1)
def main(sizes: tuple[int, ...] = (2048, 8192, 32768), whole: int = 8192, rounds: int = 3) -> None:
    """Time over the bare products, the median of rounds, and peak memory, against the number of pairs.

    The whole matrix is tried with as many pairs as memory has room for; above 10,000 pairs there is one round.
    """
    torch.set_num_threads(1)
    rows = []
    for loss in LOSSES:
        for pairs in sizes:
            ours = freshly(peak_mb, loss, pairs, CHUNK)
            matrix = f"{freshly(peak_mb, loss, pairs, None):,.0f}" if pairs <= whole else ""
            taken, bare, share = freshly(times, loss, pairs, 1 if pairs > 10_000 else rounds)
            vector = pairs * WIDTH * 4 / 1e6
            ratios = [f"{taken / bare:.2f} (aim {AIM})", f"{taken / bare / share:.2f}"]
            rows.append([loss, f"{pairs:,}", f"{taken:.2f}", *ratios, f"{ours:,.0f}", f"{ours / vector:.1f}", matrix])
            click.echo(f"{loss}, {pairs:,} pairs: done", err=True)
    head = ["loss", "pairs", "step, s", "step / products", "step / products of the whole matrix", "peak, MB"]
    print_table([*head, f"peak, vectors of {WIDTH} a pair", "whole matrix: peak, MB"], rows)


if __name__ == "__main__":
    main()
