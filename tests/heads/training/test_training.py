"""Training on a small store: it learns, and it repeats itself."""

import json
from copy import deepcopy

import numpy as np
import pytest
import torch
from click.testing import CliRunner
from safetensors.torch import load_file
from small_store import make_store
from small_trainings import SMALL, WORDS, assert_equal, numbers, recipe_of

from xret.cli.demo import demo
from xret.cli.train_head import train_head
from xret.heads.evaluation.evaluation import evaluate
from xret.heads.model import build_losses, build_model, feature_facts
from xret.heads.recipes.blocks import Optimizer
from xret.heads.recipes.recipe import load_recipe
from xret.heads.runs.run import Run
from xret.heads.training import train as training
from xret.heads.training.objective import Objective
from xret.heads.training.optimisation import build_optimizer
from xret.heads.training.train import train
from xret.pipeline.errors import RecipeError, RunError
from xret.pipeline.reading.batches import stored_batches
from xret.pipeline.store import FeatureCache

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.mark.parametrize("name", ["vsepp", "setdiv"])
def test_it_learns(store, tmp_path, name):
    settings = ["data.unit=image", "loss.triplet.reduction=mean", "optimizer.lr=0.02"] if name == "vsepp" else []
    summary = train(store, recipe_of(name, 10, *settings), tmp_path / "run", device="cpu")
    chance = sum(100 * k / 12 for k in (1, 5, 10)) * 2  # 12 images; more for captions, of which an image has several
    assert summary.best_rsum > 1.3 * chance
    lines = Run(tmp_path / "run").metrics()
    assert lines[-1]["loss"] < lines[1]["loss"]  # the first epoch of setdiv has another loss
    assert (summary.epochs, summary.trained) == (10, 10)


def test_the_run_folder(uninterrupted, store):
    names = {path.name for path in uninterrupted.iterdir()}
    expected = {"run.json", "recipe.yaml", "model.safetensors", "checkpoint.pt", "metrics.jsonl"}
    assert names == {*expected, "train.log"}
    info = json.loads((uninterrupted / "run.json").read_text())
    cache = FeatureCache.open(store)
    assert info["store"] == store
    assert Run(uninterrupted).info.names("image") == (cache.image_set().name,)
    assert Run(uninterrupted).info.fingerprints("text") == (cache.caption_set().fingerprint,)
    assert set(info["versions"]) == {"xret", "torch", "python"}
    lines = [json.loads(line) for line in (uninterrupted / "metrics.jsonl").read_text().splitlines()]
    assert [line["epoch"] for line in lines] == [1, 2, 3]
    assert [line["step"] for line in lines] == [3, 6, 9]
    assert set(lines[0]) == {"epoch", "step", "loss", "parts", "lr", "rsum", "seconds"}
    best = max(lines, key=lambda line: line["rsum"])
    assert (info["best_epoch"], info["best_rsum"]) == (best["epoch"], best["rsum"])
    assert load_recipe(str(uninterrupted / "recipe.yaml")) == recipe_of()
    assert Run(uninterrupted).vocabulary == cache.caption_set().vocabulary


def test_the_best_epoch_is_what_is_evaluated(uninterrupted):
    result = evaluate([uninterrupted], split="val", device="cpu").results[0]
    assert result.rsum == pytest.approx(Run(uninterrupted).info.best_rsum)


def test_the_loss_of_the_first_batch_is_that_of_the_recipe(store, tmp_path):
    recipe = recipe_of("setdiv", 1, "data.batch_size=100", "loss.mmd.weight=0.5")
    train(store, recipe, tmp_path / "run", device="cpu", seed=5)
    cache = FeatureCache.open(store)
    images, captions = cache.image_set(), cache.caption_set()
    torch.manual_seed(5)
    model = build_model(recipe, feature_facts(images), feature_facts(captions))
    split = stored_batches(images, captions, "train", image_fields={"local"}, caption_fields={"token"})
    (batch,) = split.epoch(unit="image", batch_size=100, seed=5, epoch=0)
    one, other = model.embed_images(batch.images), model.embed_captions(batch.captions)
    similarity = model.similarity(one.embedding, other.embedding)
    positives = batch.caption_image[None, :] == torch.arange(48)[:, None]
    parts = {key: term(similarity, positives, one, other).item() for key, term in build_losses(recipe, WORDS).items()}
    (line,) = Run(tmp_path / "run").metrics()
    assert line["parts"] == pytest.approx(parts, rel=1e-5)
    expected = parts["triplet"] + 0.5 * parts["mmd"] + 0.01 * parts["diversity"]
    assert line["loss"] == pytest.approx(expected, rel=1e-5)


def test_the_same_seed_gives_the_same_numbers(store, uninterrupted, tmp_path):
    train(store, recipe_of(), tmp_path / "again", device="cpu", seed=3)
    assert_equal(numbers(tmp_path / "again"), numbers(uninterrupted))
    train(store, recipe_of(), tmp_path / "other", device="cpu", seed=4)
    assert Run(tmp_path / "other").metrics()[0]["loss"] != Run(uninterrupted).metrics()[0]["loss"]


def test_a_seed_is_one_that_torch_can_take(store, tmp_path):
    for command, words in ((train_head, [store, "--recipe", "vsepp", "--out"]), (demo, ["--out"])):
        result = CliRunner().invoke(command, [*words, str(tmp_path / "run"), "--seed", str(2**64)])
        assert result.exit_code == 2
        assert "is not in the range" in result.output
    words = [store, "--recipe", "vsepp", "--out", str(tmp_path / "run"), "--seed", str(2**63 - 1)]
    words += [word for setting in [*SMALL, "schedule.epochs=1"] for word in ("--set", setting)]
    assert CliRunner().invoke(train_head, words, catch_exceptions=False).exit_code == 0


def test_precision(store, tmp_path):
    with pytest.raises(RunError, match="float16 needs a GPU"):
        train(store, recipe_of("vsepp", 1, "runtime.precision=float16"), tmp_path / "run", device="cpu")
    recipe = recipe_of("vsepp", 2, "runtime.precision=bfloat16")
    assert train(store, recipe, tmp_path / "run", device="cpu").trained == 2
    weights = load_file(tmp_path / "run" / "model.safetensors")
    assert {tensor.dtype for tensor in weights.values()} == {torch.float32}


def test_groups_of_the_optimizer(store):
    cache = FeatureCache.open(store)
    recipe = recipe_of()
    model = build_model(recipe, feature_facts(cache.image_set()), feature_facts(cache.caption_set()))
    values = Optimizer(lr=0.5, weight_decay=0.1, aggregator_lr=0.25)
    groups = build_optimizer(model, build_losses(recipe, WORDS), values).param_groups
    found = {id(p): (group["factor"], group["weight_decay"]) for group in groups for p in group["params"]}
    named = dict(model.named_parameters())
    assert len(found) == len(named)
    for name, parameter in named.items():
        factor = 0.25 if ".aggregator." in name else 1.0
        decays = 0.0 if name.endswith("bias") or "norm" in name or "bias_" in name or "mlp.0" in name else 0.1
        assert found[id(parameter)] == (factor, decays), name


def test_text_states_are_trained_as_words_are(tmp_path):
    url = make_store(tmp_path / "a.zarr", text="tokens")
    summary = train(url, recipe_of("vsepp", 2), tmp_path / "run", device="cpu")
    assert np.isfinite(summary.best_rsum)
    assert Run(tmp_path / "run").vocabulary is None


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no CUDA device")
@pytest.mark.parametrize("precision", ["float32", "bfloat16", "float16"])
def test_a_gpu_repeats_itself(store, tmp_path, precision):
    recipe = recipe_of("setdiv", 4, f"runtime.precision={precision}")
    for name in ("one", "other"):
        train(store, recipe, tmp_path / name, device="cuda")
    assert_equal(numbers(tmp_path / "one"), numbers(tmp_path / "other"))


def test_a_frozen_component_stays_what_it_was(store, tmp_path):
    weights = {}
    for frozen in (0, 1):
        recipe = recipe_of(
            "setdiv", 1, f"optimizer.aggregator_frozen={frozen}", "optimizer.weight_decay=0.1", "schedule=step"
        )
        train(store, recipe, tmp_path / str(frozen), device="cpu")
        weights[frozen] = torch.load(tmp_path / str(frozen) / "checkpoint.pt", weights_only=True)["state"]["model"]
    cache = FeatureCache.open(store)
    torch.manual_seed(0)
    first = build_model(recipe, feature_facts(cache.image_set()), feature_facts(cache.caption_set())).state_dict()
    for name, value in first.items():
        learns = ".aggregator." not in name
        assert torch.equal(weights[1][name], value) is not learns, name
    assert not torch.equal(weights[0]["image.aggregator.initial_slots"], first["image.aggregator.initial_slots"])


def test_the_mean_of_the_last_epochs_is_what_is_kept(store, tmp_path):
    plain = recipe_of("vsepp", 4, "optimizer.lr=0.05")
    averaged = recipe_of("vsepp", 4, "optimizer.lr=0.05", "optimizer.swa_epochs=3")
    ends = []

    class Ended(Run):
        def save(self, checkpoint):
            ends.append(deepcopy({part: checkpoint["state"].get(part) for part in ("model", "average")}))
            super().save(checkpoint)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(training, "Run", Ended)
        train(store, plain, tmp_path / "plain", device="cpu")
        train(store, averaged, tmp_path / "averaged", device="cpu")
    kept = Run(tmp_path / "averaged")
    state = ends[6]  # of the third epoch; a run that is over keeps neither
    for key, value in ends[2]["model"].items():
        assert torch.equal(state["model"][key], value)  # what learns is not changed by what is kept
        torch.testing.assert_close(state["average"][f"module.{key}"], (ends[1]["model"][key] + value) / 2)
    assert kept.metrics()[0]["rsum"] == Run(tmp_path / "plain").metrics()[0]["rsum"]  # before the average has begun
    with pytest.raises(RecipeError, match="two averages"):
        train(
            store, recipe_of("vsepp", 1, "optimizer.swa_epochs=1", "optimizer.ema=0.9"), tmp_path / "no", device="cpu"
        )


def test_each_step_draws_anew_and_learns_as_in_training(store, tmp_path, monkeypatch):
    seeds, modes, times = [], [], []
    loss_of = Objective.__call__

    def watched(self, batch, now):
        seeds.append(torch.initial_seed())
        modes.append(self.model.training)
        found = loss_of(self, batch, now)
        times.extend(term.epoch for term in self.losses.values())
        return found

    monkeypatch.setattr(Objective, "__call__", watched)
    train(store, recipe_of("vsepp", 2, "data.unit=image"), tmp_path / "run", device="cpu")
    assert len(set(seeds)) == len(seeds) == 6
    assert all(modes)  # after a validation, too
    assert times == pytest.approx([0, 1 / 3, 2 / 3, 1, 4 / 3, 5 / 3])


def test_what_is_validated_has_no_dropout(store, tmp_path):
    noisy = ["adapter.grid.dropout=0.5", "adapter.words.dropout=0.5"]
    summary = train(store, recipe_of("vsepp", 1, *noisy), tmp_path / "run", device="cpu")
    (result,) = evaluate([tmp_path / "run"], split="val", device="cpu").results
    assert result.rsum == pytest.approx(summary.best_rsum)


@pytest.mark.parametrize("clip", [0.01, 0.02])
def test_a_step_is_no_longer_than_what_it_is_clipped_to(store, tmp_path, clip):
    plain = ["optimizer.name=sgd", "optimizer.momentum=0", "optimizer.weight_decay=0", "schedule.name=constant"]
    settings = [*plain, "optimizer.lr=1", "data.unit=image", "data.batch_size=100", f"optimizer.clip={clip}"]
    recipe = recipe_of("vsepp", 1, *settings)
    train(store, recipe, tmp_path / "run", device="cpu")
    cache = FeatureCache.open(store)
    torch.manual_seed(0)
    first = build_model(recipe, feature_facts(cache.image_set()), feature_facts(cache.caption_set())).state_dict()
    after = load_file(tmp_path / "run" / "model.safetensors")
    step = sum((after[name] - value).double().square().sum() for name, value in first.items()).sqrt()
    assert step.item() == pytest.approx(clip, rel=1e-3)


@pytest.mark.parametrize("clip", ["null", "2"])
def test_an_epoch_in_which_nothing_learns_is_one_of_float16_too(store, tmp_path, monkeypatch, clip):
    scaled = torch.amp.GradScaler
    monkeypatch.setattr(torch.amp, "GradScaler", lambda device, enabled: scaled(device, enabled=True))
    waiting = ["optimizer.adapter_frozen=1", "loss.infonce.learned=false", "loss.infonce.logarithm=false"]
    recipe = load_recipe(
        "linear", ["model.dim=16", "data.batch_size=16", "schedule.epochs=2", f"optimizer.clip={clip}", *waiting]
    )
    train(store, recipe, tmp_path / "run", device="cpu")
    waited, learnt = (line["rsum"] for line in Run(tmp_path / "run").metrics())
    assert waited != learnt
