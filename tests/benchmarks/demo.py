"""The demo's table over three seeds: mean and spread of each row's RSUM, and the CPU seconds of training and test.

OMP_NUM_THREADS=1 python tests/benchmarks/demo.py OUT [test|val]

OUT is what `xret demo --out OUT` made. Settings are chosen on `val`.
"""

import statistics
import sys
import time
from pathlib import Path

import xret
from xret.cli.demo import ROWS

SEEDS = (0, 1, 2)


def main(out: Path, split: str = "test") -> None:
    for name, (recipe, settings) in ROWS.items():
        found, began = [], time.process_time()
        for seed in SEEDS:
            run = out / "seeds" / f"{name}-{seed}"
            xret.train(out / "scenes.zarr", recipe=recipe, out=run, settings=settings, seed=seed, resume=True)
            (table,) = xret.evaluate(run, split=split).results
            found.append(table.rsum)
        seconds = (time.process_time() - began) / len(SEEDS)
        values = ", ".join(f"{rsum:.1f}" for rsum in found)
        print(f"{name}: {statistics.mean(found):.1f} ± {statistics.stdev(found):.1f} ({values}), {seconds:.0f} CPU s")


if __name__ == "__main__":
    main(Path(sys.argv[1]), *sys.argv[2:])
