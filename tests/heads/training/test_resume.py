"""Stopped at any moment and resumed, a training ends with the bits of one that was never stopped."""

import shutil

import pytest
import torch
from edited_runs import edited
from small_store import make_store
from small_trainings import assert_equal, numbers, recipe_of, stopped_after

from xret.heads.evaluation.evaluation import evaluate
from xret.heads.runs.run import Run
from xret.heads.training.objective import Objective
from xret.heads.training.train import train
from xret.heads.training.trainer import Trainer
from xret.pipeline.errors import CacheError, RunError
from xret.pipeline.store import FeatureCache

EVERYTHING = [
    *("augment.image=0.2", "augment.text=0.2", "augment.image_varies=true", "augment.mask_words=0.3"),
    *("data.batch_size=8", "data.chunk=3", "data.captions=2", "adapter.words.ends=true"),
    *("adapter.grid.layers=mlp-on-linear", "adapter.grid.batch_norm=false"),
    *("aggregator.image.dropout=0.1", "aggregator.text.dropout=0.1"),
    *("optimizer.ema=0.9", "optimizer.image_adapter_lr=0.5", "optimizer.decay=all"),
    *("schedule.patience=2", "schedule.by=step"),
]


@pytest.mark.parametrize(("name", "settings"), [("setdiv", EVERYTHING), ("vsrn", [])])
def test_all_that_is_drawn_goes_on_within_an_epoch(store, tmp_path, name, settings):
    recipe, how = recipe_of(name, 2, *settings, "runtime.checkpoint_steps=1"), {"device": "cpu", "seed": 3}
    train(store, recipe, tmp_path / "whole", **how)
    for steps in (2, 7):
        with stopped_after(steps):
            train(store, recipe, tmp_path / "run", resume=True, **how)
    train(store, recipe, tmp_path / "run", resume=True, **how)
    assert_equal(numbers(tmp_path / "run"), numbers(tmp_path / "whole"))


class Stopped(BaseException):
    """Stands for a kill: nothing catches it."""


def stopping(function, after, error=Stopped):
    """Return a method that raises once it was called so often; its calls' last arguments are in `calls`."""

    def call(*arguments, **options):
        call.calls.append(arguments[-1])
        if len(call.calls) > call.after:
            raise error
        return function(*arguments, **options)

    call.calls, call.after = [], after
    return call


def test_it_goes_on_behind_the_step_that_was_written_down(store, tmp_path, monkeypatch):
    counted = stopping(Objective.__call__, 99)
    monkeypatch.setattr(Objective, "__call__", lambda *arguments: counted(*arguments))
    recipe = recipe_of("setdiv", 3, "data.batch_size=8", "runtime.checkpoint_steps=4")
    train(store, recipe, tmp_path / "whole", device="cpu")
    moments = counted.calls.copy()
    assert len(moments) == 18  # three epochs of six
    for stopped, begin in ((4, 0), (5, 4), (8, 6), (18, 16)):
        counted.after = stopped - 1
        counted.calls.clear()
        with pytest.raises(Stopped):
            train(store, recipe, tmp_path / str(stopped), device="cpu")
        counted.after = 99
        counted.calls.clear()
        other = recipe_of("setdiv", 3, "data.batch_size=8")
        assert train(store, other, tmp_path / str(stopped), device="cpu", resume=True).epochs == 3
        assert counted.calls == moments[begin:]
        assert_equal(numbers(tmp_path / str(stopped)), numbers(tmp_path / "whole"))


def test_a_run_that_streams_goes_on_streaming(store, tmp_path, monkeypatch):
    streamed = recipe_of("setdiv", 3, "runtime.cache=stream")
    train(store, streamed, tmp_path / "whole", device="cpu")
    monkeypatch.setattr(Run, "save", stopping(Run.save, 1))
    with pytest.raises(Stopped):
        train(store, streamed, tmp_path / "run", device="cpu")
    monkeypatch.undo()
    with pytest.raises(RunError, match=r"is in groups of runs of 64 neighbours there and as a whole now"):
        train(store, recipe_of("setdiv", 3, "runtime.cache=memory"), tmp_path / "run", device="cpu", resume=True)
    train(store, recipe_of(), tmp_path / "run", device="cpu", resume=True)  # auto
    assert_equal(numbers(tmp_path / "run"), numbers(tmp_path / "whole"))


def test_a_complete_run_is_left_alone(store, uninterrupted):
    before = numbers(uninterrupted)
    free = recipe_of("setdiv", 3, "runtime.checkpoint_steps=7", "runtime.cache=memory")
    for recipe in (recipe_of(), free):  # no number depends on these
        summary = train(store, recipe, uninterrupted, device="cpu", seed=3, resume=True)
        assert (summary.epochs, summary.trained) == (3, 0)
        assert summary.best_rsum == Run(uninterrupted).info.best_rsum
    assert_equal(numbers(uninterrupted), before)


def test_what_is_there_is_not_overwritten(store, uninterrupted, tmp_path):
    with pytest.raises(RunError, match="exists; take another `out`, or continue that run with `resume`"):
        train(store, recipe_of(), uninterrupted, device="cpu")
    (tmp_path / "folder").mkdir()
    with pytest.raises(RunError, match=r"is no run: it has no run\.json"):
        train(store, recipe_of(), tmp_path / "folder", device="cpu", resume=True)


def test_another_training_is_refused(store, uninterrupted, tmp_path):
    def refused(sentence, *settings, url=store, seed=3, run=uninterrupted):
        with pytest.raises(RunError, match=sentence):
            train(url, recipe_of("setdiv", 3, *settings), run, device="cpu", seed=seed, resume=True)

    refused("begun otherwise: seed is 3 there and 2 now$", seed=2)
    refused(r"begun otherwise: runtime\.precision is auto there and bfloat16 now$", "runtime.precision=bfloat16")
    refused(r"the order of samples \(by runtime\.cache\) is as a whole there and in groups", "runtime.cache=stream")
    other = make_store(tmp_path / "other.zarr", weights="b")
    refused(r"other\.zarr has no image features equal to 'grid@\w+'", url=other)
    refused("samples is ", url=make_store(tmp_path / "more.zarr", test=13))
    run = edited(shutil.copytree(uninterrupted, tmp_path / "run"), shuffled="in groups of shards of 8 images")
    refused(r"is in groups of shards of 8 images there", run=run)
    run = edited(run, shuffled="as a whole")
    checkpoint = torch.load(run / "checkpoint.pt", weights_only=True)
    checkpoint["state"]["scaler"] = {"scale": 65536.0}
    torch.save(checkpoint, run / "checkpoint.pt")
    refused(r"it was trained in float16; to go on, set runtime\.precision", run=run)


def test_a_store_that_was_repaired_meanwhile_is_refused(tmp_path):
    recipe, broken = recipe_of("vsepp", 1), make_store(tmp_path / "broken.zarr", train=24, broken=(3,))
    train(broken, recipe, tmp_path / "run", device="cpu")
    repaired = make_store(tmp_path / "repaired.zarr", train=24)
    with pytest.raises(RunError, match=r"begun otherwise: samples without features is 1 there and 0 now$"):
        train(repaired, recipe, tmp_path / "run", device="cpu", resume=True)


def test_features_of_other_pictures_are_refused(tmp_path, caplog):
    """They are found by the digests of files; a run that did not note them goes on."""
    how = {"device": "cpu", "resume": True}
    store, other = (make_store(tmp_path / f"{files}.zarr", train=24, files=files) for files in (1, 2))
    run, recipe = tmp_path / "run", recipe_of("vsepp", 1)
    train(store, recipe, run, device="cpu")
    assert train(store, recipe, run, **how).trained == 0
    evaluate(run, device="cpu")
    assert "other pictures" not in caplog.text
    changed = r"begun otherwise: pictures\.train is \w+ there and \w+ now; pictures\.val is"
    with pytest.raises(RunError, match=changed):
        train(other, recipe, run, **how)
    evaluate(run, store=other, device="cpu")
    assert f"trained with other pictures of train than {other} has" in caplog.text
    assert train(other, recipe, edited(shutil.copytree(run, tmp_path / "old"), pictures=None), **how).trained == 0
    with pytest.raises(RunError, match=changed):
        train(store, recipe, tmp_path / "old", **how)  # noted by now


def test_a_set_that_came_meanwhile_stops_no_run(tmp_path):
    store, recipe = make_store(tmp_path / "s.zarr", train=24), recipe_of("vsepp", 1)
    train(store, recipe, tmp_path / "run", device="cpu")
    for modality in ("images", "captions"):
        (name,) = FeatureCache.open(store).set_names(modality)
        shutil.copytree(f"{store}/{modality}/{name}", f"{store}/{modality}/other@00000000")
    with pytest.raises(CacheError, match="several feature sets"):
        train(store, recipe, tmp_path / "new", device="cpu")
    assert train(store, recipe, tmp_path / "run", device="cpu", resume=True).trained == 0
    with pytest.raises(RunError, match=r"begun otherwise: data\.image is auto there and other now"):
        train(store, recipe_of("vsepp", 1, "data.image=other"), tmp_path / "run", device="cpu", resume=True)


def test_a_failure_leaves_what_can_be_gone_on_from(store, tmp_path, monkeypatch):
    recipe = recipe_of("setdiv", 3, "runtime.checkpoint_steps=2")
    failing = stopping(Objective.__call__, 3, OSError("the disk is gone"))
    monkeypatch.setattr(Objective, "__call__", lambda *arguments: failing(*arguments))
    with pytest.raises(OSError, match="disk"):
        train(store, recipe, tmp_path / "run", device="cpu")
    monkeypatch.undo()
    assert train(store, recipe, tmp_path / "run", device="cpu", resume=True).epochs == 3
    # Ctrl-C in the first epoch, a failure of a resumed run, and one after an epoch
    for name, after, error in (("other", 0, KeyboardInterrupt), ("other", 0, KeyError), ("third", 1, KeyError)):
        monkeypatch.setattr(Trainer, "validate", stopping(Trainer.validate, after, error))
        with pytest.raises(error):
            train(store, recipe_of(), tmp_path / name, device="cpu", resume=(tmp_path / name).exists())
        monkeypatch.undo()
        assert len(Run(tmp_path / name).metrics()) == after
