"""What an ablation's cells cost that share one resident copy of the features, against runs one after another.

`sharing` trains and evaluates the same heads, of one recipe with as many seeds, in three ways:

    apart      each in a process of its own, one after another, as by `xret train-head` and `xret eval`
    in_turn    `xret ablate`: one after another in one process
    at_once    `xret ablate --jobs N`; on a CPU no more at once than have cores

A round runs all three, the order turning, and the fastest of each counts. Prints one JSON line a way: seconds and
seconds of all processors, each with its ratio to `apart`, the start of processes included; `equal`: the weights of all
heads are those of `apart`, bit by bit. Where others are at work on the machine, `cpu_ratio` is the one to read.

    python tests/benchmarks/ablation.py sharing f30k.zarr --recipe setdiv --set schedule.epochs=1 --jobs 4
"""

import itertools
import json
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import click
import torch
from safetensors.torch import load_file

ALONE = """
import sys
from xret.heads.evaluation.evaluation import evaluate
from xret.heads.recipes.recipe import load_recipe
from xret.heads.training.training import train
store, recipe, out, seed, device, *settings = sys.argv[1:]
train(store, load_recipe(recipe, settings), out, device=device, seed=int(seed))
evaluate([out], store=store, device=device)
"""


def apart(store: str, recipe: str, settings: list[str], cells: int, device: str, out: Path) -> list[Path]:
    """Train and evaluate each head in a process of its own; return the runs."""
    runs = [out / f"seed={seed}" for seed in range(cells)]
    for seed, run in enumerate(runs):
        words = [sys.executable, "-c", ALONE, store, recipe, str(run), str(seed), device, *settings]
        subprocess.run(words, check=True, stderr=subprocess.DEVNULL)
    return runs


def ablated(store: str, recipe: str, settings: list[str], cells: int, device: str, out: Path, jobs: int) -> list[Path]:
    """Train and evaluate the heads as an ablation; return the runs."""
    margin = ["--vary", "loss.triplet.margin=0.2"]
    words = [sys.executable, "-m", "xret.cli", "ablate", store, "--recipe", recipe, *margin, "--seeds", str(cells)]
    words += [word for setting in settings for word in ("--set", setting)]
    subprocess.run(
        [*words, "--device", device, "--jobs", str(jobs), "--out", str(out)], check=True, capture_output=True
    )
    return [out / "loss.triplet.margin=0.2" / f"seed={seed}" for seed in range(cells)]


def same(runs: list[Path], others: list[Path]) -> bool:
    """Return whether all weights of all runs are equal, bit by bit."""
    for run, other in zip(runs, others, strict=True):
        one, two = (load_file(path / "model.safetensors") for path in (run, other))
        if one.keys() != two.keys() or not all(torch.equal(value, two[name]) for name, value in one.items()):
            return False
    return True


def processor_seconds() -> float:
    """Return the time that all processors have spent on this process's children that have ended."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


@click.group()
def main() -> None:
    """What an ablation's cells cost that share one resident copy of the features."""


@main.command()
@click.argument("store")
@click.option("--recipe", default="setdiv", show_default=True)
@click.option("--set", "settings", multiple=True, help="Recipe keys, KEY=VALUE; not loss.triplet.margin, which is 0.2.")
@click.option("--cells", default=4, show_default=True)
@click.option("--jobs", default=4, show_default=True)
@click.option("--rounds", default=2, show_default=True)
@click.option("--device", default="auto", show_default=True)
def sharing(
    store: str, recipe: str, settings: tuple[str, ...], cells: int, jobs: int, rounds: int, device: str
) -> None:
    """Measure heads that share one resident copy of the features against runs one after another."""
    words = (store, recipe, list(settings), cells, device)
    alone = (*words[:2], [*settings, "loss.triplet.margin=0.2"], *words[3:])
    ways: dict[str, Callable[[Path], list[Path]]] = {
        "apart": lambda out: apart(*alone, out),
        "in_turn": lambda out: ablated(*words, out, 1),
        "at_once": lambda out: ablated(*words, out, jobs),
    }
    seconds: dict[str, list[float]] = {way: [] for way in ways}
    busy: dict[str, list[float]] = {way: [] for way in ways}
    runs: dict[str, list[Path]] = {}
    with tempfile.TemporaryDirectory() as work:
        for number in range(rounds):
            for way in itertools.islice(itertools.cycle(ways), number, number + len(ways)):
                began, before = time.perf_counter(), processor_seconds()
                runs[way] = ways[way](Path(work) / f"{way}{number}")
                seconds[way].append(time.perf_counter() - began)
                busy[way].append(processor_seconds() - before)
        for way in ways:
            found: dict[str, object] = {"what": way, "cells": cells}
            for name, times in (("", seconds), ("cpu_", busy)):
                found[f"{name}seconds"] = round(min(times[way]), 2)
                found[f"{name}ratio"] = round(min(times[way]) / min(times["apart"]), 3)
            click.echo(json.dumps({**found, "equal": same(runs["apart"], runs[way])}))


if __name__ == "__main__":
    main()
