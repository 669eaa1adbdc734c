"""xret as a library: the examples of `docs/how-to/own-loop.md` run, and what is public is all there."""

import importlib
import re
from importlib.resources import files
from pathlib import Path

import pytest
import torch
from small_store import make_store

import xret
from xret.heads.modules.aggregators import AGGREGATORS
from xret.heads.modules.losses import LOSSES
from xret.heads.modules.similarity import SIMILARITIES
from xret.pipeline import errors

DOCUMENT = Path(__file__).resolve().parents[1] / "docs" / "how-to" / "own-loop.md"


def test_the_examples_run_as_they_stand_one_after_the_other(tmp_path, monkeypatch, one_thread, capsys):
    make_store(tmp_path / "holiday.zarr", train=40, val=12, test=4, text="tokens")
    monkeypatch.chdir(tmp_path)
    namespace = {}
    with torch.random.fork_rng():
        for block in re.findall(
            r"^```python\n(.*?)^```$", DOCUMENT.read_text(encoding="utf-8"), re.DOTALL | re.MULTILINE
        ):
            exec(compile(block, DOCUMENT.name, "exec"), namespace)
    assert "'R@1'" in capsys.readouterr().out


@pytest.mark.parametrize(("module", "parts"), [("nn", AGGREGATORS), ("similarities", SIMILARITIES), ("losses", LOSSES)])
def test_every_part_that_a_recipe_can_name_is_public(module, parts):
    public = importlib.import_module(f"xret.{module}")
    for part in parts.values():
        assert getattr(public, part.__name__) is part
        assert part.__doc__
    assert getattr(xret, module) is public


def test_every_error_is_public_and_types_are_shipped():
    there = {name for name, kind in vars(errors).items() if isinstance(kind, type) and issubclass(kind, Exception)}
    assert there == set(xret.errors.__all__)
    assert files("xret").joinpath("py.typed").is_file()
