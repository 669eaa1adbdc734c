"""Collapse is seen where it is, and lack of memory names the keys that need less."""

import json

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from small_store import make_store
from torch import nn

from xret.heads.modules.losses import Diversity, Triplet
from xret.heads.recipes.recipe import load_recipe
from xret.heads.runs.run import Run
from xret.heads.training.train import enough_memory, train
from xret.heads.training.trainer import COLLAPSED, collapsed_loss
from xret.pipeline.errors import OutOfMemory, RunError
from xret.pipeline.store import ImageSet

pytestmark = pytest.mark.usefixtures("one_thread")

SMALL = ["model.dim=8", "data.batch_size=8", "adapter.words.word_dim=8"]


@pytest.fixture(scope="module")
def store(tmp_path_factory):
    return make_store(tmp_path_factory.mktemp("store") / "small.zarr", train=16, val=4)


def positives(images, captions):
    return torch.arange(images * captions) // captions == torch.arange(images)[:, None]


@pytest.mark.parametrize("reduction", ["mean", "sum"])
def test_the_constant_is_the_loss_of_equal_similarities(reduction):
    loss = Triplet(margin=0.3, reduction=reduction)
    losses = nn.ModuleDict({"diversity": Diversity(), "triplet": loss})
    value = loss(torch.full((4, 12), 0.7), positives(4, 3), None, None)
    assert collapsed_loss(losses, 12, "negative") == pytest.approx(value.item())


def test_what_is_not_watched():
    warming = Triplet(warmup_epochs=2)
    for loss in (Triplet(negatives="all"), Triplet(margin=0.0), warming, Diversity()):
        assert collapsed_loss(nn.ModuleDict({"triplet": loss}), 3, "negative") is None
    warming.epoch = 2
    assert collapsed_loss(nn.ModuleDict({"triplet": warming}), 3, "negative") == 0.4
    summed = nn.ModuleDict({"triplet": Triplet(reduction="sum")})
    assert collapsed_loss(summed, 3, "positive") is None and collapsed_loss(summed, 3, "excluded") is not None


def test_a_collapse_is_told_once_and_written_down(store, tmp_path, caplog):
    # A margin beside which all similarities are alike, and a rate that changes nothing.
    collapsed = ["optimizer.lr=1e-9", f"schedule.epochs={COLLAPSED // 2 + 1}", "loss.triplet.margin=100"]
    train(store, load_recipe("vsepp", [*SMALL, "data.unit=image", *collapsed]), tmp_path / "run", device="cpu")
    lines = Run(tmp_path / "run").metrics()
    (told,) = [record.getMessage() for record in caplog.records if "collapse" in record.getMessage()]
    assert "for 100 steps" in told and "loss.triplet.warmup_epochs=1 or --set optimizer.lr=1e-10" in told
    assert [line.get("collapsed", False) for line in lines] == [line["step"] >= COLLAPSED for line in lines]
    assert any("collapsed" in line for line in lines)


def test_a_head_that_learns_is_not_said_to_collapse(store, tmp_path, caplog):
    settings = ["data.unit=image", "optimizer.lr=0.02", "schedule.epochs=55"]
    train(store, load_recipe("vsepp", [*SMALL, *settings]), tmp_path / "run", device="cpu")
    assert Run(tmp_path / "run").metrics()[-1]["step"] >= COLLAPSED
    assert "collapse" not in caplog.text + json.dumps(Run(tmp_path / "run").metrics())


@pytest.mark.parametrize(
    ("device", "settings", "ways"),
    [
        ("cpu", [], ["data.chunk=32, for the same gradients", "runtime.cache=stream"]),
        ("cuda", [], ["data.chunk=32", "runtime.cache=stream"]),
        ("cuda", ["data.chunk=4", "runtime.cache=memory"], ["runtime.cache=stream"]),
        ("cuda", ["data.chunk=4", "runtime.cache=stream"], []),
    ],
)
def test_a_lack_of_memory_names_what_needs_less(device, settings, ways):
    recipe = load_recipe("vsepp", [*SMALL, *settings])
    with pytest.raises(RunError) as caught, enough_memory(torch.device(device), recipe):
        raise torch.OutOfMemoryError("CUDA out of memory")
    message = str(caught.value)
    assert message.startswith(f"the head does not fit in the memory of {device}; choose a smaller data.batch_size")
    assert message.count("; or ") == len(ways)
    assert all(way in message for way in ways)
    with pytest.raises(RunError, match=r"^mine$"), enough_memory(torch.device(device), recipe):
        raise RunError("mine") from RunError("another")


def test_a_full_disk_is_no_lack_of_memory(store, tmp_path, monkeypatch):
    def full(*_, **__):
        raise RuntimeError("[enforce fail at inline_container.cc:672] . unexpected pos 64 vs 0")  # as torch says it

    monkeypatch.setattr(torch, "save", full)
    with pytest.raises(RunError, match=r"checkpoint\.pt cannot be written") as caught:
        train(store, load_recipe("vsepp", SMALL), tmp_path / "run", device="cpu")
    assert "runtime.cache" not in str(caught.value)
    assert not isinstance(caught.value, OutOfMemory)


def test_it_stops_when_nothing_gets_better(store, tmp_path):
    recipe = load_recipe("vsepp", [*SMALL, "optimizer.lr=0", "schedule.epochs=20", "schedule.patience=3"])
    summary = train(store, recipe, tmp_path / "run", device="cpu")
    assert (summary.epochs, summary.trained, summary.best_epoch) == (4, 4, 1)
    assert len(Run(tmp_path / "run").metrics()) == 4
    assert train(store, recipe, tmp_path / "run", device="cpu", resume=True).trained == 0


def test_the_average_of_the_weights_is_what_is_kept(store, tmp_path, monkeypatch):
    """Against the recursion, written out over the weights after every step."""
    after, step = [], torch.optim.AdamW.step

    def noted(self, *arguments, **options):
        done = step(self, *arguments, **options)
        after.append([p.detach().clone() for group in self.param_groups for p in group["params"]])
        return done

    monkeypatch.setattr(torch.optim.AdamW, "step", noted)
    settings = ["optimizer.ema=0.8", "optimizer.lr=0.05", "schedule.epochs=1", "schedule=step"]
    train(store, load_recipe("vsepp", [*SMALL, *settings]), tmp_path / "run", device="cpu")
    average = [weights.double() for weights in after[0]]
    for weights in after[1:]:
        average = [0.8 * old + 0.2 * new.double() for old, new in zip(average, weights, strict=True)]
    kept = load_file(tmp_path / "run" / "model.safetensors")
    state = torch.load(tmp_path / "run" / "checkpoint.pt", weights_only=True)["state"]["model"]
    found = sorted((t.double() for t in kept.values()), key=lambda t: (t.numel(), t.sum().item()))
    expected = sorted(average, key=lambda t: (t.numel(), t.sum().item()))
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one.flatten(), other.flatten(), rtol=1e-5, atol=1e-6)
    assert len(after) > 3
    assert any(not torch.equal(kept[name], state[name]) for name in kept)


def test_an_average_that_would_never_move_is_refused(store, tmp_path):
    with pytest.raises(Exception, match=r"optimizer\.ema must be below 1, not 1; 0\.999 averages"):
        train(store, load_recipe("vsepp", [*SMALL, "optimizer.ema=1"]), tmp_path / "run", device="cpu")
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("split", ["train", "val"])
def test_features_that_are_not_finite_are_not_blamed_on_the_learning_rate(tmp_path, monkeypatch, split):
    whole = ImageSet.local

    def spoiled(self, rows, view=0):
        values = whole(self, rows, view).copy()
        values[rows == self.cache.splits[split][0]] = np.nan
        return values

    monkeypatch.setattr(ImageSet, "local", spoiled)
    store = make_store(tmp_path / "s.zarr", train=12, val=6)
    settings = [*SMALL, "aggregator.image=average"]
    with pytest.raises(RunError, match=r"; features in the cache are not finite themselves: extract") as caught:
        train(store, load_recipe("vsepp", settings), tmp_path / "run", device="cpu")
    assert "optimizer.lr" not in str(caught.value)


def test_an_early_end_is_told(store, tmp_path, caplog):
    recipe = load_recipe("vsepp", [*SMALL, "optimizer.lr=0", "schedule.epochs=9", "schedule.patience=2"])
    train(store, recipe, tmp_path / "run", device="cpu")
    last = caplog.text.splitlines()[-1]
    assert "stopped after epoch 3 of 9: none of the last 2 was better" in last
