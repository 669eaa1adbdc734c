"""The power fails at any moment of a training: what counts is whole, and it goes on."""

import json
import random
import shutil

import pytest
from power_cut import recorded
from small_store import make_store

from xret.heads.evaluation.evaluation import evaluate
from xret.heads.recipes.recipe import load_recipe
from xret.heads.runs.run import Run
from xret.heads.training.train import train

pytestmark = pytest.mark.usefixtures("one_thread")
SOME = [8, pytest.param(250, marks=[pytest.mark.slow, pytest.mark.timeout(1800)])]
SMALL = ["model.dim=8", "data.batch_size=12", "adapter.words.word_dim=8", "optimizer.lr=0.01", "schedule.name=step"]


@pytest.fixture(scope="module")
def store(tmp_path_factory):
    return make_store(tmp_path_factory.mktemp("store") / "small.zarr", train=24)


def train_in(folder, store, resume=False):
    recipe = load_recipe("vsepp", [*SMALL, "schedule.epochs=3", "runtime.checkpoint_steps=1"])
    train(store, recipe, folder / "run", device="cpu", seed=1, resume=resume)


def outcome(run):
    """All that must repeat, byte by byte, but for times."""
    lines = [json.dumps({**line, "seconds": 0}) for line in Run(run).metrics()]
    return lines, Run(run).info.best_epoch, (run / "model.safetensors").read_bytes()


@pytest.mark.parametrize("count", SOME)
def test_training(store, tmp_path, count):
    first = tmp_path / "first"
    first.mkdir()
    with recorded(first) as log:
        train_in(first, store)
    epochs = set()
    for number in range(count):
        place = tmp_path / "cut"
        log.cut(place, random.Random(number), after=number * len(log) // (count - 1))
        run = place / "run"
        if run.exists():
            epochs.add(Run(run).info.best_epoch)
            if Run(run).info.best_epoch is not None:
                evaluate(run, split="val", device="cpu")  # the weights are whole
        train_in(place, store, resume=run.exists())
        assert outcome(run) == outcome(first / "run")
        shutil.rmtree(place)
    assert len(epochs) > 2
    log.all_synced(tmp_path / "end")
    assert outcome(tmp_path / "end" / "run") == outcome(first / "run")
