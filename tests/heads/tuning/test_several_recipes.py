"""Several recipes tuned alike: equal numbers of trials, one table, and each by itself where one fails."""

import csv
import json
from functools import partial

import pytest
from click.testing import CliRunner
from small_tunings import SETTINGS, heavy, tuned

from xret.cli.tune import tune as tune_
from xret.heads.tuning.tuning import tune
from xret.pipeline.errors import RunError

pytestmark = pytest.mark.usefixtures("one_thread")


def test_several_recipes_have_the_same_number_of_trials_and_one_table(stores, tmp_path, capsys):
    out = tmp_path / "out"
    settings = [*SETTINGS[:-1], "schedule.epochs=2"]
    tuning = tune(stores(), ["vsepp", "vse-infty"], out, settings=settings, trials=2, device="cpu")
    assert [(one.recipe, len(one.trials)) for one in tuning.recipes] == [("vsepp", 2), ("vse-infty", 2)]
    assert heavy(out) == ["vse-infty/best", "vsepp/best"]
    table = str(tuning).split("\n\n")[-1].splitlines()
    assert [line.split()[:2] for line in table[1:]] == [["vsepp", "2"], ["vse-infty", "2"]]
    assert f"{tuning.recipes[1].evaluation.results[0].rsum:.2f}" in table[2]
    rows = csv.DictReader((out / "comparison.csv").read_text().splitlines())
    assert [(row["recipe"], row["pruned"], float(row["mean recall, full"])) for row in rows] == [
        (one.recipe, str(one.count("pruned")), one.evaluation.results[0].mean_recall) for one in tuning.recipes
    ]
    assert "space of vse-infty:\n  optimizer.lr" in capsys.readouterr().err
    (out / "comparison.csv").unlink()
    (out / "comparison.csv").mkdir()
    with pytest.raises(RunError, match=r"comparison\.csv cannot be replaced: .*; take another --out"):
        tune(stores(), ["vsepp", "vse-infty"], out, settings=settings, trials=2, device="cpu")
    with pytest.raises(RunError, match="is not empty and holds no tuning"):
        tuned(stores(), out)


def test_recipes_are_not_compared_by_other_numbers_of_trials(stores, tmp_path):
    out, settings = tmp_path / "out", [*SETTINGS[:-1], "schedule.epochs=1"]
    alike = partial(tune, stores(), ["vsepp", "vse-infty"], out, settings=settings, device="cpu")
    alike(trials=1)
    tuned(stores(), out / "vse-infty", "vse-infty", settings=settings, trials=3)
    compared = (out / "comparison.csv").read_text()
    with pytest.raises(RunError, match=r"vse-infty has 3 trials already, .* give --trials 3 or more"):
        alike(trials=2)
    assert (out / "comparison.csv").read_text() == compared
    assert [len(one.trials) for one in alike(trials=3).recipes] == [3, 3]


def test_a_recipe_that_cannot_be_trained_leaves_the_others(stores, tmp_path):
    settings = [*SETTINGS[:-1], "schedule.epochs=1", "loss.triplet.margin=3e38"]
    words = ["--recipe", "vsepp", "--recipe", "linear", "--trials", "1", "--out", str(tmp_path), "--device", "cpu"]
    done = CliRunner().invoke(tune_, [stores(), *words, *(f"--set={one}" for one in settings)])
    assert done.exit_code == 1
    said = f"failed: none of the trials in {tmp_path / 'vsepp'} could be trained to its end; the first: "
    assert done.stdout.splitlines()[-1].startswith(said)
    assert done.stdout.startswith("linear: 1 trial")
    trials, compared = (
        list(csv.DictReader((tmp_path / name).read_text().splitlines()))
        for name in ("vsepp/trials.csv", "comparison.csv")
    )
    assert [row["status"] for row in trials] == ["failed"]
    assert [row["recipe"] for row in compared] == ["linear"]
    again = CliRunner().invoke(tune_, [stores(), *words, *(f"--set={one}" for one in settings), "--json", "-q"])
    assert [one["recipe"] for one in json.loads(again.stdout)] == ["linear"]
    assert again.stderr.startswith(said)
