"""What the trials of a tuning cost against one full training.

Trains a recipe once as by `xret train-head` and `xret eval`, then tunes it with `xret tune`, each in a process of its
own, the start of the process included. Prints one JSON line: seconds and seconds of all processors of both, their
ratios, and `epochs_ratio`, which no other work on the machine can change: epochs of all trials over those of the
training. Pruned trials, and features that are read once, keep the ratio below the number of trials. `first` and `best`
are the validation RSUM of the recipe's own values and of the best trial.

    python tests/benchmarks/tuning.py rsicd.zarr --recipe setdiv --trials 20
"""

import json
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import click

XRET = [sys.executable, "-m", "xret.cli"]


def measured(*commands: list[str]) -> tuple[float, float, str]:
    """Run commands one after another; return wall seconds, seconds of all processors, and what the last printed."""
    began, before = time.perf_counter(), resource.getrusage(resource.RUSAGE_CHILDREN)
    for command in commands:
        done = subprocess.run(
            [*XRET, *command], check=True, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
        )
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    busy = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    return time.perf_counter() - began, busy, done.stdout


@click.command()
@click.argument("store")
@click.option("--recipe", default="setdiv", show_default=True)
@click.option("--set", "settings", multiple=True, help="Recipe keys, KEY=VALUE.")
@click.option("--trials", default=20, show_default=True)
@click.option("--jobs", default=1, show_default=True)
@click.option("--device", default="auto", show_default=True)
def main(store: str, recipe: str, settings: tuple[str, ...], trials: int, jobs: int, device: str) -> None:
    """Measure the trials of a tuning against one full training."""
    same = ["--recipe", recipe, "--device", device, *(word for setting in settings for word in ("--set", setting))]
    with tempfile.TemporaryDirectory() as work:
        run, out = str(Path(work) / "run"), str(Path(work) / "tuned")
        alone = measured(["train-head", store, *same, "--out", run], ["eval", run, "--device", device, "--json"])
        counts = ["--trials", str(trials), "--jobs", str(jobs)]
        tuned = measured(["tune", store, *same, *counts, "--out", out, "--json"])
        epochs = len((Path(run) / "metrics.jsonl").read_text().splitlines())
    found = json.loads(tuned[2])
    line = {
        "trials": trials,
        "pruned": sum(trial["status"] == "pruned" for trial in found["trials"]),
        "epochs_ratio": round(sum(trial["epochs"] for trial in found["trials"]) / epochs, 2),
        "seconds": [round(alone[0], 1), round(tuned[0], 1)],
        "ratio": round(tuned[0] / alone[0], 2),
        "cpu_seconds": [round(alone[1], 1), round(tuned[1], 1)],
        "cpu_ratio": round(tuned[1] / alone[1], 2),
        "first": found["trials"][0]["rsum"],
        "best": found["best"]["rsum"],
    }
    click.echo(json.dumps(line))


if __name__ == "__main__":
    main()
