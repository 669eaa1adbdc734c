"""A tuning: its best run, its stops and continuations."""

import json
import re
import time
from functools import partial
from itertools import count
from types import SimpleNamespace

import pytest
import torch
from small_ablations import weights
from small_store import make_store
from small_tunings import SETTINGS, TRIALS, heavy, numbers, started, tuned

from xret.heads.evaluation.evaluation import evaluate
from xret.heads.recipes.recipe import load_recipe
from xret.heads.runs.files import run_inside
from xret.heads.runs.run import Run
from xret.heads.training.training import train
from xret.heads.tuning.study import Study
from xret.pipeline.errors import RunError

pytestmark = [
    pytest.mark.usefixtures("one_thread"),
    pytest.mark.filterwarnings("ignore::ResourceWarning"),  # of Dask's own threads and sockets
    pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning"),
    pytest.mark.filterwarnings("ignore:.*:DeprecationWarning:distributed"),
]


def test_the_best_trial_by_validation_is_kept_alone(whole):
    out, found = whole
    assert [trial.number for trial in found.trials] == list(range(TRIALS))
    done = [trial for trial in found.trials if trial.status == "done"]
    assert found.best.rsum == max(trial.rsum for trial in done)
    assert {trial.epochs for trial in done} == {6}
    assert all(trial.epochs < 6 for trial in found.trials if trial.status == "pruned")
    assert found.count("pruned") > 0
    assert heavy(out) == ["best"]
    assert not list((out / "trials").iterdir())
    best = Run(out / "best")
    assert best.info.best_rsum == found.best.rsum
    assert best.recipe == load_recipe(str(out / "best.yaml"))
    assert best.recipe.optimizer.lr == found.best.values["optimizer.lr"]
    assert f"\n# with --seed 0 on {best.info.store}/" in (out / "best.yaml").read_text()


def test_the_first_trial_is_the_recipe(whole):
    _, found = whole
    own = load_recipe("vsepp", SETTINGS)
    first = found.trials[0].values
    assert (first["optimizer.lr"], first["loss.triplet.margin"]) == (own.optimizer.lr, own.loss["triplet"]["margin"])
    assert len({trial.values["optimizer.lr"] for trial in found.trials}) == TRIALS


def test_the_best_recipe_gives_the_best_run_again(stores, whole, tmp_path):
    out, found = whole
    summary = train(stores(), load_recipe(str(out / "best.yaml")), tmp_path / "again", device="cpu", seed=0)
    assert summary.best_rsum == found.best.rsum
    for name, value in weights(tmp_path / "again").items():
        assert torch.equal(weights(out / "best")[name], value)


def test_the_result_is_that_of_the_best_run_on_the_test_split(whole):
    out, found = whole
    assert found.evaluation.results == evaluate(out / "best", split="test", ties="mean", device="cpu").results
    result = json.loads((out / "result.json").read_text())
    assert (result["trial"], result["results"][0]["rsum"]) == (found.best.number, found.evaluation.results[0].rsum)


def test_the_folder_of_a_tuning_is_no_run_and_the_best_one_is_named(whole):
    with pytest.raises(RunError, match=f"{whole[0]} is no run: .*; name the folder of a run, such as {whole[0]}/best"):
        evaluate(whole[0])


def test_a_run_that_is_hidden_or_being_removed_is_not_named(tmp_path):
    for name in (".seed-0.1.partial", "seed-0"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "run.json").touch()
    assert run_inside(tmp_path) == tmp_path / "seed-0"
    (tmp_path / "seed-0" / "run.json").unlink()
    assert run_inside(tmp_path) is run_inside(tmp_path / "none") is None


def test_the_test_split_is_looked_at_in_all_views_or_in_the_first(stores, tmp_path, monkeypatch):
    store, out = make_store(tmp_path / "views.zarr", views=3), tmp_path / "out"
    for views in (True, False):
        again = partial(tuned, store, out, settings=[*SETTINGS, "schedule.epochs=1"], trials=1, views=views)
        found = again()
        assert found.evaluation.to_dict() == evaluate(out / "best", views=views, device="cpu").to_dict()
        assert found.to_dict()["views"] == (3 if views else 1)
        with monkeypatch.context() as patched:
            patched.setattr("xret.heads.tuning.tuning.evaluate", None)  # what was found is kept
            assert again() == found
    with pytest.raises(RunError, match="has one view of each image"):
        tuned(stores(), tmp_path / "single", views=True)
    assert not (tmp_path / "single").exists()


def test_the_same_command_trains_and_evaluates_nothing_again(stores, whole, monkeypatch):
    out, found = whole
    monkeypatch.setattr("xret.heads.tuning.trials.train", None)
    monkeypatch.setattr("xret.heads.tuning.tuning.evaluate", None)
    assert tuned(stores(), out, ties="mean") == found
    assert tuned(stores(), out, ties="mean", trials=2) == found  # fewer take nothing away


def test_more_trials_add_and_equal_a_tuning_in_one_go(stores, whole, tmp_path):
    first = tuned(stores(), tmp_path / "out", trials=3)
    assert len(first.trials) == 3
    assert numbers(tuned(stores(), tmp_path / "out").trials) == numbers(whole[1].trials)


def test_a_tuning_that_was_interrupted_goes_on_within_the_trial(stores, whole, tmp_path, monkeypatch):
    out, seen = tmp_path / "out", []

    def interrupted(*args, after_epoch, **options):
        def noted(epoch, rsum):
            after_epoch(epoch, rsum)
            seen.append((args[2], epoch))
            if len(seen) == 9:  # within the second trial
                raise KeyboardInterrupt

        return train(*args, after_epoch=noted, **options)

    monkeypatch.setattr("xret.heads.tuning.trials.train", interrupted)
    with pytest.raises(KeyboardInterrupt):
        tuned(stores(), out)
    with (out / "journal.log").open("a") as journal:
        journal.write('{"op_code":8,"worker')  # what a killed process leaves
    monkeypatch.setattr("xret.heads.tuning.trials.train", train)
    found = tuned(stores(), out)
    assert numbers(found.trials) == numbers(whole[1].trials)
    assert len(set(seen)) == 9
    for name, value in weights(out / "best").items():
        assert torch.equal(weights(whole[0] / "best")[name], value)


def test_a_kill_between_a_trial_and_its_keeping_is_made_good(stores, whole, tmp_path, monkeypatch):
    out = tmp_path / "out"
    monkeypatch.setattr("xret.heads.tuning.study.Study._settle", lambda self: None)
    with pytest.raises(RunError, match="has lost its weights"):
        tuned(stores(), out)
    assert len(list((out / "trials").iterdir())) == TRIALS
    monkeypatch.undo()
    (out / "trials" / "99").mkdir()
    assert numbers(tuned(stores(), out).trials) == numbers(whole[1].trials)
    assert heavy(out) == ["best"]


def test_what_is_set_holds_in_all_trials(stores, tmp_path):
    """Also of a term of the loss that has its weight from the trial, and of a part that the trial takes."""
    beside = ["loss.infonce.scale=20", "loss.infonce.learned=false", "aggregator.image.slots=3"]
    settings = [*SETTINGS, *beside, "aggregator.text.slots=3", "schedule.epochs=1"]
    space = ["loss.infonce.weight=0.5:1", "loss.infonce.smoothing=0:0.2"]
    space += ["aggregator.image=pie-net,element-slots", "aggregator.text=pie-net,element-slots"]
    found = tuned(stores(), tmp_path / "out", "setdiv", settings=settings, space=space, trials=4)
    assert {trial.values["aggregator.image.name"] for trial in found.trials} == {"pie-net", "element-slots"}
    assert {"loss.infonce.weight", "loss.infonce.smoothing"} < found.space.keys()
    assert found.trials[0].values["loss.infonce.weight"] == 0.5  # nearest to that of a term that the recipe lacks
    recipe = load_recipe(str(tmp_path / "out" / "best.yaml"))
    assert (recipe.terms["infonce"]["scale"], recipe.terms["infonce"]["learned"]) == (20, False)
    assert recipe.terms["infonce"]["smoothing"] == found.best.values["loss.infonce.smoothing"]
    assert recipe == Run(tmp_path / "out" / "best").recipe
    assert [recipe.aggregator[side]["slots"] for side in ("image", "text")] == [3, 3]
    with pytest.raises(RunError, match=r"belongs to another tuning: settings is \["):
        tuned(stores(), tmp_path / "out", "setdiv", settings=[*settings, "loss.infonce.scale=9"], space=space)


def test_a_new_best_run_is_not_said_to_be_the_one_before(stores, tmp_path, monkeypatch):
    out = tmp_path / "out"
    first = tuned(stores(), out, trials=1).best
    record = Study._record

    def stopping(study, job, outcome):
        record(study, job, outcome)
        if study._best().number != first.number:
            raise KeyboardInterrupt

    monkeypatch.setattr(Study, "_record", stopping)
    with pytest.raises(KeyboardInterrupt):
        tuned(stores(), out)
    assert Run(out / "best").info.best_rsum > first.rsum
    assert not (out / "best.yaml").exists() and not (out / "result.json").exists()
    monkeypatch.undo()
    tuned(stores(), out)
    assert load_recipe(str(out / "best.yaml")).optimizer == Run(out / "best").recipe.optimizer


def test_trials_read_the_features_once(stores, tmp_path, monkeypatch):
    from xret.pipeline.cache.rows import Rows

    read, original = [], Rows._open
    monkeypatch.setattr(Rows, "_open", lambda self, shard: read.append((self._name, shard)) or original(self, shard))
    tuned(stores(), tmp_path / "out", trials=3)
    of_train = [one for one in read if "images" in one[0] and one[1] < 2]
    assert of_train
    assert sorted(of_train) == sorted(set(of_train))


def test_processes_share_a_study(stores, tmp_path, monkeypatch):
    monkeypatch.setattr("os.sched_getaffinity", lambda _: range(2))
    out = tmp_path / "out"
    found = tuned(stores(), out, jobs=2, trials=5)
    assert [trial.number for trial in found.trials] == list(range(5))
    assert heavy(out) == ["best"]
    train(stores(), load_recipe(str(out / "best.yaml")), tmp_path / "again", device="cpu", seed=0)
    for name, value in weights(tmp_path / "again").items():
        assert torch.equal(weights(out / "best")[name], value)


def test_a_cluster_trains_the_trials(stores, whole, tmp_path, capsys):
    from distributed import LocalCluster

    with LocalCluster(n_workers=1, threads_per_worker=1, processes=False, dashboard_address=":0") as cluster:
        found = tuned(stores(), tmp_path / "out", scheduler=cluster.scheduler_address)
    assert numbers(found.trials) == numbers(whole[1].trials)
    assert "Dask dashboard: http://" in capsys.readouterr().err


@pytest.mark.slow
def test_a_killed_command_goes_on(stores, whole, tmp_path):
    out = tmp_path / "out"
    child = started(stores(), out)
    while child.poll() is None and not list(out.glob("trials/3/state.pt")):
        time.sleep(0.01)
    child.kill()
    child.communicate()
    assert not (out / "result.json").exists()
    assert numbers(tuned(stores(), out).trials) == numbers(whole[1].trials)


@pytest.mark.slow
def test_a_trial_whose_process_dies_goes_on_in_another(stores, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr("os.sched_getaffinity", lambda _: range(2))
    monkeypatch.setattr("xret.heads.tuning.study.run_trial", DiesOnce(tmp_path / "died"))
    found = tuned(stores(), tmp_path / "out", jobs=2, trials=3)
    assert "its process ended with exit code -9" in capsys.readouterr().err
    assert [trial.status == "failed" for trial in found.trials] == [False] * 3
    monkeypatch.setattr("xret.heads.tuning.study.run_trial", DiesOnce(tmp_path / "never" / "died"))
    found = tuned(stores(), tmp_path / "out", jobs=2, trials=5)
    assert [trial.status for trial in found.trials][3:] == ["failed"] * 2
    assert "its process ended with exit code -9" in found.trials[3].error


class DiesOnce:
    """In the place of a trial: the first that is begun kills its process, every one where that cannot be noted."""

    def __init__(self, note):
        self.note = note

    def __call__(self, job, resident):
        import os
        import signal

        from xret.heads.tuning.trials import run_trial

        if not self.note.exists():
            if self.note.parent.exists():
                self.note.touch()
            os.kill(os.getpid(), signal.SIGKILL)
        return run_trial(job, resident)


def test_a_trial_whose_values_are_at_fault_counts_as_failed(stores, tmp_path):
    found = tuned(stores(), tmp_path / "out", space=["loss.triplet.weight=1,1e38"])
    failed = [trial for trial in found.trials if trial.status == "failed"]
    assert failed
    assert len(found.trials) == TRIALS
    assert all("not finite" in trial.error and trial.values["loss.triplet.weight"] == 1e38 for trial in failed)
    assert not any("begin another run" in trial.error for trial in failed)  # there is none to begin
    assert "failed: trial" in str(found)
    with pytest.raises(
        RunError, match=r"none of the trials in .* could be trained to its end; the first: .*not finite"
    ):
        tuned(stores(), tmp_path / "none", trials=2, space=["loss.triplet.weight=2e38,3e38"])


def test_what_is_not_a_trials_fault_stops_and_the_trial_goes_on_later(stores, whole, tmp_path, monkeypatch):
    out = tmp_path / "out"

    def full(*_, **__):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("xret.heads.tuning.trials.train", full)
    with pytest.raises(RunError, match=r"trial 0: .*No space left on device; mend it and run the same command again"):
        tuned(stores(), out)
    monkeypatch.setattr("xret.heads.tuning.trials.train", train)
    assert numbers(tuned(stores(), out).trials) == numbers(whole[1].trials)


def test_the_time_left_is_that_of_trials_like_those_before(stores, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr("xret.heads.tuning.study.time", SimpleNamespace(monotonic=partial(next, count(0, 60))))
    tuned(stores(), tmp_path / "out", settings=[*SETTINGS, "schedule.epochs=1"], trials=3)
    said = [line for line in capsys.readouterr().err.splitlines() if re.match(r"trial \d: \d of", line)]
    ends = ("60 s, about 2.0 minutes left: done", "120 s, about 1.0 minutes left: done", "180 s: done")
    assert [line.split(" after")[0] for line in said] == [
        f"trial {at}: {at + 1} of 3, {end}" for at, end in enumerate(ends)
    ]


def test_no_more_trials_than_asked_for_go_on(stores, tmp_path, monkeypatch):
    out = tmp_path / "out"

    def begun(self, *_, **__):
        self._ask(), self._ask()  # two at once
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr("xret.heads.tuning.study.Study._next", begun)
        with pytest.raises(KeyboardInterrupt):
            tuned(stores(), out)
    found = tuned(stores(), out, trials=1)
    assert [trial.number for trial in found.trials] == [0]
    assert [trial.number for trial in tuned(stores(), out, trials=3).trials] == [0, 1, 2]


def test_a_set_that_comes_later_changes_nothing(stores, whole, monkeypatch):
    """`auto` stands for the sets that the tuning was begun with."""
    from xret.pipeline.cache.feature_cache import FeatureCache

    asked, original = [], FeatureCache.image_set
    monkeypatch.setattr(FeatureCache, "image_set", lambda self, name: asked.append(name) or original(self, name))
    tuned(stores(), whole[0], ties="mean")
    assert set(asked) == {json.loads((whole[0] / "tuning.json").read_text())["image_set"]}
    assert "image: auto" in (whole[0] / "best.yaml").read_text()
