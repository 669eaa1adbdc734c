"""Ablations of a moment: small stores, a narrow recipe, and two margins."""

import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

from safetensors.torch import load_file
from small_store import make_store

from xret.heads.ablation.ablation import ablate
from xret.heads.ablation.plan import make_plan

NARROW = {"model.dim": 8, "adapter.words.word_dim": 4}
SMALL = {**NARROW, "data.batch_size": 8, "schedule.epochs": 2}
MARGIN = {"loss.triplet.margin": [0.1, 0.2]}
FAILING = {"adapter.words.vectors": ["nowhere.txt", None]}  # the first has no file


class Stores:
    """Gives the store of a kind of images and a kind of captions, made once."""

    def __init__(self, tmp_path_factory):
        self.factory, self.made = tmp_path_factory, {}

    def __call__(self, image="grid", text="words"):
        if (image, text) not in self.made:
            url = self.factory.mktemp("store") / "small.zarr"
            self.made[image, text] = make_store(url, train=12, val=4, test=4, image=image, text=text)
        return self.made[image, text]


def plan_of(vary=MARGIN, *, recipe="vsepp", settings=None, **options):
    keys = {key for keys in vary for key in keys.split(",")}
    fixed = {key: value for key, value in (SMALL | (settings or {})).items() if key not in keys}
    return make_plan(recipe, vary, settings=fixed, **options)


def ablated(store, plan, out, **options):
    """The entries of an ablation on a CPU."""
    return ablate(store, plan, out, device="cpu", **options).entries


def numbers(entries):
    """What must repeat: all but where the runs lie."""
    return [replace(entry, run="") for entry in entries]


def weights(run):
    """The best weights of a run."""
    return load_file(Path(run) / "model.safetensors")


def started(function, *arguments):
    """Begin a function of this folder, as ``module:function``, in a process of its own."""
    module, name = function.split(":")
    code = f"import sys, torch; sys.path.insert(0, {str(Path(__file__).parent)!r}); torch.set_num_threads(1)\n"
    code += f"from {module} import {name}\nif __name__ == '__main__': {name}(*sys.argv[1:])"
    return subprocess.Popen(
        [sys.executable, "-c", code, *map(str, arguments)],
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        stderr=subprocess.PIPE,
        text=True,
    )


def ablate_twelve_epochs(store, out):
    """The ablation that tests kill."""
    ablated(store, plan_of(settings={"schedule.epochs": 12}), out, seeds=2)
