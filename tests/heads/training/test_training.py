"""Training on a small store: it learns, it repeats itself, and stopping it anywhere changes nothing."""

import json
import os
import resource
import shutil
import signal
import subprocess
import sys
import time
from contextlib import contextmanager
from copy import deepcopy
from pathlib import Path

import numpy as np
import pytest
import torch
from click.testing import CliRunner
from safetensors.torch import load_file
from small_store import make_store
from torch import nn

from xret.cli.demo import demo
from xret.cli.train_head import train_head
from xret.heads.evaluation.evaluation import evaluate
from xret.heads.model import FeatureFacts, build_losses, build_model, feature_facts
from xret.heads.recipes.blocks import Optimizer, Schedule
from xret.heads.recipes.recipe import load_recipe
from xret.heads.runs.run import Run
from xret.heads.training import training
from xret.heads.training.objective import same_text, same_texts
from xret.heads.training.optimisation import build_optimizer, drop_frozen, learning_rate, warmup
from xret.heads.training.training import train
from xret.pipeline.cache import FeatureCache
from xret.pipeline.errors import CacheError, RecipeError, RunError, VectorsError
from xret.pipeline.reading.batches import Batches, stored_batches

pytestmark = pytest.mark.usefixtures("one_thread")

SMALL = ["model.dim=16", "data.batch_size=16", "adapter.words.word_dim=8", "optimizer.lr=0.01"]
WORDS = FeatureFacts("words", None, None, 11)
HEADS = [f"aggregator.{side}.head_dim=16" for side in ("image", "text")]


DIVERGING = [f"optimizer.{key}=1e6" for key in ("lr", "adapter_lr", "aggregator_lr", "image_adapter_lr")]


def recipe_of(name="setdiv", epochs=3, *settings):
    heads = [*HEADS, "optimizer.aggregator_lr=0.5"] if name == "setdiv" else []
    return load_recipe(name, [*SMALL, *heads, f"schedule.epochs={epochs}", *settings])


@pytest.fixture(scope="module")
def store(tmp_path_factory):
    return make_store(tmp_path_factory.mktemp("store") / "small.zarr")


def numbers(run):
    """All that must repeat: metrics without times, weights, state, best epoch."""
    lines = [{k: v for k, v in line.items() if k != "seconds"} for line in Run(run).metrics()]
    info = Run(run).info.best_epoch, Run(run).info.best_rsum
    state = torch.load(run / "state.pt", weights_only=True)
    return lines, info, load_file(run / "model.safetensors"), state


def assert_equal(first, second, path=""):
    assert type(first) is type(second), path
    if isinstance(first, torch.Tensor):
        assert torch.equal(first, second), path
    elif isinstance(first, dict):
        assert first.keys() == second.keys(), path
        for key in first:
            assert_equal(first[key], second[key], f"{path}.{key}")
    elif isinstance(first, list | tuple):
        assert len(first) == len(second), path
        for index, pair in enumerate(zip(first, second, strict=True)):
            assert_equal(*pair, f"{path}[{index}]")
    else:
        assert first == second, path


@pytest.fixture(scope="module")
def uninterrupted(store, tmp_path_factory):
    run = tmp_path_factory.mktemp("runs") / "whole"
    train(store, recipe_of(), run, device="cpu", seed=3)
    return run


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
    expected = {"run.json", "recipe.yaml", "config.json", "model.safetensors", "state.pt", "metrics.jsonl"}
    assert names == {*expected, "vocabulary.json", "train.log"}
    info = json.loads((uninterrupted / "run.json").read_text())
    cache = FeatureCache.open(store)
    assert info["store"] == store
    assert info["image_set"] == cache.image_set().name
    assert info["fingerprints"]["text"] == cache.caption_set().fingerprint
    assert set(info["versions"]) == {"xret", "torch", "python"}
    lines = [json.loads(line) for line in (uninterrupted / "metrics.jsonl").read_text().splitlines()]
    assert [line["epoch"] for line in lines] == [1, 2, 3]
    assert [line["step"] for line in lines] == [3, 6, 9]
    assert set(lines[0]) == {"epoch", "step", "loss", "parts", "lr", "rsum", "seconds"}
    best = max(lines, key=lambda line: line["rsum"])
    assert (info["best_epoch"], info["best_rsum"]) == (best["epoch"], best["rsum"])
    assert load_recipe(str(uninterrupted / "recipe.yaml")) == recipe_of()
    assert tuple(json.loads((uninterrupted / "vocabulary.json").read_text())) == cache.caption_set().vocabulary


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
    with pytest.raises(RunError, match=r"otherwise: fingerprints\.image is .*; image_set is [^;]*$"):
        train(other, recipe_of(), uninterrupted, device="cpu", seed=3, resume=True)


def test_a_damaged_state_is_named(store, tmp_path):
    train(store, recipe_of("vsepp", 1), tmp_path / "run", device="cpu")
    (tmp_path / "run" / "state.pt").write_bytes(b"half")
    with pytest.raises(RunError, match=r"state\.pt is missing or damaged"):
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
    from xret.heads.training.training import Loop

    original, left = Loop._validate, []

    def validate(*arguments):
        if not left:
            raise KeyError
        if left.pop() == "interrupt":
            raise KeyboardInterrupt
        return original(*arguments)

    monkeypatch.setattr(Loop, "_validate", validate)
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


@contextmanager
def small_disk(size):
    """Let no file grow beyond `size` bytes: writing fails as on a full disk."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def test_a_full_disk_is_a_sentence_and_leaves_nothing_half_written(store, uninterrupted, tmp_path):
    shutil.copytree(uninterrupted, tmp_path / "run")
    run = Run(tmp_path / "run")
    before = (run.path / "state.pt").read_bytes()
    state = {"epoch": 4, "model": torch.zeros(1 << 20)}
    with small_disk(1 << 20), pytest.raises(RunError, match=r"state\.pt cannot be written"):
        run.save_epoch(state, {"epoch": 4}, 1, 0.0)
    assert (run.path / "state.pt").read_bytes() == before
    quiet = recipe_of("setdiv", 3, "runtime.cache=pinned")  # what is printed goes to a file too
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
    with pytest.raises(RunError, match="manifest_sha256 is "):
        train(other, recipe_of("vsepp", 1), tmp_path / "run", device="cpu", resume=True)


def test_a_seed_is_one_that_torch_can_take(store, tmp_path):
    for command, words in ((train_head, [store, "--recipe", "vsepp", "--out"]), (demo, ["--out"])):
        result = CliRunner().invoke(command, [*words, str(tmp_path / "run"), "--seed", str(2**64)])
        assert result.exit_code == 2
        assert "is not in the range" in result.output
    words = [store, "--recipe", "vsepp", "--out", str(tmp_path / "run"), "--seed", str(2**63 - 1)]
    words += [word for setting in [*SMALL, "schedule.epochs=1"] for word in ("--set", setting)]
    assert CliRunner().invoke(train_head, words, catch_exceptions=False).exit_code == 0


def test_splits_that_are_needed(tmp_path):
    without = make_store(tmp_path / "a.zarr", val=0)
    with pytest.raises(
        CacheError, match=r"no split 'val', which training needs to choose its best epoch .*merge_splits"
    ):
        train(without, recipe_of(), tmp_path / "run", device="cpu")
    without = make_store(tmp_path / "c.zarr", train=0)
    with pytest.raises(CacheError, match=r"no split 'train', which training needs to learn from \(it has val, test\)"):
        train(without, recipe_of(), tmp_path / "run", device="cpu")
    single = make_store(tmp_path / "b.zarr", train=1)
    with pytest.raises(RunError, match=r"split 'train' of .* has a single usable image"):
        train(single, recipe_of(), tmp_path / "run", device="cpu")
    assert not (tmp_path / "run").exists()


def test_an_unfinished_split_is_refused(tmp_path):
    url = make_store(tmp_path / "a.zarr")
    cache = FeatureCache.open(url)
    images = cache.image_set()
    cache.store.open_array(f"{images.path}/done", writable=True)[images.blocks.of_split("val")[1]] = 0
    with pytest.raises(CacheError, match="split 'val' of 'grid@"):
        train(url, recipe_of(), tmp_path / "run", device="cpu")


def test_precision(store, tmp_path):
    with pytest.raises(RunError, match="float16 needs a GPU"):
        train(store, recipe_of("vsepp", 1, "runtime.precision=float16"), tmp_path / "run", device="cpu")
    recipe = recipe_of("vsepp", 2, "runtime.precision=bfloat16")
    assert train(store, recipe, tmp_path / "run", device="cpu").trained == 2
    weights = load_file(tmp_path / "run" / "model.safetensors")
    assert {tensor.dtype for tensor in weights.values()} == {torch.float32}


def test_a_recipe_that_does_not_fit_leaves_nothing_behind(store, tmp_path):
    with pytest.raises(RecipeError, match=r"aggregator\.image: .*heads"):
        train(
            store, recipe_of("setdiv", 1, "aggregator.image.heads=3", "aggregator.image.head_dim=null"), tmp_path / "r"
        )
    with pytest.raises(CacheError, match="no feature set fits 'resnet18'"):
        train(store, recipe_of("setdiv", 1, "data.image=resnet18"), tmp_path / "r")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("name", ["cosine", "step"])
def test_learning_rates_are_those_of_torch(name):
    schedule = Schedule(name=name, epochs=12, step=5, gamma=0.3)
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=0.7)
    if name == "cosine":
        reference = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 12)
    else:
        reference = torch.optim.lr_scheduler.StepLR(optimizer, 5, 0.3)
    for epoch in range(12):
        assert learning_rate(schedule, 0.7, epoch) == pytest.approx(optimizer.param_groups[0]["lr"], rel=1e-9)
        optimizer.step()
        reference.step()


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
    assert not (tmp_path / "run" / "vocabulary.json").exists()


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no CUDA device")
@pytest.mark.parametrize("precision", ["float32", "bfloat16", "float16"])
def test_a_gpu_repeats_itself(store, tmp_path, precision):
    recipe = recipe_of("setdiv", 4, f"runtime.precision={precision}")
    for name in ("one", "other"):
        train(store, recipe, tmp_path / name, device="cuda")
    assert_equal(numbers(tmp_path / "one"), numbers(tmp_path / "other"))


def test_the_learning_rate_warms_up_step_by_step():
    schedule = Schedule(epochs=10, warmup_after=1, warmup_epochs=2)
    moments = [0, 0.5, 1, 1.5, 2, 2.75, 3, 9]
    assert [warmup(schedule, now) for now in moments] == [1, 1, 0, 0.25, 0.5, 0.875, 1, 1]
    assert warmup(Schedule(), 0) == 1


def test_a_frozen_component_stays_what_it_was(store, tmp_path):
    weights = {}
    for frozen in (0, 1):
        recipe = recipe_of(
            "setdiv", 1, f"optimizer.aggregator_frozen={frozen}", "optimizer.weight_decay=0.1", "schedule=step"
        )
        train(store, recipe, tmp_path / str(frozen), device="cpu")
        weights[frozen] = torch.load(tmp_path / str(frozen) / "state.pt", weights_only=True)["model"]
    cache = FeatureCache.open(store)
    torch.manual_seed(0)
    first = build_model(recipe, feature_facts(cache.image_set()), feature_facts(cache.caption_set())).state_dict()
    for name, value in first.items():
        learns = ".aggregator." not in name
        assert torch.equal(weights[1][name], value) is not learns, name
    assert not torch.equal(weights[0]["image.aggregator.initial_slots"], first["image.aggregator.initial_slots"])


def test_captions_with_the_text_of_a_positive_are_no_negatives():
    positives = torch.tensor([[1, 1, 0, 0, 0], [0, 0, 1, 1, 0], [0, 0, 0, 0, 1]]).bool()
    text = torch.tensor([7, 8, 8, 9, 9])
    expected = torch.tensor([[0, 0, 1, 0, 0], [0, 1, 0, 0, 1], [0, 0, 0, 1, 0]]).bool()
    assert torch.equal(same_text(positives, text), expected)


NOT_HARDEST = "loss.triplet.negatives=all"


def test_equal_texts_are_negatives_left_out_or_positives(tmp_path):
    url = make_store(tmp_path / "s.zarr")
    cache = FeatureCache.open(url)
    fields = {"image_fields": {"local"}, "caption_fields": {"token"}}
    numbers_of = same_texts(stored_batches(cache.image_set(), cache.caption_set(), "train", **fields))
    texts = cache.caption_texts(0, len(numbers_of))
    assert [texts.index(text) for text in texts] == [numbers_of.tolist().index(n) for n in numbers_of.tolist()]
    lines = {}
    for choice in ("negative", "excluded", "positive"):
        recipe = recipe_of("vsepp", 1, f"loss.same_text={choice}", "data.batch_size=200", NOT_HARDEST)
        train(url, recipe, tmp_path / choice, device="cpu")
        lines[choice] = Run(tmp_path / choice).metrics()[0]["loss"]
    assert len(set(texts)) < len(texts)  # pictures of the same things are described in the same words
    assert lines["excluded"] < lines["negative"]
    assert lines["positive"] != lines["excluded"]


def test_word_vectors_are_the_first_weights_and_stay_in_the_run(store, tmp_path, capsys):
    vocabulary = FeatureCache.open(store).caption_set().vocabulary
    known = vocabulary[1:4]
    path = tmp_path / "vectors.txt"
    path.write_text("".join(f"{word} {' '.join(['0.25'] * 8)}\n" for word in known))
    settings = [f"adapter.words.vectors={path}", "adapter.words.train_vectors=false"]
    train(store, recipe_of("vsepp", 1, *settings), tmp_path / "run", device="cpu")
    assert f"words without a vector in {path}: {len(vocabulary) - 3} of {len(vocabulary)}\n" in capsys.readouterr().err
    path.unlink()
    embedding = Run(tmp_path / "run").model(torch.device("cpu")).text.adapter.embedding.weight
    assert torch.equal(embedding[1:4], torch.full((3, 8), 0.25))
    assert evaluate([tmp_path / "run"], split="val").results[0].rsum > 0
    with pytest.raises(VectorsError, match=r"vectors\.txt"):
        train(store, recipe_of("vsepp", 1, *settings), tmp_path / "other", device="cpu")
    assert not (tmp_path / "other").exists()


def test_what_does_not_learn_has_no_part_in_clipping():
    weights = [nn.Parameter(torch.zeros(1)) for _ in range(3)]
    groups = [
        {"params": [weight], "factor": factor, "frozen": frozen}
        for weight, factor, frozen in zip(weights, (1.0, 1.0, 0.0), (0, 2, 0), strict=True)
    ]
    optimizer = torch.optim.AdamW(groups)
    for now, kept in ((0.0, [True, False, False]), (1.9, [True, False, False]), (2.0, [True, True, False])):
        for weight in weights:
            weight.grad = torch.ones(1)
        drop_frozen(optimizer, now)
        assert [weight.grad is not None for weight in weights] == kept


def test_the_mean_of_the_last_epochs_is_what_is_kept(store, tmp_path):
    plain = recipe_of("vsepp", 4, "optimizer.lr=0.05")
    averaged = recipe_of("vsepp", 4, "optimizer.lr=0.05", "optimizer.swa_epochs=3")
    ends = []

    class Ended(Run):
        def save_epoch(self, state, *rest):
            ends.append(deepcopy({part: state.get(part) for part in ("model", "average")}))
            super().save_epoch(state, *rest)

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


def test_the_statistics_of_the_training_split_stay_in_the_run(tmp_path):
    url = make_store(tmp_path / "s.zarr", image="grid", text="tokens")
    settings = [f"adapter.{kind}.standardize=true" for kind in ("grid", "tokens")]
    train(url, recipe_of("vsepp", 1, *settings), tmp_path / "run", device="cpu")
    model = Run(tmp_path / "run").model(torch.device("cpu"))
    cache = FeatureCache.open(url)
    fields = {"image_fields": {"global"}, "caption_fields": {"local"}}
    split = stored_batches(cache.image_set(), cache.caption_set(), "train", **fields)
    images = torch.cat([part.global_.double() for part in split.image_features(7)])
    torch.testing.assert_close(model.image.adapter.global_input.mean.double(), images.mean(0), atol=1e-6, rtol=1e-5)
    states = torch.cat(
        [part.local[row, :n].double() for part in split.caption_features(7) for row, n in enumerate(part.length)]
    )
    found = model.text.adapter.rows_input
    torch.testing.assert_close(found.deviation.double(), states.std(0, correction=0), atol=1e-6, rtol=1e-4)
