"""What a training shows: a bar, a line an epoch that stays, and the log in the run's folder."""

import json
import re

import pytest
from command_line import run
from small_store import make_store
from terminal import terminal

from xret.heads.recipes.recipe import load_recipe
from xret.heads.runs.run import Run
from xret.heads.training.display import LOG, Display, Shown
from xret.heads.training.objective import Objective
from xret.heads.training.training import train

pytestmark = pytest.mark.usefixtures("one_thread")

SMALL = ["data.unit=image", "model.dim=8", "adapter.words.word_dim=4", "data.batch_size=4", "schedule.epochs=2"]
SETTINGS = [word for setting in SMALL for word in ("--set", setting)]


@pytest.fixture(scope="module")
def store(tmp_path_factory):
    return make_store(tmp_path_factory.mktemp("store") / "s.zarr", train=12, val=4, test=4)


def epoch_lines(text):
    return [line for line in text.splitlines() if re.match(r"epoch \d+/\d+: loss", line)]


def expected(run_folder, epochs=2):
    """The lines that metrics.jsonl asks for."""
    best, lines = (0, -1.0), []
    for line in Run(run_folder).metrics():
        best = max(best, (line["epoch"], line["rsum"]), key=lambda one: one[1])
        said = "the best so far" if best[0] == line["epoch"] else f"best {best[1]:.1f} in epoch {best[0]}"
        start = f"epoch {line['epoch']}/{epochs}: loss {line['loss']:.4f}"
        lines.append(f"{start}, val RSUM {line['rsum']:.1f}, {said}, {line['seconds']:.1f} s")
    return lines


@pytest.mark.parametrize("columns", [200, 80, 44, 24])
def test_on_a_terminal_a_line_an_epoch_stays(store, tmp_path, monkeypatch, columns):
    with terminal(monkeypatch, columns) as screen:
        train(store, load_recipe("vsepp", SMALL), tmp_path / "run", device="cpu")
    wanted = expected(tmp_path / "run")
    assert [line for line in screen.kept if " val RSUM " in line] == wanted
    bars = [line for line in screen.lines if "%|" in line]
    assert bars
    assert all(len(line) <= columns for line in bars)
    assert any(line.startswith("epoch 2/2: ") for line in bars)


def test_an_epoch_of_three_digits_fits_the_terminal(tmp_path, capsys):
    line = {"epoch": 300, "loss": 162.6648, "parts": {"triplet": 1.0}, "lr": 0.001, "rsum": 154.0, "seconds": 123.4}
    with Display(Shown(), tmp_path, 300, "image", 10, 0) as display:
        display.epoch(line, 288, 159.0)
    kept = epoch_lines(capsys.readouterr().err)
    assert kept == ["epoch 300/300: loss 162.6648, val RSUM 154.0, best 159.0 in epoch 288, 123.4 s"]
    assert len(kept[0]) <= 80


def test_without_a_terminal_there_is_a_line_an_epoch(store, tmp_path):
    told = run("train-head", store, "--recipe", "vsepp", "--out", tmp_path / "run", *SETTINGS).stderr
    assert epoch_lines(told) == expected(tmp_path / "run")


def test_a_validation_that_is_too_small_is_told(store, tmp_path):
    words = ["train-head", store, "--recipe", "vsepp", *SETTINGS]
    small = "val: 4 images are too few to tell which epoch is best; chance has RSUM 434.7."
    assert run(*words, "--out", tmp_path / "run").stderr.splitlines().count(small) == 1
    large = make_store(tmp_path / "large.zarr", train=12, val=100, test=4)
    words[1] = large
    assert "too few" not in run(*words, "--set=schedule.epochs=1", "--out", tmp_path / "large").stderr


def test_a_batch_larger_than_the_training_split_is_told(store, tmp_path):
    words = ["train-head", store, "--recipe", "vsepp", *SETTINGS, "--set=data.unit=image", "--set=schedule.epochs=1"]
    single = "data.batch_size=1,000 takes all 12 images at once: an epoch is a single step."
    said = run(*words, "--set=data.batch_size=1000", "--out", tmp_path / "one").stderr.splitlines()
    assert said.count(single) == 1
    assert json.loads((tmp_path / "one" / "metrics.jsonl").read_text())["step"] == 1
    assert "a single step" not in run(*words, "--set=data.batch_size=12", "--out", tmp_path / "all").stderr


def test_verbose_tells_the_terms_and_quiet_nothing(store, tmp_path):
    words = ["train-head", store, "--recipe", "setdiv", *SETTINGS]
    words += ["--set=aggregator.image.head_dim=8", "--set=aggregator.text.head_dim=8"]
    told = run(*words, "--out", tmp_path / "v", "-v").stderr
    assert all(re.search(r"loss [\d.]+ \(triplet .*diversity [\d.]+\), lr ", line) for line in epoch_lines(told))
    assert len(epoch_lines(told)) == 2
    quiet = run(*words, "--out", tmp_path / "q", "-q")
    assert quiet.stderr == ""
    log = (tmp_path / "q" / LOG).read_text()
    assert re.search(r" the features of 12 images and \d+ captions \(small, train\) take [^\n]*: in the store's", log)
    assert "2 epochs in" in quiet.stdout
    assert len(Run(tmp_path / "q").metrics()) == 2


def test_the_log_is_appended_when_a_run_goes_on(store, tmp_path, monkeypatch):
    original, left = Objective.__call__, iter(range(4))

    def stopped(self, batch, now):
        if next(left, None) is None:
            raise KeyboardInterrupt
        return original(self, batch, now)

    recipe = load_recipe("vsepp", SMALL)
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(Objective, "__call__", stopped)
        train(store, recipe, tmp_path / "run", device="cpu")
    train(store, recipe, tmp_path / "run", device="cpu", resume=True, shown=Shown("quiet"))
    log = (tmp_path / "run" / LOG).read_text().splitlines()
    assert all(re.match(r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d ", line) for line in log)
    small = "val: 4 images are too few to tell which epoch is best; chance has RSUM 434.7."
    assert [line[20:] for line in log].count(small) == 2
    said = [line[20:] for line in log if not line.endswith(small) and " the features of " not in line]
    assert said[0].startswith(f"begins vsepp on {store} (")
    assert said[1].startswith("epoch 1/2: loss ")
    assert said[2] == "stopped by Ctrl-C"
    assert said[3].startswith("goes on after epoch 1, step 0, vsepp on ")
    assert said[4].startswith("epoch 2/2: loss ")
    best = Run(tmp_path / "run").info
    end = rf"ended well: 1 epoch in [\d.]+ s; best of 2: epoch {best.best_epoch}, validation RSUM {best.best_rsum:.1f}"
    assert re.fullmatch(end, said[5])
    assert len(said) == 6


def test_the_log_has_what_ended_a_training_early(store, tmp_path, capsys):
    recipe = load_recipe("vsepp", [*SMALL, "optimizer.lr=0", "schedule.epochs=9", "schedule.patience=2"])
    train(store, recipe, tmp_path / "run", device="cpu", shown=Shown("quiet"))
    sentence = "train: stopped after epoch 3 of 9, for none of the last 2 was better in validation RSUM."
    assert capsys.readouterr().err.splitlines() == [sentence]
    assert (tmp_path / "run" / LOG).read_text().splitlines()[-2].endswith(f" {sentence}")
    train(store, recipe, tmp_path / "run", device="cpu", resume=True)
    assert capsys.readouterr().err.splitlines()[-1:] == [sentence]  # no bar of what is over


def test_a_log_that_cannot_be_written_stops_no_training(store, tmp_path, monkeypatch):
    monkeypatch.setattr("xret.heads.training.display.LOG", "no/such/folder")
    assert train(store, load_recipe("vsepp", SMALL), tmp_path / "run", device="cpu").trained == 2
