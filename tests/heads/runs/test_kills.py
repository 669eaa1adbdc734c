"""A run that was killed, or whose power failed, between any two operations on its files goes on as if it never had."""

import random
import shutil

import pytest
from killed import left_by_kills
from power_cut import recorded
from small_store import make_store
from small_trainings import assert_equal, numbers

from xret.heads.evaluation.evaluation import evaluate
from xret.heads.recipes.recipe import load_recipe
from xret.heads.runs.run import Run
from xret.heads.training.callbacks import Callback
from xret.heads.training.train import train
from xret.pipeline.errors import RunError

SMALL = {"model.dim": 8, "data.batch_size": 12, "adapter.words.word_dim": 8, "optimizer.lr": 0.01}
SMALL |= {"schedule.name": "step", "schedule.epochs": 2, "adapter.words.ends": False}  # its best epoch is not the first
EACH_STEP = {"runtime.checkpoint_steps": 1}
SOME = [8, pytest.param(250, marks=[pytest.mark.slow, pytest.mark.timeout(1800)])]


@pytest.fixture(scope="module")
def store(tmp_path_factory):
    return make_store(tmp_path_factory.mktemp("store") / "small.zarr", train=24)


def usable(run):
    """Return the best epoch of a run, which is evaluated, or None where there is none yet."""
    best = Run(run).info.best_epoch
    if best is None:
        with pytest.raises(RunError, match="has no finished epoch yet"):
            evaluate(run, split="val", device="cpu")
    else:
        evaluate(run, split="val", device="cpu")  # the weights are whole
    return best


def assert_same(run, whole):
    assert_equal(numbers(run), numbers(whole))
    assert Run(run).info == Run(whole).info


@pytest.mark.parametrize("settings", [{}, EACH_STEP])
def test_after_any_kill_a_run_can_be_read_and_resumed(store, tmp_path, settings):
    recipe, whole = load_recipe("vsepp", SMALL | settings), tmp_path / "whole"
    with left_by_kills(whole, tmp_path) as killed:
        train(store, recipe, whole, device="cpu", seed=1)
    assert len(killed) > 6
    epochs = set()
    for run in killed:
        epochs.add(usable(run))
        train(store, recipe, run, device="cpu", seed=1, resume=True)
        assert_same(run, whole)
        assert {path.name for path in run.iterdir()} == {path.name for path in whole.iterdir()}
    assert epochs >= {None, 1}


@pytest.mark.parametrize("count", SOME)
def test_after_any_power_failure_it_goes_on(store, tmp_path, count):
    recipe, first = load_recipe("vsepp", SMALL | EACH_STEP | {"schedule.epochs": 3}), tmp_path / "first"
    first.mkdir()
    with recorded(first) as log:
        train(store, recipe, first / "run", device="cpu", seed=1)
    epochs = set()
    for number in range(count):
        place = tmp_path / "cut"
        log.cut(place, random.Random(number), after=number * len(log) // (count - 1))
        run = place / "run"
        if run.exists():
            epochs.add(usable(run))
        train(store, recipe, run, device="cpu", seed=1, resume=run.exists())
        assert_same(run, first / "run")
        shutil.rmtree(place)
    assert len(epochs) > 2
    log.all_synced(tmp_path / "end")
    assert_same(tmp_path / "end" / "run", first / "run")


def test_a_run_is_trained_by_one_at_a_time(store, tmp_path):
    recipe = load_recipe("vsepp", SMALL)

    class Again(Callback):
        def on_epoch(self, epoch, step, values):
            with pytest.raises(RunError, match=r"another process is training in .*run; wait until it has ended"):
                train(store, recipe, tmp_path / "run", device="cpu", resume=True)

    train(store, recipe, tmp_path / "run", device="cpu", callbacks=[Again()])
