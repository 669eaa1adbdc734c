"""Compiled or not, a training comes to the same numbers."""

import pytest
import torch
from safetensors.torch import load_file
from small_store import make_store
from torch import nn

from xret.heads.recipes.recipe import load_recipe
from xret.heads.runs.run import Run
from xret.heads.training.training import train

SMALL = ["model.dim=16", "adapter.words.word_dim=8", "data.batch_size=6", "schedule.epochs=2", "optimizer.lr=0.001"]
PARTS = ["aggregator.image=gem", "loss.triplet.negatives=all", "data.unit=image"]  # that compile in moments


def recipe_of(*settings):
    return load_recipe("vsepp", [*SMALL, *PARTS, *settings])


@pytest.fixture
def store(tmp_path):
    return make_store(tmp_path / "small.zarr", train=16, val=4)


@pytest.mark.slow
@pytest.mark.filterwarnings("default")  # the compiler hides its own warnings where they are shown, not where they rise
def test_compiling_changes_nothing_beyond_rounding(store, tmp_path, monkeypatch, capsys):
    parts, compile_ = [], nn.Module.compile
    monkeypatch.setattr(nn.Module, "compile", lambda part, **how: parts.append(part) or compile_(part, **how))
    for name, settings in {"plain": [], "compiled": ["runtime.compile=true"]}.items():
        train(store, recipe_of(*settings), tmp_path / name, device="cpu")
        assert len(parts) == (3 if name == "compiled" else 0)
    assert "left out" not in capsys.readouterr().err
    plain, compiled = (Run(tmp_path / name).metrics() for name in ("plain", "compiled"))
    for one, other in zip(plain, compiled, strict=True):
        assert other["parts"] == pytest.approx(one["parts"], rel=1e-4)
    one, other = (load_file(tmp_path / name / "model.safetensors") for name in ("plain", "compiled"))
    for name, weights in one.items():
        torch.testing.assert_close(other[name], weights, rtol=1e-2, atol=1e-3, msg=name)


def test_without_a_compiler_it_trains_as_it_is(store, tmp_path, monkeypatch, capsys):
    def broken(*_, **__):
        raise RuntimeError("No working C++ compiler found\nand more")

    monkeypatch.setattr("torch.compile", broken)
    summary = train(store, recipe_of("runtime.compile=true"), tmp_path / "run", device="cpu")
    assert summary.trained == 2
    sentence = "runtime.compile is left out: there is no compiler for cpu that works (No working C++ compiler found)."
    assert sentence in capsys.readouterr().err.splitlines()
