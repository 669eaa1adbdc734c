"""Stopped anywhere and resumed, a training changes nothing; where it fails, nothing half-written is left."""

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from small_disk import small_disk
from small_store import make_store
from small_trainings import HEADS, SMALL, assert_equal, numbers, recipe_of

from xret.heads.runs.run import Run
from xret.heads.training.train import train
from xret.pipeline.errors import RunError
from xret.pipeline.reading.batches import Batches

pytestmark = pytest.mark.usefixtures("one_thread")

DIVERGING = [f"optimizer.{key}=1e6" for key in ("lr", "adapter_lr", "aggregator_lr", "image_adapter_lr")]


class Stopped(BaseException):
    """Stands for a kill: nothing catches it."""


@pytest.mark.parametrize("writes", range(9))
def test_stopped_before_any_write_and_resumed_it_is_as_if_never_stopped(
    store, uninterrupted, tmp_path, monkeypatch, writes
):
    original, left = Path.replace, [writes]  # the first makes the folder

    def replace(partial, path):
        left[0] -= 1
        if left[0] < 0:
            path.with_name(f".{path.name}.0.partial").write_bytes(b"half")
            raise Stopped
        return original(partial, path)

    monkeypatch.setattr(Path, "replace", replace)
    with pytest.raises(Stopped):
        train(store, recipe_of(), tmp_path / "run", device="cpu", seed=3)
    monkeypatch.undo()
    train(store, recipe_of(), tmp_path / "run", device="cpu", seed=3, resume=True)
    assert_equal(numbers(tmp_path / "run"), numbers(uninterrupted))
    assert not list((tmp_path / "run").glob("*.partial"))


def test_killed_and_resumed_it_is_as_if_never_killed(store, tmp_path):
    words = ["--recipe", "setdiv", "--out", str(tmp_path / "run"), "--device", "cpu", "--seed", "3", "--resume"]
    for setting in [*SMALL, *HEADS, "optimizer.aggregator_lr=0.5", "schedule.epochs=20"]:
        words += ["--set", setting]
    start = f"from xret.cli.train_head import train_head; train_head({[store, *words]!r})"
    start = f"import torch; torch.set_num_threads(1); {start}"
    process = subprocess.Popen([sys.executable, "-c", start], stderr=subprocess.DEVNULL, stdout=subprocess.DEVNULL)
    metrics = tmp_path / "run" / "metrics.jsonl"
    while process.poll() is None and not (metrics.exists() and len(metrics.read_text().splitlines()) > 2):
        time.sleep(0.005)
    os.kill(process.pid, signal.SIGKILL)
    assert process.wait() == -signal.SIGKILL
    for name, resume in (("run", True), ("whole", False)):
        train(store, recipe_of("setdiv", 20), tmp_path / name, device="cpu", seed=3, resume=resume)
    assert_equal(numbers(tmp_path / "run"), numbers(tmp_path / "whole"))


def test_a_complete_run_is_left_alone(store, uninterrupted):
    before = numbers(uninterrupted)
    summary = train(store, recipe_of(), uninterrupted, device="cpu", seed=3, resume=True)
    assert (summary.epochs, summary.trained) == (3, 0)
    assert summary.best_rsum == Run(uninterrupted).info.best_rsum
    assert_equal(numbers(uninterrupted), before)


def test_what_is_there_is_not_overwritten(store, uninterrupted, tmp_path):
    with pytest.raises(RunError, match="exists; take another --out, or continue that run with --resume"):
        train(store, recipe_of(), uninterrupted, device="cpu")
    (tmp_path / "folder").mkdir()
    with pytest.raises(RunError, match=r"is no run: it has no run\.json"):
        train(store, recipe_of(), tmp_path / "folder", device="cpu", resume=True)


def test_a_run_is_not_resumed_with_other_words(store, uninterrupted, tmp_path):
    with pytest.raises(RunError) as caught:
        train(store, recipe_of("setdiv", 9), uninterrupted, device="cpu", seed=2, resume=True)
    assert str(caught.value).endswith("begun otherwise: seed is 3 there and 2 now")
    other = make_store(tmp_path / "other.zarr", weights="b")
    with pytest.raises(RunError, match=r"other\.zarr has no image features equal to 'grid@\w+'"):
        train(other, recipe_of(), uninterrupted, device="cpu", seed=3, resume=True)


def test_a_damaged_state_is_named(store, tmp_path):
    train(store, recipe_of("vsepp", 1), tmp_path / "run", device="cpu")
    (tmp_path / "run" / "checkpoint.pt").write_bytes(b"half")
    with pytest.raises(RunError, match=r"checkpoint\.pt is damaged"):
        train(store, recipe_of("vsepp", 1), tmp_path / "run", device="cpu", resume=True)


def test_a_loss_that_is_not_finite_stops_the_run(store, tmp_path):
    recipe = recipe_of("setdiv", 2, *DIVERGING, "optimizer.clip=null")
    with pytest.raises(RunError) as caught:
        train(store, recipe, tmp_path / "run", device="cpu")
    message = str(caught.value)
    assert "the loss is not finite in epoch 1, step 2: loss nan" in message
    assert "--set optimizer.lr=100000" in message
    assert "are kept" not in message


def test_similarities_that_are_not_finite_get_the_same_hint(store, tmp_path):
    recipe = recipe_of("setdiv", 2, *DIVERGING, "optimizer.clip=null", "data.batch_size=100")  # one step
    with pytest.raises(RunError, match=r"not finite in the validation of epoch 1; .* --set optimizer\.lr=100000"):
        train(store, recipe, tmp_path / "run", device="cpu")


def test_a_failure_before_the_first_epoch_is_complete_leaves_nothing(store, tmp_path, monkeypatch):
    diverging = recipe_of("setdiv", 2, *DIVERGING, "optimizer.clip=null")
    for resume in (False, True):
        with pytest.raises(RunError, match="not finite"):
            train(store, diverging, tmp_path / "run", device="cpu", resume=resume)
        assert list(tmp_path.iterdir()) == []
    assert train(store, recipe_of("vsepp", 1), tmp_path / "run", device="cpu").trained == 1


def test_a_failure_after_an_epoch_or_of_a_resumed_run_removes_nothing(store, tmp_path, monkeypatch):
    from xret.heads.training.trainer import Trainer

    original, left = Trainer._validate, []

    def validate(*arguments):
        if not left:
            raise KeyError
        if left.pop() == "interrupt":
            raise KeyboardInterrupt
        return original(*arguments)

    monkeypatch.setattr(Trainer, "_validate", validate)
    left[:] = ["interrupt"]
    with pytest.raises(KeyboardInterrupt):
        train(store, recipe_of(), tmp_path / "run", device="cpu")
    assert (tmp_path / "run" / "run.json").exists()
    with pytest.raises(KeyError):
        train(store, recipe_of(), tmp_path / "run", device="cpu", resume=True)
    assert (tmp_path / "run" / "run.json").exists()
    left[:] = ["go on"]
    with pytest.raises(KeyError):
        train(store, recipe_of(), tmp_path / "other", device="cpu")
    assert len(Run(tmp_path / "other").metrics()) == 1


def test_memory_that_does_not_suffice_is_a_sentence(store, tmp_path, monkeypatch):
    sentence = r"does not fit in the memory of cpu; choose a smaller data\.batch_size or model\.dim"
    monkeypatch.setattr(Batches, "epoch", lambda *_, **__: iter([torch.empty(10**15)]))
    with pytest.raises(RunError, match=sentence):
        train(store, recipe_of("vsepp", 1), tmp_path / "run", device="cpu")
    assert list(tmp_path.iterdir()) == []
    monkeypatch.setattr(Batches, "epoch", lambda *_, **__: iter([torch.ones(2) @ torch.ones(3)]))
    with pytest.raises(RuntimeError, match="inconsistent tensor size"):  # a mistake of ours is no lack of memory
        train(store, recipe_of("vsepp", 1), tmp_path / "run", device="cpu")


def test_a_full_disk_is_a_sentence_and_leaves_nothing_half_written(store, uninterrupted, tmp_path):
    shutil.copytree(uninterrupted, tmp_path / "run")
    run = Run(tmp_path / "run")
    before = (run.path / "checkpoint.pt").read_bytes()
    with small_disk(1 << 20), pytest.raises(RunError, match=r"checkpoint\.pt cannot be written"):
        run.save({"state": {"model": torch.zeros(1 << 20)}})
    assert (run.path / "checkpoint.pt").read_bytes() == before
    quiet = recipe_of("setdiv", 3, "runtime.cache=memory")  # what is printed goes to a file too
    with (
        small_disk(100),
        pytest.raises(RunError, match=r"new cannot be written: File too large; make room, or take"),
    ):
        train(store, quiet, tmp_path / "new", device="cpu")
    assert [path.name for path in tmp_path.rglob("*partial")] == []
    assert [path.name for path in tmp_path.iterdir()] == ["run"]


def test_a_store_that_was_moved_is_resumed_from_its_new_place(tmp_path):
    url = make_store(tmp_path / "before.zarr")
    train(url, recipe_of("vsepp", 1), tmp_path / "run", device="cpu")
    moved = (tmp_path / "before.zarr").rename(tmp_path / "after.zarr")
    train(str(moved), recipe_of("vsepp", 1), tmp_path / "run", device="cpu", resume=True)
    assert json.loads((tmp_path / "run" / "run.json").read_text())["store"] == str(moved)
    other = make_store(tmp_path / "other.zarr", test=13)
    with pytest.raises(RunError, match="samples is "):
        train(other, recipe_of("vsepp", 1), tmp_path / "run", device="cpu", resume=True)
