"""A run that was killed between any two operations on its files goes on as if it never had been."""

import json

import pytest
from killed import left_by_kills
from small_store import make_store

from xret.heads.evaluation.evaluation import evaluate
from xret.heads.recipes.recipe import load_recipe
from xret.heads.runs.run import Run
from xret.heads.training.train import train
from xret.pipeline.errors import RunError

pytestmark = pytest.mark.usefixtures("one_thread")

SMALL = {"model.dim": 8, "data.batch_size": 12, "adapter.words.word_dim": 8, "optimizer.lr": 0.01}
SMALL |= {"schedule.name": "step", "schedule.epochs": 2}


@pytest.fixture(scope="module")
def store(tmp_path_factory):
    return make_store(tmp_path_factory.mktemp("store") / "small.zarr", train=24)


def outcome(run):
    """All that must repeat, byte by byte, but for times."""
    lines = [json.dumps({**line, "seconds": 0}) for line in Run(run).metrics()]
    return lines, Run(run).info, (run / "model.safetensors").read_bytes()


@pytest.mark.parametrize("settings", [{}, {"runtime.checkpoint_steps": 1}])
def test_after_any_kill_a_run_can_be_read_and_resumed(store, tmp_path, settings):
    recipe, whole = load_recipe("vsepp", SMALL | settings), tmp_path / "whole"
    with left_by_kills(whole, tmp_path) as killed:
        train(store, recipe, whole, device="cpu", seed=1)
    assert len(killed) > 6
    epochs = set()
    for run in killed:
        epochs.add(Run(run).info.best_epoch)
        if Run(run).info.best_epoch is None:
            with pytest.raises(RunError, match="has no finished epoch yet"):
                evaluate(run, split="val", device="cpu")
        else:
            evaluate(run, split="val", device="cpu")
        train(store, recipe, run, device="cpu", seed=1, resume=True)
        assert outcome(run) == outcome(whole)
        assert {path.name for path in run.iterdir()} == {path.name for path in whole.iterdir()}
    assert epochs >= {None, 1}


def test_a_run_is_trained_by_one_at_a_time(store, tmp_path):
    recipe = load_recipe("vsepp", SMALL)

    def again(*_):
        with pytest.raises(RunError, match=r"another process is training in .*run; wait until it has ended"):
            train(store, recipe, tmp_path / "run", device="cpu", resume=True)

    train(store, recipe, tmp_path / "run", device="cpu", after_epoch=again)
