"""The demo's own promises: it goes on where it was stopped, and at its full size its heads learn."""

import json
import shlex
from functools import partial
from pathlib import Path

import pytest
from click.testing import CliRunner

from xret.cli import main
from xret.cli.demo import SETTINGS
from xret.pipeline.data.scenes import generate as scenes


def run(out):
    return CliRunner().invoke(main, ["demo", "--out", str(out), "--json"])


@pytest.fixture
def small(monkeypatch):
    """Make the demo quick: few pictures, small heads."""
    monkeypatch.setattr(scenes, "generate_scenes", partial(scenes.generate_scenes, train=16, val=8, test=8))
    for recipe in SETTINGS:
        heads = [f"aggregator.{side}.head_dim=16" for side in ("image", "text") if recipe == "setdiv"]
        monkeypatch.setitem(SETTINGS, recipe, ["model.dim=16", "data.batch_size=8", "schedule.epochs=2", *heads])


def fail_at(monkeypatch, name, call):
    """Let a function fail the so-manieth time it is called."""
    module, _, attribute = name.rpartition(".")
    calls = []

    def failing(*arguments, **options):
        calls.append(name)
        if len(calls) == call:
            raise RuntimeError("stopped")
        return real(*arguments, **options)

    real = getattr(__import__(module, fromlist=[attribute]), attribute)
    monkeypatch.setattr(name, failing)


def test_a_stopped_demo_goes_on(small, one_thread, monkeypatch, tmp_path):
    stops = {
        "xret.pipeline.data.scenes.generate._write_scene": 5,
        "xret.pipeline.extraction.tasks._encode": 3,
        "xret.heads.training.trainer.recalls": 2,  # after the second epoch of the first head
        "xret.heads.evaluation.evaluation.evaluate": 2,
    }
    for name, call in stops.items():
        with monkeypatch.context() as patch:
            fail_at(patch, name, call)
            assert str(run(tmp_path / "stopped").exception) == "stopped", name
    results = []
    for name in ("stopped", "whole", "whole"):
        result = run(tmp_path / name)
        assert result.exit_code == 0, result.output
        recipes = json.loads(result.stdout)["recipes"]
        results.append({recipe: evaluated["results"] for recipe, evaluated in recipes.items()})
    assert results[0] == results[1] == results[2]


def test_the_commands_that_it_ends_with_run_as_printed(small, one_thread, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    printed = CliRunner().invoke(main, ["demo", "--out", "a demo"], catch_exceptions=False).stdout.splitlines()
    assert [line.split()[:1] for line in printed[2:4]] == [["vsepp"], ["setdiv"]]
    search, diagnostics, serve = (shlex.split(line, comments=True) for line in printed[-3:])
    assert search[:3] == ["xret", "search", "a demo/setdiv"]
    for command in (search, diagnostics):
        assert CliRunner().invoke(main, command[1:], catch_exceptions=False).exit_code == 0
    context = main.commands["serve"].make_context("serve", serve[2:])
    assert (context.params["run"], context.params["data_root"]) == ("a demo/setdiv", Path("a demo/scenes"))


@pytest.mark.parametrize("what", ["a file", "a folder of others", "below a file"])
def test_what_is_no_demo_is_refused(what, tmp_path):
    out = tmp_path / "out"
    if what == "a folder of others":
        out.mkdir()
        (out / "mine.txt").write_text("mine")
    else:
        out.write_text("mine")
    before = sorted(tmp_path.rglob("*"))
    result = run(out / "x" if what == "below a file" else out)
    assert result.exit_code == 1
    assert "choose another --out" in json.loads(result.stderr)["error"]
    assert sorted(tmp_path.rglob("*")) == before


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_both_recipes_reach_ten_times_chance(tmp_path):
    result = CliRunner().invoke(main, ["demo", "--out", str(tmp_path / "demo"), "--json"], catch_exceptions=False)
    out = json.loads(result.stdout)
    assert set(out) == {"seconds", "recipes"}
    assert set(out["recipes"]) == {"vsepp", "setdiv"}
    for evaluated in out["recipes"].values():
        table = evaluated["results"][0]
        assert table["images"] == 100
        assert table["image_to_text"]["R@1"] >= 10  # chance is 1 in 100
        assert table["text_to_image"]["R@1"] >= 10
