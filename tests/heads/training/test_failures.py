"""What ends a training is one sentence that says what to do, and nothing half-written is left."""

import json
import shutil
import threading

import numpy as np
import pytest
import torch
from small_disk import small_disk
from small_store import make_store
from small_trainings import assert_equal, numbers, recipe_of

from xret.heads.runs.run import Run
from xret.heads.training.callbacks import Callback
from xret.heads.training.train import enough_memory, train
from xret.heads.training.trainer import COLLAPSED
from xret.losses import Diversity, Triplet
from xret.pipeline.errors import CacheError, OutOfMemory, RecipeError, RunError
from xret.pipeline.reading.batches import Batches
from xret.pipeline.store import ImageSet

DIVERGING = [f"optimizer.{key}=1e6" for key in ("lr", "aggregator_lr", "image_adapter_lr", "text_adapter_lr")]
DIVERGING += ["optimizer.clip=null"]


def test_what_is_not_watched():
    warming = Triplet(warmup_epochs=2)
    for loss in (Triplet(negatives="all"), Triplet(margin=0.0), warming, Diversity()):
        assert loss.at_rest(3) is None
    warming.begin(2)
    assert warming.at_rest(3) == 0.4
    summed = Triplet(reduction="sum")
    assert summed.at_rest(None) is None and summed.at_rest(3) is not None


@pytest.mark.parametrize("collapses", [True, False])
def test_a_collapse_is_told_once_and_written_down(tmp_path, caplog, collapses):
    store = make_store(tmp_path / "s.zarr", train=16, val=4)
    # A margin beside which all similarities are alike, and a rate that changes nothing.
    changes = ["optimizer.lr=1e-9", "loss.triplet.margin=100"] if collapses else ["optimizer.lr=0.02"]
    recipe = recipe_of("vsepp", COLLAPSED // 2 + 5, "data.unit=image", "data.batch_size=8", *changes)
    train(store, recipe, tmp_path / "run", device="cpu")
    lines = Run(tmp_path / "run").metrics()
    assert lines[-1]["step"] > COLLAPSED
    told = [record.getMessage() for record in caplog.records if record.getMessage().startswith("collapse")]
    if collapses:
        assert len(told) == 1 and "for 100 steps" in told[0]
        assert "loss.triplet.warmup_epochs=1 or --set optimizer.lr=1e-10" in told[0]
        assert [line.get("collapsed", False) for line in lines] == [line["step"] >= COLLAPSED for line in lines]
    else:
        assert not told and "collapsed" not in json.dumps(lines)


@pytest.mark.parametrize(
    ("device", "settings", "ways"),
    [
        ("cpu", [], ["data.chunk=32, for the same gradients", "runtime.cache=stream"]),
        ("cuda", ["runtime.cache=stream"], ["data.chunk=32", "runtime.capture=off"]),
        ("cuda", ["data.chunk=4", "runtime.cache=memory"], ["runtime.cache=stream"]),
        ("cuda", ["data.chunk=4", "runtime.cache=stream"], []),
    ],
)
def test_a_lack_of_memory_names_what_needs_less(device, settings, ways):
    recipe = recipe_of("vsepp", 1, *settings)
    with pytest.raises(RunError) as caught, enough_memory(torch.device(device), recipe):
        raise torch.OutOfMemoryError("CUDA out of memory")
    message = str(caught.value)
    assert message.startswith(f"the head does not fit in the memory of {device}; choose a smaller data.batch_size")
    assert message.count("; or ") == len(ways)
    assert all(way in message for way in ways)


def test_a_lack_of_memory_leaves_nothing(store, tmp_path, monkeypatch):
    monkeypatch.setattr(Batches, "epoch", lambda *_, **__: iter([torch.empty(10**15)]))
    with pytest.raises(RunError, match=r"does not fit in the memory of cpu; choose a smaller data\.batch_size or"):
        train(store, recipe_of("vsepp", 1), tmp_path / "run", device="cpu")
    assert list(tmp_path.iterdir()) == []
    monkeypatch.setattr(Batches, "epoch", lambda *_, **__: iter([torch.ones(2) @ torch.ones(3)]))
    with pytest.raises(RuntimeError, match="inconsistent tensor size"):  # a mistake of ours is no lack of memory
        train(store, recipe_of("vsepp", 1), tmp_path / "run", device="cpu")


def test_a_full_disk_leaves_nothing_half_written(store, uninterrupted, tmp_path, monkeypatch):
    run = Run(shutil.copytree(uninterrupted, tmp_path / "run"))
    before = (run.path / "checkpoint.pt").read_bytes()
    with small_disk(1 << 20), pytest.raises(RunError, match=r"checkpoint\.pt cannot be written") as caught:
        run.save({"state": {"model": torch.zeros(1 << 20)}})
    assert not isinstance(caught.value, OutOfMemory)
    assert (run.path / "checkpoint.pt").read_bytes() == before
    quiet = recipe_of("setdiv", 3, "runtime.cache=memory")  # what is printed goes to a file too
    with small_disk(100), pytest.raises(RunError, match=r"new cannot be written: File too large; make room, or take"):
        train(store, quiet, tmp_path / "new", device="cpu")
    assert [path.name for path in tmp_path.rglob("*partial")] == []
    assert [path.name for path in tmp_path.iterdir()] == ["run"]


def test_a_state_is_written_beside_the_next_epoch(store, uninterrupted, tmp_path, monkeypatch):
    save, learnt = torch.save, threading.Event()

    class Learning(Callback):
        epochs = 0

        def on_step(self, step, values):
            if self.epochs:
                learnt.set()

        def on_epoch(self, epoch, step, values):
            self.epochs = epoch

    def slowly(state, path):
        assert learnt.wait(60), "nothing is learnt meanwhile"
        save(state, path)

    monkeypatch.setattr(torch, "save", slowly)
    train(store, recipe_of(), tmp_path / "run", device="cpu", seed=3, callbacks=[Learning()])
    assert_equal(numbers(tmp_path / "run"), numbers(uninterrupted))  # not what was learnt meanwhile


@pytest.mark.parametrize("failing", [2, 3])  # of three epochs; the last one is waited for
def test_a_state_that_cannot_be_written_ends_the_training_at_the_next(
    store, uninterrupted, tmp_path, monkeypatch, failing
):
    save, calls = torch.save, []

    def full(state, path):
        calls.append(path)
        if len(calls) == failing:
            raise RuntimeError("unexpected pos 64 vs 0")
        save(state, path)

    recipe, how = recipe_of(), {"device": "cpu", "seed": 3}
    monkeypatch.setattr(torch, "save", full)
    with pytest.raises(RunError, match=r"run/checkpoint\.pt cannot be written: not all of it reached the disk"):
        train(store, recipe, tmp_path / "run", **how)
    assert len(calls) == failing and not list((tmp_path / "run").glob("*.partial"))
    assert Run(tmp_path / "run").info.epochs == len(Run(tmp_path / "run").metrics()) == failing - 1
    train(store, recipe, tmp_path / "run", resume=True, **how)
    assert_equal(numbers(tmp_path / "run"), numbers(uninterrupted))


@pytest.mark.parametrize("error", [KeyboardInterrupt, RuntimeError("diverged")])
def test_a_state_that_could_not_be_written_is_told_before_what_came_later(store, tmp_path, monkeypatch, error):
    class Stopping(Callback):
        def on_epoch(self, epoch, step, values):
            raise error

    def full(state, path):
        raise RuntimeError("unexpected pos 64 vs 0")

    monkeypatch.setattr(torch, "save", full)
    with pytest.raises(RunError, match=r"checkpoint\.pt cannot be written"):
        train(store, recipe_of(), tmp_path / "run", device="cpu", callbacks=[Stopping()])
    assert list(tmp_path.iterdir()) == []  # nothing to go on from


@pytest.mark.parametrize("resume", [False, True])
def test_a_loss_that_is_not_finite_leaves_nothing(store, tmp_path, resume):
    with pytest.raises(RunError, match=r"the loss is not finite in epoch 1, step 2: loss nan.*optimizer\.lr=100000"):
        train(store, recipe_of("setdiv", 2, *DIVERGING), tmp_path / "run", device="cpu", resume=resume)
    recipe = recipe_of("setdiv", 2, *DIVERGING, "data.batch_size=100")  # one step
    with pytest.raises(RunError, match=r"not finite in the validation of epoch 1; .* `settings` optimizer\.lr=100000"):
        train(store, recipe, tmp_path / "run", device="cpu")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("split", ["train", "val"])
def test_features_that_are_not_finite_are_not_blamed_on_the_learning_rate(tmp_path, monkeypatch, split):
    whole = ImageSet.local

    def spoiled(self, rows, view=0):
        values = whole(self, rows, view).copy()
        values[rows == self.cache.splits[split][0]] = np.nan
        return values

    monkeypatch.setattr(ImageSet, "local", spoiled)
    store = make_store(tmp_path / "s.zarr", train=12, val=6)
    with pytest.raises(RunError, match=r"; features in the cache are not finite themselves: extract") as caught:
        train(store, recipe_of("vsepp", 1, "aggregator.image=average"), tmp_path / "run", device="cpu")
    assert "optimizer.lr" not in str(caught.value)


def test_what_does_not_fit_is_refused_before_anything_is_made(store, tmp_path):
    roi = make_store(tmp_path / "roi.zarr", image="roi", text="tokens")
    heads = ["aggregator.image.heads=3", "aggregator.image.head_dim=null"]
    for url, settings, error, sentence in (
        (make_store(tmp_path / "a.zarr", val=0), [], CacheError, r"no split 'val', .* choose its best .*merge_splits"),
        (make_store(tmp_path / "b.zarr", train=0), [], CacheError, r"no split 'train', .*\(it has val, test\)"),
        (make_store(tmp_path / "c.zarr", train=1), [], RunError, r"split 'train' of .* has a single usable image"),
        (store, heads, RecipeError, r"aggregator\.image: .*heads"),
        (store, ["data.image=resnet18"], CacheError, "no feature set fits 'resnet18'"),
        (store, ["runtime.precision=float16"], RunError, "float16 needs a GPU"),
        (store, ["runtime.precision=tf32"], RunError, "tf32 needs a GPU"),
        (roi, ["augment.mask_words=0.2"], RecipeError, r"masks words, and captions of kind 'tokens' are states"),
        (roi, ["data.chunk=3"], RecipeError, r"data\.chunk embeds .*mlp\.1 needs it whole; .*KIND\.batch_norm=false"),
    ):
        with pytest.raises(error, match=sentence):
            train(url, recipe_of("setdiv", 1, *settings), tmp_path / "run", device="cpu")
        assert not (tmp_path / "run").exists()
