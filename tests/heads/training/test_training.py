"""Training on a small store: it learns what the recipe says, keeps the best, and repeats itself."""

import json
import shutil
import threading
from copy import deepcopy

import pytest
import torch
from click.testing import CliRunner
from safetensors.torch import load_file
from small_store import make_store
from small_trainings import SMALL, assert_equal, learner, numbers, recipe_of, state_of
from torch.utils._pytree import tree_leaves

from xret.cli.train import train_head
from xret.heads.evaluation.evaluation import evaluate
from xret.heads.model import feature_facts, fitted
from xret.heads.recipes.recipe import load_recipe
from xret.heads.runs.run import Run
from xret.heads.training.objective import Objective
from xret.heads.training.train import train
from xret.pipeline.errors import VectorsError
from xret.pipeline.reading.batches import stored_batches
from xret.pipeline.store import FeatureCache


@pytest.mark.parametrize("name", ["vsepp", "setdiv"])
def test_it_learns_and_says_what_the_test_shares(store, tmp_path, name, caplog):
    settings = ["data.unit=image", "loss.triplet.reduction=mean", "optimizer.lr=0.02"] if name == "vsepp" else []
    own = str(shutil.copytree(store, tmp_path / "own.zarr"))  # it is said once of each store in a process
    summary = train(own, recipe_of(name, 10, *settings), tmp_path / "run", device="cpu")
    train(own, recipe_of(name, 1, *settings), tmp_path / "again", device="cpu")
    chance = sum(100 * k / 12 for k in (1, 5, 10)) * 2  # 12 images; more for captions, of which an image has several
    assert summary.best_rsum > 1.3 * chance
    assert summary.leaks.captions > 0 and caplog.text.count(summary.leaks.sentence) == 1
    lines = Run(tmp_path / "run").metrics()
    assert lines[-1]["loss"] < lines[1]["loss"]  # the first epoch of setdiv has another loss
    assert (summary.epochs, summary.trained) == (10, 10)


def test_the_run_folder(uninterrupted, store):
    names = {path.name for path in uninterrupted.iterdir()}
    assert names == {"run.json", "recipe.yaml", "model.safetensors", "checkpoint.pt", "metrics.jsonl", "train.log"}
    run, cache = Run(uninterrupted), FeatureCache.open(store)
    assert run.info.store == store
    assert run.info.names("image") == (cache.image_set().name,)
    assert run.info.fingerprints("text") == (cache.caption_set().fingerprint,)
    assert set(run.info.versions) == {"xret", "torch", "python"}
    lines = [json.loads(line) for line in (uninterrupted / "metrics.jsonl").read_text().splitlines()]
    assert [(line["epoch"], line["step"]) for line in lines] == [(1, 3), (2, 6), (3, 9)]
    assert set(lines[0]) == {"epoch", "step", "loss", "parts", "lr", "rsum", "seconds"}
    best = max(lines, key=lambda line: line["rsum"])
    assert (run.info.best_epoch, run.info.best_rsum) == (best["epoch"], best["rsum"])
    facts = feature_facts(cache.image_set()), feature_facts(cache.caption_set())
    assert load_recipe(str(uninterrupted / "recipe.yaml")) == run.recipe == fitted(recipe_of(), *facts)
    assert run.vocabulary == cache.caption_set().vocabulary
    assert evaluate([uninterrupted], split="val", device="cpu").results[0].rsum == pytest.approx(best["rsum"])


def test_the_loss_of_the_first_batch_is_that_of_the_recipe(store, tmp_path):
    recipe = recipe_of("setdiv", 1, "data.batch_size=100", "loss.mmd.weight=0.5")
    train(store, recipe, tmp_path / "run", device="cpu", seed=0)
    model, losses, split = learner(FeatureCache.open(store), recipe)
    (batch,) = split.epoch(unit="image", batch_size=100, seed=0, epoch=0)
    one, other = model.embed_images(batch.images), model.embed_captions(batch.captions)
    similarity = model.similarity(one.embedding, other.embedding)
    positives = batch.caption_image[None, :] == torch.arange(48)[:, None]
    parts = {key: term(similarity, positives, one, other).item() for key, term in losses.items()}
    (line,) = Run(tmp_path / "run").metrics()
    assert line["parts"] == pytest.approx(parts, rel=1e-5)
    expected = parts["triplet"] + 0.5 * parts["mmd"] + 0.01 * parts["diversity"]
    assert line["loss"] == pytest.approx(expected, rel=1e-5)


def test_the_same_seed_gives_the_same_numbers(store, uninterrupted, tmp_path):
    train(store, recipe_of("setdiv", 9), tmp_path / "again", settings={"schedule.epochs": 3}, device="cpu", seed=3)
    assert_equal(numbers(tmp_path / "again"), numbers(uninterrupted))
    words = [store, "--recipe", "vsepp", "--out", str(tmp_path / "run")]
    words += [word for setting in [*SMALL, "schedule.epochs=1"] for word in ("--set", setting)]
    assert CliRunner().invoke(train_head, [*words, "--seed", str(2**64)]).exit_code == 2
    assert CliRunner().invoke(train_head, [*words, "--seed", str(2**63 - 1)]).exit_code == 0
    train(store, recipe_of("vsepp", 1), tmp_path / "other", device="cpu")
    assert Run(tmp_path / "other").metrics()[0]["loss"] != Run(tmp_path / "run").metrics()[0]["loss"]


def test_two_trainings_at_once_are_as_each_alone(store, tmp_path):
    def run(name, seed):
        drawing = ["augment.image=0.3", "adapter.words.dropout=0.3"]  # random numbers in every step
        train(store, recipe_of("vsepp", 6, *drawing), tmp_path / name, device="cpu", seed=seed)

    torch.manual_seed(5)
    before = torch.get_rng_state(), torch.are_deterministic_algorithms_enabled(), torch.get_num_threads()
    for seed in (1, 2):
        run(f"alone-{seed}", seed)
    threads = [threading.Thread(target=run, args=(f"both-{seed}", seed)) for seed in (1, 2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    after = torch.get_rng_state(), torch.are_deterministic_algorithms_enabled(), torch.get_num_threads()
    assert torch.equal(before[0], after[0]) and before[1:] == after[1:]  # the process is as it was
    for seed in (1, 2):
        assert_equal(numbers(tmp_path / f"both-{seed}"), numbers(tmp_path / f"alone-{seed}"))


def test_bfloat16_keeps_its_weights_in_float32(store, tmp_path):
    train(store, recipe_of("vsepp", 2, "runtime.precision=bfloat16"), tmp_path / "run", device="cpu")
    weights = load_file(tmp_path / "run" / "model.safetensors")
    assert {tensor.dtype for tensor in weights.values()} == {torch.float32}


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no CUDA device")
@pytest.mark.parametrize("precision", ["float32", "bfloat16", "float16"])
def test_a_gpu_repeats_itself(store, tmp_path, precision):
    recipe = recipe_of("setdiv", 4, f"runtime.precision={precision}")
    for name in ("one", "other"):
        train(store, recipe, tmp_path / name, device="cuda")
    assert_equal(numbers(tmp_path / "one"), numbers(tmp_path / "other"))


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no CUDA device")
def test_a_state_waits_for_its_writing_in_the_memory_of_the_host(store, tmp_path, monkeypatch):
    devices, save = set(), Run.save

    def noted(self, checkpoint):
        devices.update(one.device.type for one in tree_leaves(checkpoint["state"]) if isinstance(one, torch.Tensor))
        save(self, checkpoint)

    monkeypatch.setattr(Run, "save", noted)
    train(store, recipe_of("setdiv", 2), tmp_path / "run", device="cuda")
    assert devices == {"cpu"}


def test_the_mean_of_the_last_epochs_is_what_is_kept(store, tmp_path, monkeypatch):
    ends, save = [], Run.save

    def noted(self, checkpoint):
        ends.append(deepcopy({part: checkpoint["state"].get(part) for part in ("model", "average")}))
        save(self, checkpoint)

    monkeypatch.setattr(Run, "save", noted)
    train(store, recipe_of("vsepp", 4, "optimizer.lr=0.05"), tmp_path / "plain", device="cpu")
    averaged = recipe_of("vsepp", 4, "optimizer.lr=0.05", "optimizer.swa_epochs=3")
    train(store, averaged, tmp_path / "averaged", device="cpu")
    state = ends[6]  # of the third epoch
    for key, value in ends[2]["model"].items():
        assert torch.equal(state["model"][key], value)  # what learns is not changed by what is kept
        torch.testing.assert_close(state["average"][f"module.{key}"], (ends[1]["model"][key] + value) / 2)
    before = [Run(tmp_path / name).metrics()[0]["rsum"] for name in ("averaged", "plain")]
    assert before[0] == before[1]  # the average has not begun


def test_the_average_of_the_weights_is_what_is_kept(store, tmp_path, monkeypatch):
    """Against the recursion, written out over the weights after every step."""
    after, step = [], torch.optim.AdamW.step

    def noted(self, *arguments, **options):
        done = step(self, *arguments, **options)
        after.append([p.detach().clone() for group in self.param_groups for p in group["params"]])
        return done

    monkeypatch.setattr(torch.optim.AdamW, "step", noted)
    train(store, recipe_of("vsepp", 1, "optimizer.ema=0.8", "optimizer.lr=0.05"), tmp_path / "run", device="cpu")
    average = [weights.double() for weights in after[0]]
    for weights in after[1:]:
        average = [0.8 * old + 0.2 * new.double() for old, new in zip(average, weights, strict=True)]
    kept, state = load_file(tmp_path / "run" / "model.safetensors"), state_of(tmp_path / "run")["model"]
    found = sorted((t.double() for t in kept.values()), key=lambda t: (t.numel(), t.sum().item()))
    expected = sorted(average, key=lambda t: (t.numel(), t.sum().item()))
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one.flatten(), other.flatten(), rtol=1e-5, atol=1e-6)
    assert len(after) > 3
    assert any(not torch.equal(kept[name], state[name]) for name in kept)


def test_it_stops_when_nothing_gets_better(store, tmp_path, caplog):
    recipe = recipe_of("vsepp", 20, "optimizer.lr=0", "schedule.patience=3")
    summary = train(store, recipe, tmp_path / "run", device="cpu")
    assert (summary.epochs, summary.trained, summary.best_epoch) == (4, 4, 1)
    assert "stopped after epoch 4 of 20: none of the last 3 was better" in caplog.text
    assert "swa_epochs" not in caplog.text
    assert train(store, recipe, tmp_path / "run", device="cpu", resume=True).trained == 0
    averaging = recipe_of("vsepp", 20, "optimizer.lr=0", "schedule.patience=3", "optimizer.swa_epochs=2")
    train(store, averaging, tmp_path / "averaging", device="cpu")
    assert "optimizer.swa_epochs had not begun" in caplog.text


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
    noisy = ["data.unit=image", "adapter.grid.dropout=0.5", "adapter.words.dropout=0.5"]
    summary = train(store, recipe_of("vsepp", 2, *noisy), tmp_path / "run", device="cpu")
    assert len(set(seeds)) == len(seeds) == 6
    assert all(modes)  # after a validation, too
    assert times == pytest.approx([0, 1 / 3, 2 / 3, 1, 4 / 3, 5 / 3])
    (result,) = evaluate([tmp_path / "run"], split="val", device="cpu").results
    assert result.rsum == pytest.approx(summary.best_rsum)  # what is validated has no dropout


@pytest.mark.parametrize("clip", [0.01, 0.02])
def test_a_step_is_no_longer_than_what_it_is_clipped_to(store, tmp_path, clip):
    plain = ["optimizer.name=sgd", "optimizer.momentum=0", "optimizer.weight_decay=0", "schedule.name=constant"]
    settings = [*plain, "optimizer.lr=1", "data.unit=image", "data.batch_size=100", f"optimizer.clip={clip}"]
    recipe = recipe_of("vsepp", 1, *settings)
    train(store, recipe, tmp_path / "run", device="cpu")
    model, *_ = learner(FeatureCache.open(store), recipe)
    first, after = model.state_dict(), load_file(tmp_path / "run" / "model.safetensors")
    step = sum((after[name] - value).double().square().sum() for name, value in first.items()).sqrt()
    assert step.item() == pytest.approx(clip, rel=1e-3)


@pytest.mark.parametrize("clip", ["null", "2"])
def test_an_epoch_in_which_nothing_learns_is_one_of_float16_too(store, tmp_path, monkeypatch, clip):
    scaled = torch.amp.GradScaler
    monkeypatch.setattr(torch.amp, "GradScaler", lambda device, enabled: scaled(device, enabled=True))
    waiting = [
        "optimizer.image_adapter_lr=0",
        "optimizer.text_adapter_lr=0",
        "loss.infonce.learned=false",
        "loss.infonce.logarithm=false",
    ]
    small = ["model.dim=16", "data.batch_size=16", "schedule.epochs=2", f"optimizer.clip={clip}"]
    train(store, load_recipe("linear", [*small, *waiting]), tmp_path / "run", device="cpu")
    first, second = (line["rsum"] for line in Run(tmp_path / "run").metrics())
    assert first == second


def test_word_vectors_are_the_first_weights_and_stay_in_the_run(store, tmp_path, caplog):
    vocabulary, path = FeatureCache.open(store).caption_set().vocabulary, tmp_path / "vectors.txt"
    path.write_text("".join(f"{word} {' '.join(['0.25'] * 8)}\n" for word in vocabulary[1:4]))
    recipe = recipe_of("vsepp", 1, f"adapter.words.vectors={path}", "adapter.words.train_vectors=false")
    train(store, recipe, tmp_path / "run", device="cpu")
    assert f"words without a vector in {path}: {len(vocabulary) - 3} of {len(vocabulary)}\n" in caplog.text
    path.unlink()
    embedding = Run(tmp_path / "run").model(torch.device("cpu")).text.adapter.embedding.weight
    assert torch.equal(embedding[1:4], torch.full((3, 8), 0.25))
    assert evaluate([tmp_path / "run"], split="val").results[0].rsum > 0
    with pytest.raises(VectorsError, match=r"vectors\.txt"):
        train(store, recipe, tmp_path / "other", device="cpu")
    assert not (tmp_path / "other").exists()


def test_given_word_vectors_learn_when_they_are_no_longer_frozen(store, tmp_path):
    (tmp_path / "vectors.txt").write_text(f"{FeatureCache.open(store).caption_set().vocabulary[1]} 1 2 3 4 5 6 7 8\n")
    settings = (
        f"adapter.words.vectors={tmp_path / 'vectors.txt'}",
        "adapter.words.vectors_frozen=1",
        "optimizer.ema=0",
    )
    words = []
    for epochs in (1, 2):
        recipe = recipe_of("vsepp", epochs, *settings)
        train(store, recipe, tmp_path / str(epochs), device="cpu")
        state = Run(tmp_path / str(epochs)).load_checkpoint()["state"]
        words.append(state["model"]["text.adapter.embedding.weight"])
    assert torch.equal(words[0][1], torch.arange(1.0, 9))
    assert not torch.equal(words[0], words[1])


def test_the_statistics_of_the_training_split_stay_in_the_run(tmp_path):
    url = make_store(tmp_path / "s.zarr", image="grid", text="tokens")
    settings = [f"adapter.{kind}.standardize=true" for kind in ("grid", "tokens")]
    train(url, recipe_of("vsepp", 1, *settings), tmp_path / "run", device="cpu")
    assert Run(tmp_path / "run").vocabulary is None
    model, cache = Run(tmp_path / "run").model(torch.device("cpu")), FeatureCache.open(url)
    fields = {"image_fields": {"global"}, "caption_fields": {"local"}}
    split = stored_batches(cache.image_set(), cache.caption_set(), "train", **fields)
    images = torch.cat([part.global_.double() for part in split.image_features(7)])
    torch.testing.assert_close(model.image.adapter.global_input.mean.double(), images.mean(0), atol=1e-6, rtol=1e-5)
    captions = [(part.local, row, n) for part in split.caption_features(7) for row, n in enumerate(part.length)]
    states, found = torch.cat([local[row, :n].double() for local, row, n in captions]), model.text.adapter.rows_input
    torch.testing.assert_close(found.deviation.double(), states.std(0, correction=0), atol=1e-6, rtol=1e-4)
