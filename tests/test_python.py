"""What the command line does, Python does with the same names and defaults, from `xret.extract` to `xret.load`."""

import doctest
import importlib
import inspect
import pydoc
import re
from importlib.resources import files
from pathlib import Path

import click
import numpy as np
import pytest
import torch
from small_store import make_store

import xret
from xret.cli import main
from xret.heads.diagnostics import diagnose
from xret.heads.modules.aggregators import AGGREGATORS
from xret.heads.modules.losses import LOSSES
from xret.heads.modules.similarity import SIMILARITIES
from xret.heads.runs.run import Run
from xret.heads.tuning.tuning import tune
from xret.pipeline import errors
from xret.pipeline.encoders.spec import EncoderSpec
from xret.pipeline.errors import CacheError, RecipeError, RunError
from xret.pipeline.extraction.options import Options, build_options
from xret.pipeline.store import FeatureCache

COMMANDS = {
    "extract": xret.extract, "train-head": xret.train, "finetune": xret.finetune, "eval": xret.evaluate,
    "ablate": xret.ablate, "tune": xret.tune, "search": xret.load,
}  # fmt: skip
BEHIND = {  # what each hands its arguments to
    xret.extract: (EncoderSpec, Options, build_options), xret.tune: (tune,),
}  # fmt: skip
PRINTED = {"diagnostics", "compare", "embeddings", "planned"}  # of the terminal alone, or functions of their own


@pytest.mark.parametrize("command", COMMANDS)
def test_options_and_arguments_have_the_same_names_and_defaults(command):
    arguments = dict(inspect.signature(COMMANDS[command]).parameters)
    arguments |= inspect.signature(
        {"eval": diagnose, "search": xret.load.search, "extract": xret.plan}.get(command, COMMANDS[command])
    ).parameters
    for option in main.commands[command].params:
        if not isinstance(option, click.Option) or option.name in PRINTED:
            continue
        default = arguments[option.name].default
        given = option.to_info_dict()["default"]
        if option.required:
            assert default is inspect.Parameter.empty
        elif option.multiple or option.name == "reattach":
            assert not default
        else:
            several = {"splits": str, "layers": int}.get(option.name)  # one text on the command line
            assert default == (tuple(map(several, given.split(","))) if several else given), option.name


@pytest.mark.parametrize("function", BEHIND)
def test_a_default_that_is_written_twice_is_the_same(function):
    outer, inner = inspect.signature(function).parameters, {}
    for called in BEHIND[function]:
        inner |= inspect.signature(called).parameters
    for name, parameter in outer.items():
        if name in inner and inner[name].default is not inspect.Parameter.empty:
            assert (parameter.default or None) == (inner[name].default or None), name


def test_help_lists_what_there_is():
    text = pydoc.render_doc(xret, renderer=pydoc.plaintext)
    for name in xret.__all__:
        assert re.search(rf"^    (class )?{name}\b", text, re.MULTILINE), name
        assert len(getattr(xret, name).__doc__) > 50
    assert xret.FeatureCache is FeatureCache
    assert set(xret.__all__) <= set(dir(xret))
    with pytest.raises(AttributeError, match="module 'xret' has no attribute 'exctract'"):
        _ = xret.exctract


@pytest.fixture
def store(tmp_path):
    return make_store(tmp_path / "s.zarr", train=8, val=4, test=4)


def test_settings_and_varied_values_are_those_of_the_command_line(store, tmp_path):
    settings = {"model.dim": 8, "adapter.words.word_dim": 4, "schedule.epochs": 1, "loss.same_text": "excluded"}
    blocks = {"model": {"dim": 8}, "adapter": {"words": {"word_dim": 4}}, "schedule": {"epochs": 1}}
    blocks["loss"] = {"same_text": "excluded"}
    for name, chosen in (("mapping", settings), ("blocks", blocks)):
        xret.train(store, recipe="vsepp", out=tmp_path / name, settings=chosen, device="cpu", seed=np.int64(3))
    one, other = ((tmp_path / name / "recipe.yaml").read_text() for name in ("mapping", "blocks"))
    assert one == other
    assert Run(tmp_path / "blocks").info.seed == 3
    vary = {"loss.triplet.margin": "0.1"}  # one of several may stand by itself
    ablation = xret.ablate(store, recipe="vsepp", vary=vary, settings=settings, out=tmp_path / "a", device="cpu")
    assert [entry.values for entry in ablation.entries] == [{"loss.triplet.margin": 0.1}]
    assert str(ablation).startswith("split test, protocol full")


def test_what_the_caller_draws_stays_what_it_was(store, tmp_path):
    before = torch.get_rng_state()
    settings = {"model.dim": 8, "adapter.words.word_dim": 4, "schedule.epochs": 1}
    xret.train(store, recipe="vsepp", out=tmp_path / "run", settings=settings, device="cpu")
    xret.evaluate(tmp_path / "run", device="cpu")
    xret.load(tmp_path / "run", device="cpu").model.eval()
    assert torch.equal(torch.get_rng_state(), before)


def test_what_the_command_line_refuses_is_refused_in_one_sentence(store, tmp_path):
    for seed in (-1, 2**63, 1.5):
        for make in (xret.train, xret.tune):
            with pytest.raises(RecipeError, match=r"seed must be a whole number from 0 to 2\*\*63 - 1, not "):
                make(store, recipe="vsepp", out=tmp_path / "run", seed=seed)
    with pytest.raises(RecipeError, match=r"model\.dimm is not a key \(did you mean 'model\.dim'"):
        xret.train(store, recipe="vsepp", out=tmp_path / "run", settings={"model.dimm": 8})
    with pytest.raises(RecipeError, match="jobs must be at least 1"):
        xret.ablate(store, recipe="linear", vary={"model.dim": [8]}, out=tmp_path / "run", jobs=0)
    with pytest.raises(RecipeError, match="give `recipe` with one `vary` or more, or `grid`"):
        xret.ablate(store, recipe="vsepp", out=tmp_path / "run")
    assert not (tmp_path / "run").exists()
    with pytest.raises(CacheError, match="there is no store"):
        xret.train([], recipe="vsepp", out=tmp_path / "run")
    with pytest.raises(RunError, match="there is no run to evaluate"):
        xret.evaluate([])
    with pytest.raises(RunError, match="ties is 'men', but must be one of pessimistic, optimistic, mean"):
        xret.evaluate(store, ties="men")


DOCUMENT = Path(__file__).resolve().parents[1] / "docs" / "how-to" / "own-loop.md"


def test_the_examples_run_as_they_stand_one_after_the_other(tmp_path, monkeypatch, capsys):
    make_store(tmp_path / "holiday.zarr", train=40, val=12, test=4, text="tokens")
    monkeypatch.chdir(tmp_path)
    namespace = {}
    with torch.random.fork_rng():
        for block in re.findall(r"^```python\n(.*?)^```$", DOCUMENT.read_text("utf-8"), re.DOTALL | re.MULTILINE):
            exec(compile(block, DOCUMENT.name, "exec"), namespace)
    assert "'R@1'" in capsys.readouterr().out


@pytest.mark.parametrize(("module", "parts"), [("nn", AGGREGATORS), ("similarities", SIMILARITIES), ("losses", LOSSES)])
def test_every_part_that_a_recipe_can_name_is_public(module, parts):
    public = importlib.import_module(f"xret.{module}")
    for part in parts.values():
        assert getattr(public, part.__name__) is part
        assert part.__doc__
    assert getattr(xret, module) is public


@pytest.mark.parametrize("module", ["nn", "similarities", "losses"])
def test_examples_in_docstrings_give_what_they_say(module):
    public, finder, runner = importlib.import_module(f"xret.{module}"), doctest.DocTestFinder(), doctest.DocTestRunner()
    found = [public, *(part for name, part in vars(public).items() if name[0] != "_")]
    examples = [
        one
        for part in found
        for one in finder.find(part, getattr(part, "__name__", ""), globs={**vars(public), "torch": torch})
    ]
    assert sum(runner.run(one).attempted for one in examples) > 1 and runner.failures == 0


def test_every_error_is_public_and_types_are_shipped():
    there = {name for name, kind in vars(errors).items() if isinstance(kind, type) and issubclass(kind, Exception)}
    assert there == {name for name in vars(xret.errors) if name[0] != "_"}
    assert files("xret").joinpath("py.typed").is_file()
