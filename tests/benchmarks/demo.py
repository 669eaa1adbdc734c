"""The demo's table over three seeds: mean and spread of each row's RSUM, and the CPU seconds of training and test.

    OMP_NUM_THREADS=1 python tests/benchmarks/demo.py OUT

OUT is what `xret demo --out OUT` made. Settings are chosen on `--split val`.
"""

import statistics
import time
from pathlib import Path

import click
from sizes import small

import xret
from xret.cli.demo import ROWS


@click.command()
@click.argument("out", type=click.Path(path_type=Path))
@click.option("--split", type=click.Choice(["test", "val"]), default="test", show_default=True)
@click.option("--seeds", default=3, show_default=True)
@click.option("--set", "more", multiple=True, help="Recipe keys, KEY=VALUE, for all rows.")
@small(seeds=1, more=("model.dim=16", "schedule.epochs=1"))
def main(out: Path, split: str, seeds: int, more: tuple[str, ...]) -> None:
    """Print a line a row."""
    changed = dict(setting.split("=") for setting in more)
    for name, (recipe, settings) in ROWS.items():
        found, began = [], time.process_time()
        for seed in range(seeds):
            run, own = out / "seeds" / f"{name}-{seed}", settings | changed
            xret.train(out / "scenes.zarr", recipe=recipe, out=run, settings=own, seed=seed, resume=True)
            (table,) = xret.evaluate(run, split=split).results
            found.append(table.rsum)
        seconds = (time.process_time() - began) / seeds
        values, spread = ", ".join(f"{rsum:.1f}" for rsum in found), statistics.stdev(found) if seeds > 1 else 0
        print(f"{name}: {statistics.mean(found):.1f} ± {spread:.1f} ({values}), {seconds:.0f} CPU s")


if __name__ == "__main__":
    main()
