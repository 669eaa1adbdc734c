"""Tunings of a moment: a narrow recipe, eight trials of six epochs."""

from dataclasses import replace

from small_ablations import NARROW

from xret.heads.tuning.tuning import tune

SETTINGS = {**NARROW, "data.batch_size": 8, "schedule.epochs": 6}
TRIALS = 8


def tuned(store, out, recipe="vsepp", settings=None, trials=TRIALS, **options):
    """Tune on a CPU."""
    return tune(store, recipe, out, settings=SETTINGS | (settings or {}), trials=int(trials), device="cpu", **options)


def numbers(trials):
    """What must repeat: all but the time."""
    return [replace(trial, seconds=0) for trial in trials]


def heavy(folder):
    """The runs below a folder that have weights."""
    return sorted(
        {str(path.parent.relative_to(folder)) for name in ("*.safetensors", "*.pt") for path in folder.rglob(name)}
    )
