"""Trainings of a moment, and all of a run that must repeat."""

from contextlib import contextmanager

import pytest
import torch
from safetensors.torch import load_file

from xret.heads.model import build_losses, build_model, feature_facts
from xret.heads.recipes.recipe import load_recipe
from xret.heads.runs.features import batches_of
from xret.heads.runs.run import Run
from xret.heads.training.objective import Objective

SMALL = ["model.dim=16", "data.batch_size=16", "adapter.words.word_dim=8", "optimizer.lr=0.01"]

HEADS = [f"aggregator.{side}.head_dim=16" for side in ("image", "text")]


def recipe_of(name="setdiv", epochs=3, *settings):
    heads = [*HEADS, "optimizer.aggregator_lr=0.5"] if name == "setdiv" else []
    return load_recipe(name, [*SMALL, *heads, f"schedule.epochs={epochs}", *settings])


def learner(cache, recipe, device="cpu"):
    """Return a recipe's head and its losses, as they are before the first step, and the training split as they read it.

    They are drawn after seed 0.
    """
    sets = cache.image_set(), cache.caption_set()
    facts = [feature_facts(one) for one in sets]
    torch.manual_seed(0)
    model, losses = build_model(recipe, *facts).to(device), build_losses(recipe, facts[1]).to(device)
    return model, losses, batches_of(sets, model, "train", torch.device(device))


@contextmanager
def stopped_after(steps):
    """Stop the training in the block, as Ctrl-C does, once it has computed so many losses."""
    calls, original = [], Objective.__call__

    def stopping(*arguments):
        calls.append(arguments)
        if len(calls) > steps:
            raise KeyboardInterrupt
        return original(*arguments)

    with pytest.MonkeyPatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(Objective, "__call__", stopping)
        yield


def state_of(run):
    """The state that a run goes on from."""
    return torch.load(run / "checkpoint.pt", weights_only=True)["state"]


def numbers(run):
    """All that must repeat: metrics without times, weights, state, best epoch."""
    lines = [{k: v for k, v in line.items() if k != "seconds"} for line in Run(run).metrics()]
    info = Run(run).info.best_epoch, Run(run).info.best_rsum
    return lines, info, load_file(run / "model.safetensors"), state_of(run)


def assert_equal(first, second, path=""):
    assert type(first) is type(second), path
    if isinstance(first, torch.Tensor):
        assert torch.equal(first, second), path
    elif isinstance(first, dict):
        assert first.keys() == second.keys(), path
        for key in first:
            assert_equal(first[key], second[key], f"{path}.{key}")
    elif isinstance(first, list | tuple):
        assert len(first) == len(second), path
        for index, pair in enumerate(zip(first, second, strict=True)):
            assert_equal(*pair, f"{path}[{index}]")
    else:
        assert first == second, path
