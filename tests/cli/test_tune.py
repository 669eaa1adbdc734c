"""``xret tune``: what it prints and writes, its exit codes, and the sentence each mistake gets."""

import csv
import importlib.util
import json

import pytest
from command_line import refused, run
from small_store import make_store

pytestmark = pytest.mark.usefixtures("one_thread")

SMALL = [f"--set={setting}" for setting in ("model.dim=8", "adapter.words.word_dim=4", "schedule.epochs=2")]
WORDS = ["--recipe", "vsepp", "--trials", "3", "--device", "cpu", *SMALL]


@pytest.fixture(scope="module")
def store(tmp_path_factory):
    return make_store(tmp_path_factory.mktemp("store") / "s.zarr", train=8, val=4, test=4)


def test_a_table_its_files_and_its_json(store, tmp_path):
    out = tmp_path / "not there yet" / "out"
    words = ["tune", store, *WORDS, "--space", "data.batch_size=4,8", "--out", out]
    result = run(*words, "--plot", "--ties", "mean")
    lines = result.stdout.splitlines()
    assert lines[0].startswith("vsepp: 3 trials, ")
    assert lines[1].split()[-2:] == ["loss.triplet.margin", "data.batch_size"]
    assert "split test, protocol full: 4 images, 10 captions (2.50 an image), 0 skipped, ties mean" in result.stdout
    assert "space of vsepp:" in result.stderr
    assert (out / "importance.png").is_file()
    (found,) = json.loads(run(*words, "--json", "--ties", "mean").stdout)
    rows = list(csv.DictReader((out / "trials.csv").read_text().splitlines()))
    assert [float(row["rsum"]) for row in rows] == [trial["rsum"] for trial in found["trials"]]
    assert found["best"]["rsum"] == max(trial["rsum"] for trial in found["trials"] if trial["status"] == "done")
    evaluated = json.loads(run("eval", out / "best", "--ties", "mean", "--device", "cpu", "--json").stdout)
    assert found["results"] == evaluated["results"]
    again = run(
        "train-head", store, "--recipe", out / "best.yaml", "--out", tmp_path / "r", "--device", "cpu", "--json"
    )
    assert json.loads(again.stdout)["best_rsum"] == found["best"]["rsum"]


def test_mistakes(store, tmp_path, monkeypatch):
    out = ["--out", tmp_path / "out"]
    assert "Missing option '--recipe'" in refused("tune", store, *out, code=2)
    both = ["--jobs", "2", "--scheduler", "tcp://127.0.0.1:9"]
    assert "--jobs is for this machine" in refused("tune", store, *out, *WORDS, *both, code=2)
    for several in (both[:2], both[2:]):
        said = refused("tune", store, *out, *WORDS, *several, "-v", code=2)
        assert said == "-v shows one training at a time; leave it out, and look into each run's train.log"
    assert "did you mean 'optimizer.lr'?" in refused("tune", store, *out, *WORDS, "--space", "optimizer.lrr=1:2")
    assert "there is no recipe 'vsep'" in refused("tune", store, *out, "--recipe", "vsep")
    (tmp_path / "file").touch()
    assert "is a file; choose another --out" in refused("tune", store, "--out", tmp_path / "file" / "x", *WORDS)
    find = importlib.util.find_spec
    for package, extra in (("optuna", "tune"), ("sklearn", "report")):
        monkeypatch.setattr(
            "xret.pipeline.versions.find_spec", lambda name, p=package: None if name == p else find(name)
        )
        assert f"pip install 'xret[{extra}]'" in refused("tune", store, *out, *WORDS, "--plot")
        monkeypatch.undo()
    assert not (tmp_path / "out").exists()


def test_help_has_an_example():
    assert "xret tune rsicd.zarr --recipe setdiv --trials 50" in run("tune", "--help").stdout
