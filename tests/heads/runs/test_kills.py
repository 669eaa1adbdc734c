"""A run that was killed between any two operations on its files is that of one moment, and goes on from there."""

import json
import shutil

import pytest
import torch
from earlier_runs import without_digests
from killed import left_by_kills
from small_store import make_store

from xret.heads.evaluation.evaluation import evaluate
from xret.heads.recipes.recipe import load_recipe
from xret.heads.runs.run import Run
from xret.heads.training.training import train
from xret.pipeline.errors import RunError

pytestmark = pytest.mark.usefixtures("one_thread")

SMALL = ["model.dim=8", "data.batch_size=12", "adapter.words.word_dim=8", "optimizer.lr=0.01", "schedule.name=step"]


@pytest.fixture(scope="module")
def store(tmp_path_factory):
    return make_store(tmp_path_factory.mktemp("store") / "small.zarr", train=24)


def recipe_of(*settings):
    return load_recipe("vsepp", [*SMALL, *settings])


def outcome(run):
    """All that must repeat, byte by byte, but for times."""
    lines = [json.dumps({**line, "seconds": 0}) for line in Run(run).metrics()]
    return lines, Run(run).info.best_epoch, (run / "model.safetensors").read_bytes()


@pytest.mark.parametrize("settings", [[], ["runtime.checkpoint_steps=1"]])
def test_weights_and_their_epoch_belong_together_after_any_kill(store, tmp_path, settings):
    recipe, whole = recipe_of("schedule.epochs=2", *settings), tmp_path / "whole"
    with left_by_kills(whole, tmp_path) as killed:
        train(store, recipe, whole, device="cpu", seed=1)
    assert len(killed) > 12
    epochs = set()
    for run in killed:
        epochs.add(Run(run).info.best_epoch)
        if Run(run).info.best_epoch is None:
            with pytest.raises(RunError, match="has no finished epoch yet"):
                evaluate(run, split="val", device="cpu")
        else:
            assert evaluate(run, split="val", device="cpu").results[0].rsum == Run(run).info.best_rsum
            assert max(line["rsum"] for line in Run(run).metrics()) == Run(run).info.best_rsum
        train(store, recipe, run, device="cpu", seed=1, resume=True)
        assert outcome(run) == outcome(whole)
        assert {path.name for path in run.iterdir()} == {path.name for path in whole.iterdir()}
    assert epochs == {None, 1, 2}  # each epoch is better than the one before


def test_another_process_trained_on_meanwhile(store, tmp_path):
    train(store, recipe_of("schedule.epochs=1"), tmp_path / "run", device="cpu")
    opened = Run(tmp_path / "run")
    other = Run(tmp_path / "run")
    state = other.load_state()
    model = other.model(torch.device("cpu"))
    with torch.no_grad():
        for weight in model.parameters():
            weight.add_(1)
    other.save_epoch(state | {"epoch": 2}, {"epoch": 2}, 2, 600.0, model)
    with pytest.raises(RunError, match=r"run was trained on while it was read; run the command again"):
        opened.model(torch.device("cpu"))
    assert Run(tmp_path / "run").info.best_rsum == 600


def test_a_place_is_written_to_under_the_lock_with_what_the_other_process_left(store, tmp_path):
    train(store, recipe_of("schedule.epochs=1"), tmp_path / "run", device="cpu")
    early = Run(tmp_path / "run")
    Run(tmp_path / "run").save_metrics([{"epoch": 1, "later": True}])
    with early.held(created=False):
        early.record(store="elsewhere")
    assert Run(tmp_path / "run").metrics() == [{"epoch": 1, "later": True}]


def test_a_run_of_an_earlier_version_gets_digests_where_it_goes_on(store, tmp_path):

    train(store, recipe_of("schedule.epochs=2"), tmp_path / "whole", device="cpu")
    train(store, recipe_of("schedule.epochs=1"), tmp_path / "run", device="cpu")
    for name in ("config.json", "recipe.yaml"):
        shutil.copyfile(tmp_path / "whole" / name, tmp_path / "run" / name)
    run = without_digests(tmp_path / "run")
    train(store, recipe_of("schedule.epochs=2"), run, device="cpu", resume=True)
    assert outcome(run) == outcome(tmp_path / "whole")
    assert set(Run(run).info.files) - {"model.safetensors"} == {"state.pt", "metrics.jsonl"}
