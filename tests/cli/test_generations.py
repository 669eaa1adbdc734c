"""Stores that grow, on the command line: what is said of changes, and of generations."""

import json
from pathlib import Path

import pytest
from changing_data import Picture, pictures, use, write
from click.testing import CliRunner

from xret.cli import main


@pytest.fixture
def extract(tmp_path, monkeypatch):
    use(monkeypatch)

    def run(data, *options, code=0):
        write(tmp_path / "data", data)
        words = ["extract", str(tmp_path / "data/data.yaml"), "--store", str(tmp_path / "s.zarr")]
        result = CliRunner().invoke(main, [*words, "--text", "words", "--shard-images", "4", *options])
        assert result.exit_code == code, result.output
        return result

    run(pictures())
    return run


def cache(*words, code=0, answer=None):
    result = CliRunner().invoke(main, ["cache", *map(str, words)], input=answer)
    assert result.exit_code == code, result.output
    return result


DATA = [*pictures(), Picture("new.png", 50, "val", ("a new one",))]


def test_an_update(extract, tmp_path):
    refusal = extract(DATA, code=1).stderr.strip().splitlines()[-1]
    assert refusal.endswith(
        " (pictures: 1 new, captions: 1 new; the pictures themselves were not compared); go on with --update, which"
        " computes only what is new, or choose another store"
    )
    assert "small@" in (said := extract(DATA, "--update").stdout)
    assert ": 1 encoded, 20 found again in " in said
    found = json.loads(extract(DATA, "--update", "--json").stdout)
    assert [(one["samples"], one["found"]) for one in found["sets"]] == [(0, 0), (0, 0)]
    inner = str(tmp_path / "s.zarr" / "generations" / "2")
    refusal = extract(DATA, "--update", "--store", inner, code=1).stderr
    assert "is one generation of" in refusal


def test_generations_are_listed_and_freed(extract, tmp_path):
    store = tmp_path / "s.zarr"
    assert "generation" not in cache("ls", store).stdout
    assert cache("rm", store, "--old").stdout == f"{store} has no old generation\n"
    extract(DATA, "--update")
    lines = cache("ls", store).stdout.splitlines()
    assert [line.split(",")[0] for line in lines[-2:]] == [
        "generation 1 (old): 20 images",
        "generation 2 (current): 21 images",
    ]
    (facts,) = json.loads(cache("ls", store, "--json").stdout)
    assert (facts["generation"], [one["state"] for one in facts["generations"]]) == (2, ["old", "current"])
    assert "generation 1 was not removed; agree" in cache("rm", store, "--old", code=1, answer="n\n").stderr
    freed = json.loads(cache("rm", store, "--old", "--yes", "--json").stdout)
    assert freed["generations"] == [1]
    assert not Path(store, "samples").exists()
    assert cache("verify", store).exit_code == 0
    assert "give either a feature set or --old" in cache("rm", store, code=2).stderr
    assert "no feature cache is there" in cache("rm", tmp_path / "none", "--old", code=1).stderr


def test_what_is_nowhere_else_is_named(extract, tmp_path):
    store = tmp_path / "s.zarr"
    extract(DATA, "--update", "--visual", "none")
    (lost,) = [f"images/{path.name}" for path in (store / "images").glob("*@*")]
    asked = cache("rm", store, "--old", code=1, answer="n\n").stderr
    assert f"Remove generation 1 (with {lost}, which the current one lacks) (" in asked
    extract(DATA)  # takes it over, and the words are others
    assert "which the current one lacks" not in cache("rm", store, "--old", code=1, answer="n\n").stderr
    extract(DATA[1:], "--update", "--visual", "none")
    freed = cache("rm", store, "--old", "--yes").stdout
    assert freed.startswith(f"generation 1, 2 (with {lost}, which the current one lacks): removed, ")


def test_which_generation_is_read_is_said(extract, tmp_path):
    store, run = tmp_path / "s.zarr", str(tmp_path / "run")

    def said(*words):
        result = CliRunner().invoke(main, [*words, "--device", "cpu"])
        assert result.exit_code == 0, result.output
        return result.stdout

    settings = [
        word for one in ("model.dim=4", "schedule.epochs=1", "loss.same_text=excluded") for word in ("--set", one)
    ]
    said("train-head", str(store), "--recipe", "vsepp", *settings, "--out", run)
    assert said("eval", run).startswith(f"{run} on {store}\n")
    extract(DATA, "--update")
    assert said("eval", run).startswith(f"{run} on {store}, generation 1\n")
    assert said("search", run, "thing").startswith(f"{run} on {store}, generation 1, split test: 4 images\n")
    found = json.loads(said("eval", run, "--json"))
    assert (found["store"], found["generation"]) == (str(store), 1)
    cache("rm", store, "--old", "--yes")
    now = f"{store}/generations/2"
    assert said("eval", run, "--store", now).startswith(f"{run} on {store}, generation 2\n")
