"""Ablations of a moment: small stores, a narrow recipe, and two margins."""

import importlib
import os
import signal
import time
from dataclasses import replace
from multiprocessing import get_context
from pathlib import Path

import pytest
from safetensors.torch import load_file
from small_store import make_store

from xret.heads.ablation.ablation import ablate
from xret.heads.ablation.plan import make_plan
from xret.heads.training.callbacks import Callback

NARROW = {"model.dim": 8, "adapter.words.word_dim": 4}
SMALL = {**NARROW, "data.batch_size": 8, "schedule.epochs": 2}
MARGIN = {"loss.triplet.margin": [0.1, 0.2]}
DASK = [  # marks of tests that leave Dask's own threads and sockets behind
    pytest.mark.filterwarnings("ignore::ResourceWarning"),
    pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning"),
    pytest.mark.filterwarnings("ignore:.*:DeprecationWarning:distributed"),
]
FAILING = {"adapter.words.vectors": ["nowhere.txt", None]}  # the first has no file


class Stores:
    """Gives the store of a kind of images and a kind of captions, made once."""

    def __init__(self, tmp_path_factory, train=12):
        self.factory, self.train, self.made = tmp_path_factory, train, {}

    def __call__(self, image="grid", text="words"):
        if (image, text) not in self.made:
            url = self.factory.mktemp("store") / "small.zarr"
            self.made[image, text] = make_store(url, train=self.train, val=4, test=4, image=image, text=text)
        return self.made[image, text]


def varied(vary=MARGIN, *, recipe="vsepp", settings=None, **options):
    """What `ablate` is asked for: small variants."""
    keys = {key for keys in vary for key in keys.split(",")}
    fixed = {key: value for key, value in (SMALL | (settings or {})).items() if key not in keys}
    return {"recipe": recipe, "vary": vary, "settings": fixed, **options}


def plan_of(*arguments, **options):
    """The plan of `varied`."""
    return make_plan(**varied(*arguments, **options))


def ablated(store, asked, out, **options):
    """The entries of an ablation on a CPU."""
    return ablate(store, out, device="cpu", **asked, **options).entries


def numbers(entries):
    """What must repeat: all but where the runs lie."""
    return [replace(entry, run="") for entry in entries]


def weights(run):
    """The best weights of a run."""
    return load_file(Path(run) / "model.safetensors")


def started(function, *arguments, **options):
    """Begin a function in a process of its own."""
    server = get_context("forkserver")
    server.set_forkserver_preload(["xret.heads.ablation.ablation", "xret.heads.tuning.tuning"])  # imported once
    process = server.Process(target=function, args=arguments, kwargs=options)
    process.start()
    return process


def killed_in_second_epoch(room, run, function, *arguments, **options):
    """Run a function in a process of its own, which kills itself where `room.train` is in the second epoch of a run."""
    process = started(_dying, room.__name__, str(run), function, *arguments, **options)
    process.join()
    assert process.exitcode == -signal.SIGKILL


class _Kill(Callback):
    def __init__(self, run):
        self.run = run

    def on_epoch(self, epoch, step, values):
        self.on_step = self.kill

    def kill(self, step, values):
        while not (self.run / "metrics.jsonl").exists():  # the first epoch's state is written beside the second
            time.sleep(0.01)
        os.kill(os.getpid(), signal.SIGKILL)


def _dying(room, last, function, *arguments, **options):
    room = importlib.import_module(room)
    train = room.train

    def watched(store, recipe, run, callbacks=(), **how):
        kill = [_Kill(run)] if str(run) == last else []
        return train(store, recipe, run, callbacks=[*callbacks, *kill], **how)

    room.train = watched
    function(*arguments, **options)
