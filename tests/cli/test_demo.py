"""The demo's own promises: it goes on where it was stopped, and at its full size sets are worth it."""

import json
import shlex
from functools import partial
from pathlib import Path

import pytest
from click.testing import CliRunner
from killed import failing_at

import xret
from xret.cli import main
from xret.cli.demo import QUERY, ROWS
from xret.demo import generate as scenes


def run(out):
    return CliRunner().invoke(main, ["demo", "--out", str(out), "--json"])


@pytest.fixture
def small(monkeypatch):
    """Make the demo quick: few pictures, small heads."""
    monkeypatch.setattr(scenes, "generate_scenes", partial(scenes.generate_scenes, train=16, val=8, test=8))
    for name, (recipe, settings) in ROWS.items():
        heads = {key: 16 for key in settings if key.endswith("dim")}
        monkeypatch.setitem(ROWS, name, (recipe, {**settings, **heads, "data.batch_size": 8, "schedule.epochs": 2}))


def test_a_stopped_demo_goes_on(small, tmp_path):
    stops = {
        "xret.demo.generate._write_scene": 5,
        "xret.pipeline.extraction.filler.Filler.fill": 3,
        "xret.heads.training.trainer.recalls": 2,  # after the second epoch of the first head
        "xret.heads.evaluation.evaluation.evaluate": 2,
    }
    for name, call in stops.items():
        with failing_at(name, call):
            assert str(run(tmp_path / "stopped").exception) == "stopped", name
    results = []
    for name in ("stopped", "whole", "whole"):
        result = run(tmp_path / name)
        assert result.exit_code == 0, result.output
        recipes = json.loads(result.stdout)["recipes"]
        results.append({recipe: evaluated["results"] for recipe, evaluated in recipes.items()})
    assert results[0] == results[1] == results[2]


def test_the_commands_that_it_ends_with_run_as_printed(small, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    printed = CliRunner().invoke(main, ["demo", "--out", "a demo"], catch_exceptions=False).stdout.splitlines()
    assert [line.split()[:1] for line in printed[2:6]] == [[name] for name in ROWS]
    search, diagnostics, serve = (shlex.split(line, comments=True) for line in printed[-3:])
    assert search[:3] == ["xret", "search", "a demo/setdiv-k4"]
    assert search[3] == QUERY
    for command in (search, diagnostics):
        assert CliRunner().invoke(main, command[1:], catch_exceptions=False).exit_code == 0
    context = main.commands["serve"].make_context("serve", serve[2:])
    assert (context.params["run"], context.params["data_root"]) == ("a demo/setdiv-k4", Path("a demo/scenes"))


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
def test_four_elements_are_worth_it(tmp_path):
    result = CliRunner().invoke(main, ["demo", "--out", str(tmp_path / "demo"), "--json"], catch_exceptions=False)
    out = json.loads(result.stdout)
    assert set(out) == {"seconds", "report", "recipes"}
    assert "slot 4" in Path(out["report"]).read_text()
    tables = {name: evaluated["results"][0] for name, evaluated in out["recipes"].items()}
    assert {table["images"] for table in tables.values()} == {100}
    found = [
        xret.load(tmp_path / "demo" / "setdiv-k4", split=split).search(QUERY, k=1)[0] for split in ("test", "train")
    ]
    images = json.loads((tmp_path / "demo" / "scenes" / "dataset_scenes.json").read_text())["images"]
    (first,) = [image for image in images if image["filename"] == found[0].file_name]
    assert QUERY in [sentence["raw"] for sentence in first["sentences"]]
    assert found[0].score > found[1].score
    others = [tables.pop(name)["rsum"] for name in ("vsepp", "vse-infty", "setdiv-k1")]
    best, by_caption = (tables.pop(name)["rsum"] for name in ("setdiv-k4", "k4, caption"))
    assert not tables
    assert best >= max(others) + 30
    assert by_caption >= best + 20  # a caption names one object of four
