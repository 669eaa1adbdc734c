"""A tuning: its best run, its stops and continuations, and what it refuses."""

import json
import shutil
from dataclasses import replace
from pathlib import Path

import optuna
import pytest
import torch
from optuna.storages import JournalStorage
from optuna.storages.journal import JournalFileBackend
from small_ablations import DASK, killed_in_second_epoch, started, weights
from small_store import make_store
from small_tunings import SETTINGS, TRIALS, heavy, numbers, tuned

from xret.heads.evaluation.evaluation import evaluate
from xret.heads.recipes.recipe import load_recipe
from xret.heads.runs.run import Run
from xret.heads.training.train import train
from xret.heads.tuning import tuning
from xret.pipeline.errors import CacheError, RecipeError, RunError

pytestmark = DASK


@pytest.fixture(scope="module")
def whole(stores, tmp_path_factory):
    """A tuning that nobody disturbed: its folder and what it found."""
    out = tmp_path_factory.mktemp("whole") / "out"
    return out, tuned(stores(), out)


def test_the_best_trial_by_validation_is_kept_alone(whole):
    out, found = whole
    assert [trial.number for trial in found.trials] == list(range(TRIALS))
    done = [trial for trial in found.trials if trial.status == "done"]
    assert found.best.rsum == max(trial.rsum for trial in done)
    assert {trial.epochs for trial in done} == {6}
    assert found.seconds == pytest.approx(sum(trial.seconds for trial in found.trials), abs=0.1)  # one after the other
    assert any(trial.status == "pruned" for trial in found.trials)
    assert all(trial.epochs < 6 for trial in found.trials if trial.status == "pruned")
    assert heavy(out) == ["best"]
    assert not list((out / "trials").iterdir())
    best = Run(out / "best")
    assert best.info.best_rsum == found.best.rsum
    assert best.recipe == load_recipe(str(out / "best.yaml"))
    assert best.recipe.optimizer.lr == found.best.values["optimizer.lr"]


def test_half_of_the_trials_are_pruned_at_each_rung(stores, tmp_path):
    """Successive halving after 1, 2 and 4 of 6 epochs, trial after trial, in plain words."""
    out = tmp_path / "out"
    found = tuned(stores(), out, seed=2)
    journal = JournalStorage(JournalFileBackend(str(out / "journal.log")))
    rungs: dict[int, list[float]] = {1: [], 2: [], 4: []}
    for trial in optuna.load_study(study_name="tuning", storage=journal).trials:
        ends = 6
        for epoch, there in rungs.items():
            there.append(trial.intermediate_values[epoch])
            if sum(other > there[-1] for other in there) >= max(1, len(there) // 2):
                ends = epoch
                break
        assert found.trials[trial.number].epochs == ends
    assert len({trial.epochs for trial in found.trials}) > 2


def test_values_are_drawn_from_the_space_and_the_first_trial_is_the_recipe(stores, whole):
    _, found = whole
    own = load_recipe("vsepp", [f"{key}={value}" for key, value in SETTINGS.items()])
    first = found.trials[0].values
    assert (first["optimizer.lr"], first["loss.triplet.margin"]) == (own.optimizer.lr, own.loss["triplet"]["margin"])
    assert len({trial.values["optimizer.lr"] for trial in found.trials}) == TRIALS
    for key, text in found.space.items():
        low, high = map(float, text.split(":")[:2])
        assert all(low <= trial.values[key] <= high for trial in found.trials)


def test_the_best_recipe_gives_the_best_run_again(stores, whole, tmp_path):
    out, found = whole
    summary = train(stores(), load_recipe(str(out / "best.yaml")), tmp_path / "again", device="cpu", seed=0)
    assert summary.best_rsum == found.best.rsum
    for name, value in weights(tmp_path / "again").items():
        assert torch.equal(weights(out / "best")[name], value)


def test_what_a_residual_begins_with_counts_as_its_runs_best(tmp_path):
    store = make_store(tmp_path / "s.zarr", text="tokens")
    settings = {"model.residual": "cca", "optimizer.lr": 100.0, "schedule.epochs": 1}
    found = tuned(store, tmp_path / "out", "linear", settings, trials=2)
    best = Run(tmp_path / "out" / "best").info
    assert (found.best.rsum, best.best_epoch) == (best.best_rsum, 0)
    assert found.best.rsum == evaluate(tmp_path / "out" / "best", split="val", device="cpu").results[0].rsum


def test_the_result_is_that_of_the_best_run_on_the_test_split(whole):
    out, found = whole
    assert found.evaluation.results == evaluate(out / "best", split="test", device="cpu").results
    result = json.loads((out / "result.json").read_text())
    assert result["best"]["number"] == found.best.number
    assert result["results"][0]["rsum"] == found.evaluation.results[0].rsum
    assert str(found).splitlines()[0].startswith(f"vsepp: {TRIALS} trials, ")
    table = str(found).partition("\n\n")[0].splitlines()[1:]
    assert [line.split()[0] for line in table[-2:]] == ["adapter.words.dropout", "loss.triplet.margin"]
    assert max(map(len, table)) <= 80
    assert table[0].split()[1] == str(found.best.number)
    trial = {line.split()[0]: line.split()[1] for line in table}
    assert float(trial["loss.triplet.margin"]) == pytest.approx(found.best.values["loss.triplet.margin"], rel=0.01)


def test_the_best_run_is_evaluated_with_hubness_corrected(stores, whole, tmp_path):
    out = shutil.copytree(whole[0], tmp_path / "out")
    found = tuned(stores(), out, hubness=True)
    expected = evaluate(out / "best", device="cpu", hubness=True)
    assert (found.evaluation.results, found.evaluation.hubness) == (expected.results, expected.hubness)
    told = json.loads((out / "result.json").read_text())
    assert told["hubness"]["results"][0]["rsum"] == expected.hubness.results[0].rsum
    assert "hubness" in str(found)


def test_trials_that_can_be_are_trained_together(stores, tmp_path, caplog):
    caplog.set_level("INFO", "xret")
    first, again = (tuned(stores(), tmp_path / name, "linear") for name in ("first", "again"))
    longest, summed = (count(trial.seconds for trial in first.trials) for count in (max, sum))
    assert longest <= first.seconds < 0.7 * summed
    assert "6 trainings at once" in caplog.text
    assert numbers(first.trials) == numbers(again.trials)
    assert {trial.status for trial in first.trials} == {"done", "pruned"}
    settings = SETTINGS | first.best.values
    alone = train(stores(), "linear", tmp_path / "alone", settings=settings, device="cpu", seed=0)
    assert alone.best_rsum == pytest.approx(first.best.rsum)
    for name, value in weights(tmp_path / "alone").items():
        torch.testing.assert_close(weights(tmp_path / "first" / "best")[name], value, rtol=1e-4, atol=1e-5)


def test_the_same_command_trains_nothing_again(stores, whole, monkeypatch):
    out, found = whole
    monkeypatch.setattr("xret.heads.tuning.tuning.train", None)
    assert tuned(stores(), out) == found
    assert tuned(stores(), out, trials=2) == found  # fewer take nothing away


def test_more_trials_add_and_equal_a_tuning_in_one_go(stores, whole, tmp_path, monkeypatch):
    monkeypatch.chdir(Path(stores()).parent)
    first = tuned("small.zarr", tmp_path / "out", trials=3)  # by a relative name
    assert len(first.trials) == 3
    monkeypatch.chdir(tmp_path)
    assert numbers(tuned(stores(), "out", settings={"runtime.cache": "memory"}).trials) == numbers(whole[1].trials)


def test_a_killed_trial_is_lost_and_counted(stores, tmp_path):
    out = tmp_path / "out"
    killed_in_second_epoch(tuning, out / "trials" / "0", tuned, stores(), out, trials=3)
    found = tuned(stores(), out, trials=3)
    assert [trial.number for trial in found.trials] == [0, 1, 2]
    (lost,) = [trial for trial in found.trials if trial.status == "failed"]
    assert lost.error == "its process was killed"
    assert heavy(out) == ["best"]


@pytest.mark.parametrize("trials", [1, 3])
def test_the_recipe_itself_is_tried_where_the_first_trial_was_killed(stores, tmp_path, trials):
    out = tmp_path / "out"
    killed_in_second_epoch(tuning, out / "trials" / "0", tuned, stores(), out, trials=trials)
    found = tuned(stores(), out, trials=trials)
    lost, again = found.trials[:2]
    assert (lost.status, again.status, again.values) == ("failed", "done", lost.values)
    assert len(found.trials) == max(2, trials)
    assert tuned(stores(), out, trials=trials) == found


def test_a_table_of_long_values_fits_a_terminal(whole):
    _, found = whole
    long = [dict.fromkeys(trial.values, "a-name-of-many-letters") for trial in found.trials]
    trials = tuple(replace(trial, values=values) for trial, values in zip(found.trials, long, strict=True))
    table = str(replace(found, trials=trials)).partition("\n\n")[0].splitlines()[1:]
    assert max(map(len, table)) <= 80


def test_two_commands_share_a_tuning(stores, tmp_path):
    out = tmp_path / "out"
    other = started(tuned, stores(), out, trials=5)
    found = tuned(stores(), out, trials=5)
    other.join()
    assert other.exitcode == 0
    assert [trial.number for trial in found.trials] == list(range(5))
    assert not [trial.error for trial in found.trials if trial.error]
    assert Run(out / "best").info.best_rsum == found.best.rsum
    assert heavy(out) == ["best"]


def test_what_is_set_holds_in_all_trials(stores, tmp_path):
    """Also of a term of the loss that has its weight from the trial, and of a part that the trial takes."""
    settings = {"loss.infonce.scale": 20, "loss.infonce.learned": False, "schedule.epochs": 1}
    settings |= {"aggregator.image.slots": 3, "aggregator.text.slots": 3}
    parts = ["pie-net", "element-slots"]
    space = {"loss.infonce.weight": "0.5:1"}
    space |= {"aggregator.image": parts, "aggregator.text": parts}
    found = tuned(stores(), tmp_path / "out", "setdiv", settings=settings, space=space, trials=4)
    assert {trial.values["aggregator.image.name"] for trial in found.trials} == set(parts)
    assert found.trials[0].values["loss.infonce.weight"] == 0.5  # nearest to that of a term that the recipe lacks
    recipe = load_recipe(str(tmp_path / "out" / "best.yaml"))
    assert (recipe.terms["infonce"]["scale"], recipe.terms["infonce"]["learned"]) == (20, False)
    assert recipe.terms["infonce"]["weight"] == found.best.values["loss.infonce.weight"]
    assert recipe == Run(tmp_path / "out" / "best").recipe
    assert [recipe.aggregator[side]["slots"] for side in ("image", "text")] == [3, 3]


def test_a_trial_whose_values_are_at_fault_counts_as_failed(stores, tmp_path):
    found = tuned(stores(), tmp_path / "out", space={"loss.triplet.weight": [1, 1e38]})
    failed = [trial for trial in found.trials if trial.status == "failed"]
    assert failed
    assert len(found.trials) == TRIALS
    assert all("not finite" in trial.error and trial.values["loss.triplet.weight"] == 1e38 for trial in failed)
    assert "failed: trial" in str(found)
    with pytest.raises(RunError, match=r"none of the trials in .* could be trained .* the first: .*not finite"):
        tuned(stores(), tmp_path / "none", trials=2, space={"loss.triplet.weight": "2e38:3e38"})


def test_what_is_not_a_trials_fault_ends_the_tuning(stores, tmp_path, monkeypatch):
    def full(*_, **__):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("xret.heads.tuning.tuning.train", full)
    with pytest.raises(OSError, match="No space left"):
        tuned(stores(), tmp_path / "out")
    monkeypatch.undo()
    found = tuned(stores(), tmp_path / "out", trials=3)
    assert [trial.status == "failed" for trial in found.trials] == [True, False, False]


def test_a_folder_belongs_to_one_tuning(stores, whole, tmp_path):
    out, found = whole
    for options, said in (
        ({"space": {"optimizer.lr": "1e-3:1"}}, "space.optimizer.lr is 0.0001:0.01:log there and 0.001:1 now"),
        ({"settings": {"schedule.epochs": 7}}, "recipe.schedule.epochs is 6 there and 7 now"),
        ({"recipe": "vse-infty"}, "name is vsepp there and vse-infty now"),
        ({"seed": 1}, "seed is 0 there and 1 now"),
    ):
        with pytest.raises(RunError, match=f"belongs to another tuning: .*{said}.*take another `out`"):
            tuned(stores(), out, **options)
    with pytest.raises(RunError, match="sets is"):
        tuned(make_store(tmp_path / "s.zarr", train=12, val=4, test=4, weights="b"), out)
    with pytest.raises(RunError, match=r"skipped\.train is 0 there and 1 now"):
        tuned(make_store(tmp_path / "broken.zarr", train=12, val=4, test=4, broken=(3,)), out)
    with pytest.raises(RunError, match=r"pictures\.train is \w+ there and \w+ now; pictures\.val is"):
        tuned(make_store(tmp_path / "files.zarr", train=12, val=4, test=4, files=1), out)
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "thesis.tex").touch()
    with pytest.raises(RunError, match="is not empty and holds no tuning"):
        tuned(stores(), tmp_path / "full")
    description = json.loads((out / "tuning.json").read_text())
    del description["pictures"]  # as of folders from before
    (out / "tuning.json").write_text(json.dumps(description))
    assert tuned(stores(), out) == found


def test_what_does_not_fit_is_refused_before_anything_is_made(stores, tmp_path):
    out = tmp_path / "out"
    with pytest.raises(RecipeError, match=r"recipe 'vsepp' has no key similarity\.alpha"):
        tuned(stores(), out, space={"similarity.alpha": "1:2"})
    with pytest.raises(RecipeError, match="would stay random"):  # a head cannot be built with one of the choices
        tuned(stores(), out, space={"adapter.words.train_vectors": [True, False]})
    with pytest.raises(CacheError, match="has no split 'test'"):
        tuned(make_store(tmp_path / "s.zarr", train=12, val=4, test=0), out)
    with pytest.raises(RecipeError, match="trials must be at least 1, not 0"):
        tuned(stores(), out, trials=0)
    assert not out.exists()


def test_a_file_system_without_locks_is_a_note(stores, tmp_path, lockless):
    assert len(tuned(stores(), tmp_path / "out", trials=1).trials) == 1
    assert len(lockless()) == 1
