"""Killed at any moment and resumed, a training ends with the bits of one that was never stopped."""

import os
import random
import shutil
import signal
import time

import pytest
import torch
from edited_runs import edited
from safetensors.torch import load_file
from small_store import make_store

from xret.heads.recipes.recipe import load_recipe
from xret.heads.runs.run import Run
from xret.heads.training.objective import Objective
from xret.heads.training.train import train
from xret.pipeline.errors import CacheError, RunError
from xret.pipeline.files import locked
from xret.pipeline.store import FeatureCache

pytestmark = pytest.mark.usefixtures("one_thread")

SMALL = ["model.dim=16", "data.batch_size=4", "adapter.words.word_dim=8", "optimizer.lr=0.01", "schedule.epochs=3"]
SETS = ["aggregator.image.head_dim=16", "aggregator.text.head_dim=16"]
STEADY = "schedule.name=step"  # an epoch's learning rate is the same whatever number of epochs there is
EVERYTHING = [
    "augment.image=0.2",
    "augment.text=0.2",
    "data.chunk=3",
    "data.captions=2",
    "optimizer.ema=0.9",
    "schedule.patience=2",
    # as published scripts train
    "augment.image_varies=true",
    "augment.mask_words=0.3",
    "adapter.words.ends=true",
    "adapter.grid.output_dropout=0.1",
    "aggregator.image.dropout=0.1",
    "aggregator.text.dropout=0.1",
    "optimizer.image_adapter_lr=0.5",
    "optimizer.decay=all",
    "schedule.by=step",
]
# Batch normalisation, and dropout in a loss.
NORMALISED = ["loss.caption-generation.hidden=8", "loss.caption-generation.word_dim=8"]


def recipe_of(name="setdiv", *settings):
    return load_recipe(name, [*SMALL, *(SETS if name == "setdiv" else []), *settings])


@pytest.fixture(scope="module")
def store(tmp_path_factory):
    return make_store(tmp_path_factory.mktemp("store") / "small.zarr", train=24)


def outcome(run):
    """All that must repeat: metrics without times, best epoch, weights, state."""
    lines = [{key: value for key, value in line.items() if key != "seconds"} for line in Run(run).metrics()]
    best = Run(run).info.best_epoch, Run(run).info.best_rsum
    return (
        lines,
        best,
        load_file(run / "model.safetensors"),
        torch.load(run / "checkpoint.pt", weights_only=True)["state"],
    )


def assert_same(first, second):
    for one, other in zip(_leaves(first), _leaves(second), strict=True):
        assert one[0] == other[0]
        same = torch.equal(one[1], other[1]) if isinstance(one[1], torch.Tensor) else one[1] == other[1]
        assert same, one[0]


def _leaves(value, path=""):
    if isinstance(value, dict):
        return [leaf for key, inner in value.items() for leaf in _leaves(inner, f"{path}.{key}")]
    if isinstance(value, list | tuple):
        return [leaf for index, inner in enumerate(value) for leaf in _leaves(inner, f"{path}[{index}]")]
    return [(path, value)]


def train_and_be_killed(states, seconds, store, recipe, out, **options):
    """Train in a process of its own; kill it so long after so many states were seen; return whether it was at work."""
    child = os.fork()
    if child == 0:
        code = 1
        try:
            os.dup2(os.open(os.devnull, os.O_WRONLY), 2)
            train(store, recipe, out, **options)
            code = 0
        finally:
            os._exit(code)
    seen = set()
    while len(seen) < states:
        if os.waitpid(child, os.WNOHANG) != (0, 0):
            return False
        if (out / "checkpoint.pt").exists():
            seen.add((out / "checkpoint.pt").stat().st_mtime_ns)
        time.sleep(0.001)
    time.sleep(seconds)
    os.kill(child, signal.SIGKILL)
    return os.WIFSIGNALED(os.waitpid(child, 0)[1])


@pytest.mark.parametrize(("name", "settings"), [("setdiv", EVERYTHING), ("vsrn", NORMALISED)])
def test_killed_at_random_moments(store, tmp_path, name, settings):
    recipe = recipe_of(name, *settings, "runtime.checkpoint_steps=1")
    train(store, recipe, tmp_path / "whole", device="cpu", seed=3)
    dice, kills = random.Random(5), 0
    out = tmp_path / "run"
    for _ in range(3):
        moment = dice.randint(1, 4), dice.uniform(0, 0.02)
        kills += train_and_be_killed(*moment, store, recipe, out, device="cpu", seed=3, resume=True)
    train(store, recipe, out, device="cpu", seed=3, resume=True)
    assert kills > 0
    assert_same(outcome(out), outcome(tmp_path / "whole"))


class Stopped(BaseException):
    """Stands for a kill: nothing catches it."""


def test_it_goes_on_behind_the_step_that_was_written_down(store, tmp_path, monkeypatch):
    recipe, steps, original = recipe_of("setdiv", "runtime.checkpoint_steps=4"), [], Objective.__call__

    def count(self, batch, now):
        steps.append(now)
        if len(steps) == stop:
            raise Stopped
        return original(self, batch, now)

    monkeypatch.setattr(Objective, "__call__", count)
    stop = None
    train(store, recipe, tmp_path / "whole", device="cpu")
    moments = steps.copy()
    assert len(moments) == 18  # three epochs of six
    for stopped, begin in ((4, 0), (5, 4), (8, 6), (18, 16)):
        steps.clear()
        stop = stopped
        with pytest.raises(Stopped):
            train(store, recipe, tmp_path / str(stopped), device="cpu")
        stop = None
        steps.clear()
        resumed = train(store, recipe_of("setdiv"), tmp_path / str(stopped), device="cpu", resume=True)
        assert steps == moments[begin:]
        assert resumed.epochs == 3
        assert_same(outcome(tmp_path / str(stopped)), outcome(tmp_path / "whole"))


def test_what_no_number_depends_on_may_change(store, tmp_path):
    out = tmp_path / "run"
    train(store, recipe_of("setdiv", "runtime.cache=memory"), out, device="cpu")
    free = ["runtime.checkpoint_steps=7", "runtime.cache=auto"]
    assert train(store, recipe_of("setdiv", *free), out, device="cpu", resume=True).trained == 0
    with pytest.raises(RunError, match=r"begun otherwise: runtime\.precision is auto there and bfloat16 now$"):
        train(store, recipe_of("setdiv", "runtime.precision=bfloat16"), out, device="cpu", resume=True)
    with pytest.raises(RunError, match=r"the order of samples \(by runtime\.cache\) is as a whole there and in groups"):
        train(store, recipe_of("setdiv", "runtime.cache=stream"), out, device="cpu", resume=True)


def test_a_run_that_streams_goes_on_streaming(store, tmp_path, monkeypatch):
    streamed = recipe_of("setdiv", "runtime.cache=stream")
    train(store, streamed, tmp_path / "whole", device="cpu")
    original = Run.export

    def stop(self, *arguments, **options):
        original(self, *arguments, **options)
        raise Stopped

    monkeypatch.setattr(Run, "export", stop)
    with pytest.raises(Stopped):
        train(store, streamed, tmp_path / "run", device="cpu")
    monkeypatch.undo()
    with pytest.raises(RunError, match=r"is in groups of runs of 64 neighbours there and as a whole now"):
        train(store, recipe_of("setdiv", "runtime.cache=memory"), tmp_path / "run", device="cpu", resume=True)
    train(store, recipe_of("setdiv"), tmp_path / "run", device="cpu", resume=True)  # auto
    assert_same(outcome(tmp_path / "run"), outcome(tmp_path / "whole"))


def test_neither_another_order_of_blocks_nor_another_scaling_goes_on(store, tmp_path):
    recipe = recipe_of("setdiv", "runtime.cache=stream")
    train(store, recipe, tmp_path / "run", device="cpu")
    assert Run(tmp_path / "run").info.shuffled == "in groups of runs of 64 neighbours"
    edited(tmp_path / "run", shuffled="in groups of shards of 8 images")
    with pytest.raises(RunError, match=r"shards of 8 images there and in groups of runs"):
        train(store, recipe, tmp_path / "run", device="cpu", resume=True)
    edited(tmp_path / "run", shuffled="in groups of runs of 64 neighbours")
    checkpoint = torch.load(tmp_path / "run" / "checkpoint.pt", weights_only=True)
    checkpoint["state"]["scaler"] = {"scale": 65536.0}
    torch.save(checkpoint, tmp_path / "run" / "checkpoint.pt")
    with pytest.raises(RunError, match=r"it was trained in float16; to go on, set runtime\.precision"):
        train(store, recipe, tmp_path / "run", device="cpu", resume=True)


def test_a_failure_in_the_first_epoch_leaves_what_can_be_gone_on_from(store, tmp_path, monkeypatch):
    recipe, original, left = recipe_of("setdiv", "runtime.checkpoint_steps=2"), Objective.__call__, [3]

    def fail(self, batch, now):
        left[0] -= 1
        if left[0] < 0:
            raise OSError("the disk is gone")
        return original(self, batch, now)

    monkeypatch.setattr(Objective, "__call__", fail)
    with pytest.raises(OSError, match="disk"):
        train(store, recipe, tmp_path / "run", device="cpu")
    monkeypatch.undo()
    assert train(store, recipe, tmp_path / "run", device="cpu", resume=True).epochs == 3


def test_one_process_trains_in_a_folder(store, tmp_path):
    run = tmp_path / "run"
    train(store, recipe_of("setdiv"), run, device="cpu")
    before = (run / "checkpoint.pt").read_bytes()
    with locked(run, OSError()), pytest.raises(RunError, match=r"another process is training in .*run; wait"):
        train(store, recipe_of("setdiv"), run, device="cpu", resume=True)
    assert (run / "checkpoint.pt").read_bytes() == before


def test_a_set_that_came_meanwhile_stops_no_run(store, tmp_path):
    recipe, store = recipe_of("setdiv", STEADY), shutil.copytree(store, tmp_path / "s.zarr")
    train(store, recipe, tmp_path / "run", device="cpu")
    for modality in ("images", "captions"):
        (name,) = FeatureCache.open(store).set_names(modality)
        shutil.copytree(f"{store}/{modality}/{name}", f"{store}/{modality}/other@00000000")
    with pytest.raises(CacheError, match="several feature sets"):
        train(store, recipe, tmp_path / "new", device="cpu")
    assert train(store, recipe, tmp_path / "run", device="cpu", resume=True).trained == 0
    for modality in ("images", "captions"):  # now its beginning fits several as well
        (name,) = (name for name in FeatureCache.open(store).set_names(modality) if "other" not in name)
        shutil.copytree(f"{store}/{modality}/{name}", f"{store}/{modality}/{name.partition('@')[0]}@00000000")
    with pytest.raises(CacheError, match="several feature sets fit 'grid'"):
        train(store, recipe_of("setdiv", STEADY, "data.image=grid"), tmp_path / "new", device="cpu")
    with pytest.raises(RunError, match=r"begun otherwise: data\.image is auto there and other now"):
        train(store, recipe_of("setdiv", STEADY, "data.image=other"), tmp_path / "run", device="cpu", resume=True)


def test_much_that_differs_is_named_in_part(store, tmp_path):
    train(store, recipe_of("setdiv", STEADY), tmp_path / "run", device="cpu")
    other = [f"optimizer.{key}_lr=0.5" for key in ("adapter", "aggregator", "similarity", "loss")]
    other += [f"optimizer.{key}_frozen=1" for key in ("adapter", "aggregator", "similarity", "loss")]
    with pytest.raises(RunError, match=r"and 3 more$") as caught:
        train(store, recipe_of("setdiv", STEADY, *other), tmp_path / "run", device="cpu", resume=True)
    assert str(caught.value).count(" there and ") == 5


def test_lost_weights_are_named(store, tmp_path):
    train(store, recipe_of("setdiv", STEADY), tmp_path / "run", device="cpu")
    (tmp_path / "run" / "model.safetensors").unlink()
    with pytest.raises(RunError, match=r"has lost its model\.safetensors; restore it"):
        _ = Run(tmp_path / "run").weights
