"""Ablations of a moment: small stores, a narrow recipe, and two margins."""

import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

from safetensors.torch import load_file
from small_store import make_store

from xret.heads.ablation.ablation import ablate
from xret.heads.ablation.plan import plan_variation

NARROW = ["model.dim=8", "adapter.words.word_dim=4"]
SMALL = [*NARROW, "data.batch_size=8", "schedule.epochs=2"]
MARGIN = "loss.triplet.margin=0.1,0.2"
FAILING = "adapter.words.vectors=nowhere.txt,null"  # the first has no file


class Stores:
    """Gives the store of a kind of images and a kind of captions, made once."""

    def __init__(self, tmp_path_factory):
        self.factory, self.made = tmp_path_factory, {}

    def __call__(self, image="grid", text="words"):
        if (image, text) not in self.made:
            url = self.factory.mktemp("store") / "small.zarr"
            self.made[image, text] = make_store(url, train=12, val=4, test=4, image=image, text=text)
        return self.made[image, text]


def plan_of(*vary, settings=(), recipe="vsepp"):
    fixed = [setting for setting in SMALL if not any(text.startswith(setting.split("=")[0]) for text in vary)]
    return plan_variation(recipe, vary or [MARGIN], [*fixed, *settings])


def ablated(store, plan, out, **options):
    """The entries of an ablation."""
    return ablate(store, plan, out, **options).entries


def numbers(entries):
    """What must repeat: all but where the runs lie."""
    return [replace(entry, run="") for entry in entries]


def weights(run):
    """The best weights of a run."""
    return load_file(Path(run) / "model.safetensors")


KILLED = """
import sys
import torch
from xret.heads.ablation.ablation import ablate
from xret.heads.ablation.ablation import ablate
from xret.heads.ablation.plan import plan_variation
torch.set_num_threads(1)
store, out, jobs, *settings = sys.argv[1:]
plan = plan_variation("vsepp", ["loss.triplet.margin=0.1,0.2"], settings)
ablate(store, plan, out, seeds=2, device="cpu", jobs=int(jobs))
"""


def started(store, out, jobs, settings):
    """Begin the ablation of `KILLED` in a process of its own."""
    return subprocess.Popen(
        [sys.executable, "-c", KILLED, store, str(out), str(jobs), *settings],
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        stderr=subprocess.DEVNULL,
    )
