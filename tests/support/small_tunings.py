"""Tunings of a moment: a narrow recipe, eight trials of six epochs."""

import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

from small_ablations import NARROW

from xret.heads.tuning.tuning import tune

SETTINGS = [*NARROW, "data.batch_size=8", "schedule.epochs=6"]
TRIALS = 8


def tuned(store, out, *recipes, settings=SETTINGS, trials=TRIALS, **options):
    """Tune on a CPU and return what became of the first recipe."""
    return tune(store, recipes or ["vsepp"], out, settings=settings, trials=trials, device="cpu", **options).recipes[0]


def numbers(trials):
    """What must repeat: all but the time."""
    return [replace(trial, seconds=0) for trial in trials]


def heavy(folder):
    """The files of weights below a folder, by the name of the run."""
    return sorted(
        {str(path.parent.relative_to(folder)) for name in ("*.safetensors", "*.pt") for path in folder.rglob(name)}
    )


KILLED = """
import sys
import torch
sys.path[:0] = sys.argv[4:]
from small_tunings import tuned
torch.set_num_threads(1)
tuned(sys.argv[1], sys.argv[2], jobs=int(sys.argv[3]))
"""


def started(store, out, jobs=1):
    """Begin the tuning in a process of its own."""
    return subprocess.Popen(
        [sys.executable, "-c", KILLED, store, str(out), str(jobs), str(Path(__file__).parent)],
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        stderr=subprocess.PIPE,
        text=True,
    )
