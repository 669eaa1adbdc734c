"""``xret ablate`` and ``xret tune``: what they print and write, their exit codes, and what is said of mistakes."""

import csv
import importlib.util
import json
import re
import sys

import pytest
from command_line import refused, run

VALUES = {"model.dim": 8, "adapter.words.word_dim": 4, "schedule.epochs": 1}
SMALL = [f"--set={key}={value}" for key, value in VALUES.items()]
VARY = ["--recipe", "vsepp", "--vary", "loss.triplet.margin=0.1,0.2", *SMALL]
TUNE = ["--recipe", "vsepp", "--trials", "3", "--device", "cpu", *SMALL[:2], "--set=schedule.epochs=2"]


def test_a_table_its_files_and_its_json(store, tmp_path):
    files = {ending: tmp_path / "not there yet" / f"table.{ending}" for ending in ("csv", "tex", "svg")}
    out = [store, "--out", tmp_path / "out", *VARY, "--seeds", "2", "--device", "cpu"]
    table = run("ablate", *out, *(f"--save={file}" for file in files.values())).stdout
    entries = json.loads(run("ablate", *out, "--json").stdout)
    assert [(entry["values"], entry["seed"], entry["error"]) for entry in entries] == [
        ({"loss.triplet.margin": margin}, seed, None) for margin in (0.1, 0.2) for seed in (0, 1)
    ]
    first, second = csv.DictReader(files["csv"].read_text().splitlines())
    for row, pair in ((first, entries[:2]), (second, entries[2:])):
        mean = sum(entry["rsum"] for entry in pair) / 2
        assert float(row["rsum mean"]) == pytest.approx(mean)
        assert f"{mean:.2f} ± " in table
        assert f"{mean:.2f} $\\pm$ " in files["tex"].read_text()
    assert "<svg" in files["svg"].read_text()


def test_one_recipe_is_taken_and_baselines_stand_beside_it(store, tmp_path):
    out = ["--out", tmp_path / "out", "--device", "cpu"]
    for words in (["ablate", store, *VARY], ["train-head", store, *SMALL, "--recipe", "vsepp"]):
        said = refused(*words, "--recipe", "linear", *out, code=2)
        assert "give one, not vsepp and linear; `xret ablate --baseline` takes others" in said
    plot = tmp_path / "t.svg"
    printed = run("ablate", store, *VARY, "--baseline", "linear", *out, "--save", plot, "-q")
    table = printed.stdout
    assert printed.stderr == ""
    assert [line.split()[0] for line in table.splitlines()[-3:]] == [
        "linear", "loss.triplet.margin=0.1", "loss.triplet.margin=0.2"
    ]  # fmt: skip
    assert "protocol full: linear" in plot.read_text()  # as a comment beside the letters


def test_a_failed_cell_is_told_and_the_exit_code_is_1(store, tmp_path):
    vary = ["--recipe", "vsepp", "--vary", "adapter.words.vectors=nowhere.txt,null", *SMALL]
    said = run("ablate", store, "--out", tmp_path / "out", *vary, "--device", "cpu", code=1).stdout
    assert "\nfailed: adapter.words.vectors=nowhere.txt, seed 0: " in said
    assert said.splitlines()[3].startswith("adapter.words.vectors=null ")


def test_a_grid_and_the_list_of_grids(store, tmp_path):
    listed = run("ablate", "--grid", "list").stdout
    assert all(f"{name} " in listed for name in json.loads(run("ablate", "--grid", "list", "--json").stdout))
    assert re.search(r"^setdiv-table4 +19 cells  Kim et al\..*, Table 4$", listed, re.MULTILINE)
    words = ["--grid", "gaussian-table6", "--out", tmp_path / "out", *SMALL, "--device", "cpu", "--json"]
    entries = json.loads(run("ablate", store, *words).stdout)
    assert [entry["label"] for entry in entries] == ["spherical", "ellipsoidal"]
    assert [entry["paper"] for entry in entries] == [{"rsum": 438.3}, {"rsum": 454.3}]
    assert {entry["split"] for entry in entries} == {"val"}


def test_mistakes(store, tmp_path):
    out = ["--out", tmp_path / "out"]
    assert "'two' is neither a number" in refused("ablate", store, *out, *VARY, "--jobs", "two", code=2)
    assert "Missing argument 'STORE'" in refused("ablate", *out, *VARY, code=2)
    assert "must have the form KEY=V1,V2" in refused("ablate", store, *out, *VARY, "--vary", "optimizer.lr", code=2)
    brackets = ["--vary", "data.text=words,bert,[words,bert"]
    assert "has half of a pair of brackets" in refused("ablate", store, *out, *VARY, *brackets, code=2)
    assert "must end in .csv" in refused("ablate", store, *out, *VARY, "--save", tmp_path / "t.gif")
    assert not (tmp_path / "out").exists()


def test_a_tuning_its_files_and_its_json(store, tmp_path):
    out = tmp_path / "not there yet" / "out"
    words = ["tune", store, *TUNE, "--space", "data.batch_size=4,8", "--out", out]
    result = run(*words)
    lines = result.stdout.splitlines()
    assert lines[0].startswith("vsepp: 3 trials, ")
    assert [line.split()[0] for line in lines[6:12]][-2:] == ["loss.triplet.margin", "data.batch_size"]
    assert "split test, protocol full: 4 images, 10 captions (2.50 an image), 0 skipped" in result.stdout
    assert "space of vsepp:" in result.stderr
    assert "trial 0: 1 of 3: done, validation RSUM " in result.stderr
    found = json.loads(run(*words, "--json", "-q").stdout)
    assert found == json.loads((out / "result.json").read_text())
    assert found["best"]["rsum"] == max(trial["rsum"] for trial in found["trials"] if trial["status"] == "done")
    evaluated = json.loads(run("eval", out / "best", "--device", "cpu", "--json").stdout)
    assert found["results"] == evaluated["results"]


def test_mistakes_of_a_tuning(store, tmp_path, monkeypatch):
    out = ["--out", tmp_path / "out"]
    assert "Missing option '--recipe'" in refused("tune", store, *out, code=2)
    assert "must have the form KEY=LOW:HIGH" in refused("tune", store, *out, *TUNE, "--space", "model.dim", code=2)
    assert "did you mean 'optimizer.lr'?" in refused("tune", store, *out, *TUNE, "--space", "optimizer.lrr=1:2")
    find = importlib.util.find_spec
    monkeypatch.setattr("xret.pipeline.errors.find_spec", lambda name: None if name == "optuna" else find(name))
    for name in [name for name in sys.modules if name.startswith("xret.heads.tuning")]:
        monkeypatch.delitem(sys.modules, name)
    assert "pip install 'xret[tune]'" in refused("tune", store, *out, *TUNE)
    assert not (tmp_path / "out").exists()
