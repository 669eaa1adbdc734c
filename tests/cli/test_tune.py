"""``xret tune``: what it prints and writes, its exit codes, and the sentence each mistake gets."""

import importlib.util
import json
import sys

from command_line import refused, run

SMALL = [f"--set={setting}" for setting in ("model.dim=8", "adapter.words.word_dim=4", "schedule.epochs=2")]
WORDS = ["--recipe", "vsepp", "--trials", "3", "--device", "cpu", *SMALL]


def test_a_table_its_files_and_its_json(store, tmp_path):
    out = tmp_path / "not there yet" / "out"
    words = ["tune", store, *WORDS, "--space", "data.batch_size=4,8", "--out", out]
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


def test_mistakes(store, tmp_path, monkeypatch):
    out = ["--out", tmp_path / "out"]
    assert "Missing option '--recipe'" in refused("tune", store, *out, code=2)
    assert "must have the form KEY=LOW:HIGH" in refused("tune", store, *out, *WORDS, "--space", "model.dim", code=2)
    assert "did you mean 'optimizer.lr'?" in refused("tune", store, *out, *WORDS, "--space", "optimizer.lrr=1:2")
    find = importlib.util.find_spec
    monkeypatch.setattr("xret.pipeline.errors.find_spec", lambda name: None if name == "optuna" else find(name))
    for name in [name for name in sys.modules if name.startswith("xret.heads.tuning")]:
        monkeypatch.delitem(sys.modules, name)
    assert "pip install 'xret[tune]'" in refused("tune", store, *out, *WORDS)
    assert not (tmp_path / "out").exists()
