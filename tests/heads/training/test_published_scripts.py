"""What only published training scripts have: rates step by step, captions written whole, positions of a grid alone."""

import pytest
import torch
from safetensors.torch import load_file
from small_store import make_store
from small_trainings import learner
from small_trainings import recipe_of as small_recipe

from xret.heads.recipes.recipe import load_recipe
from xret.heads.runs.run import Run
from xret.heads.training import trainer
from xret.heads.training.objective import Objective
from xret.heads.training.optimisation import learning_rate
from xret.heads.training.train import train
from xret.pipeline.store import FeatureCache


def recipe_of(*settings):
    return small_recipe("setdiv", 2, "loss.triplet.warmup_epochs=0", *settings)


def test_the_rate_of_each_step_is_set(store, tmp_path, monkeypatch):
    seen, set_rates = [], trainer.set_rates
    monkeypatch.setattr(trainer, "set_rates", lambda o, s, lr, now: (seen.append((now, lr)), set_rates(o, s, lr, now)))
    recipe = recipe_of("schedule.by=step", "schedule.warmup_epochs=2", "optimizer.lr=0.5")
    train(store, recipe, tmp_path / "run", device="cpu")
    assert [now for now, _ in seen] == pytest.approx([0, 1 / 3, 2 / 3, 1, 4 / 3, 5 / 3])
    assert [lr for _, lr in seen] == [learning_rate(recipe.schedule, 0.5, now) for now, _ in seen]
    assert len({lr for _, lr in seen}) == 6
    # An epoch's line has the rate of its last step, as the warm-up leaves it.
    lasts = [seen[2][1] * 2 / 6, seen[5][1] * 5 / 6]
    assert [line["lr"] for line in Run(tmp_path / "run").metrics()] == pytest.approx(lasts)


@pytest.mark.parametrize("augment", [["mask_words=1"], ["text=0.6"], ["text=0.6", "mask_words=1"]])
def test_a_loss_that_writes_captions_writes_them_whole(store, augment):
    small = ["model.dim=16", "adapter.words.word_dim=8", "adapter.words.ends=false"]
    recipe = load_recipe("vsrn", [*small, *(f"augment.{key}" for key in augment)])
    cache = FeatureCache.open(store)
    model, losses, split = learner(cache, recipe)
    batch = next(iter(split.epoch(unit="caption", batch_size=8, seed=0, epoch=0)))
    written, read = [], []
    losses["caption-generation"].register_forward_pre_hook(lambda term, inputs: written.append(inputs[3].token))
    model.text.adapter.embedding.register_forward_pre_hook(lambda layer, inputs: read.append(inputs[0]))
    assert Objective(recipe, model, losses, split)(batch, 0)[0].isfinite()
    assert torch.equal(written[0].rows, batch.captions.token)
    assert torch.equal(written[0].length, batch.captions.length)
    assert (read[0] == len(cache.caption_set().vocabulary)).any() == ("mask_words=1" in augment)
    assert (read[0] > 0).sum() < (batch.captions.token > 0).sum() or augment == ["mask_words=1"]


def test_regions_get_no_positions_of_a_grid(tmp_path, caplog):
    url = make_store(tmp_path / "roi.zarr", image="roi")
    weights = {}
    for positions in ("grid", "none", "circle"):
        train(url, recipe_of(f"aggregator.image.positions={positions}"), tmp_path / positions, device="cpu")
        assert ("has no rows and columns, and gets no positions" in caplog.text) == (positions == "grid")
        caplog.clear()
        weights[positions] = load_file(tmp_path / positions / "model.safetensors")
    assert all(torch.equal(value, weights["none"][name]) for name, value in weights["grid"].items())
    assert not all(torch.equal(value, weights["circle"][name]) for name, value in weights["grid"].items())
