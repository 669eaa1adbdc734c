"""Runs and stores that are evaluated: moved, of others, or damaged."""

import json
import shutil

import pytest
import torch
from earlier_runs import without_digests
from plain_evaluation import plain_rsum, plain_similarity, recipe_of
from safetensors.torch import load_file, save_file
from scores import score
from small_store import make_store

from xret.heads.evaluation.evaluation import evaluate
from xret.heads.runs.run import Run
from xret.heads.training.training import train
from xret.pipeline.cache.feature_cache import FeatureCache
from xret.pipeline.errors import CacheError, RunError

pytestmark = pytest.mark.usefixtures("one_thread")


def test_words_of_another_store_are_read_with_the_vocabulary_of_the_run(setdiv, folder):
    other = make_store(folder / "other.zarr", test=20, words="unheard")
    cache, run = FeatureCache.open(other), Run(setdiv)
    assert cache.caption_set().fingerprint != run.info.fingerprints["text"]
    result = evaluate([setdiv], store=other, device="cpu")
    similarity, owner = plain_similarity(setdiv, other)
    assert result.stores == (other,)
    assert result.results[0].images == 20
    assert result.results[0].rsum == pytest.approx(plain_rsum(similarity, owner))


def test_features_that_are_not_those_of_the_run_are_refused(setdiv, store, folder):
    other = make_store(folder / "weights.zarr", weights="b")
    with pytest.raises(RunError) as caught:
        evaluate([setdiv], store=other, device="cpu")
    needed, there = Run(setdiv).info.image_set, FeatureCache.open(other).image_set().name
    assert f"needs the feature set '{needed}' of images, and {other} has {there}" in str(caught.value)
    states = make_store(folder / "states.zarr", text="tokens")
    train(states, recipe_of("vsepp"), folder / "states", device="cpu")
    with pytest.raises(RunError, match=r"needs the feature set 'states@.*' of captions, and .* has words@"):
        evaluate([folder / "states"], store=store, device="cpu")


def test_a_store_that_was_moved_is_asked_for(folder, tmp_path):
    url = make_store(tmp_path / "before.zarr")
    train(url, recipe_of("vsepp"), tmp_path / "run", device="cpu")
    (tmp_path / "before.zarr").rename(tmp_path / "after.zarr")
    sentence = (
        r"is not there or not usable \(.*before\.zarr: no feature cache is there.*; name where it is now with --store"
    )
    with pytest.raises(RunError, match=sentence):
        evaluate([tmp_path / "run"], device="cpu")
    with pytest.raises(RunError, match=sentence):
        score(tmp_path / "run", device="cpu")
    assert evaluate([tmp_path / "run"], store=str(tmp_path / "after.zarr"), device="cpu").results
    with pytest.raises(CacheError, match="no feature cache is there"):
        evaluate([tmp_path / "run"], store=url, device="cpu")


def test_a_folder_that_is_no_run(tmp_path, setdiv):
    with pytest.raises(RunError, match=r"is no run: it has no run\.json"):
        evaluate([tmp_path], device="cpu")
    shutil.copytree(setdiv, tmp_path / "run")
    (tmp_path / "run" / "model.safetensors").unlink()
    with pytest.raises(RunError, match=r"has lost its model\.safetensors"):
        evaluate([tmp_path / "run"], device="cpu")
    # Killed between its weights and run.json, a run of an earlier version has weights of an unknown epoch.
    (tmp_path / "run" / "model.safetensors").write_bytes((setdiv / "model.safetensors").read_bytes())
    for begun, command in (({}, "train-head"), ({"finetuned": {"epoch": 1}}, "finetune")):
        without_digests(tmp_path / "run", best_epoch=None, **begun)
        with pytest.raises(RunError, match=f"has no finished epoch yet; continue it with `xret {command}"):
            evaluate([tmp_path / "run"], device="cpu")
    (tmp_path / "run" / "config.json").write_text("{")
    with pytest.raises(RunError, match=r"config\.json is missing or damaged"):
        evaluate([tmp_path / "run"], device="cpu")


DAMAGE = [
    ("run.json", "[]"),
    ("run.json", '{"format": "xret-run", "version": 1}'),
    ("run.json", '{"format": "xret-run", "version": 1, "store": 3, "image_set": "", "text_set": ""}'),
    ("run.json", "[" * 100_000),
    ("config.json", "{}"),
    ("config.json", "[]"),
    ("config.json", '{"recipe": {}, "image": {}, "text": {}}'),
    ("vocabulary.json", "{}"),
    ("vocabulary.json", '["<unk>"]'),
    ("vocabulary.json", "of other words"),
]


@pytest.mark.parametrize(("name", "content"), DAMAGE)
def test_a_damaged_file_is_named(tmp_path, setdiv, name, content):
    without_digests(shutil.copytree(setdiv, tmp_path / "run"))
    if content == "of other words":  # as many, but no words
        content = json.dumps([3] * len(Run(setdiv).vocabulary))
    (tmp_path / "run" / name).write_text(content)
    with pytest.raises(RunError, match=rf"run/{name} "):
        evaluate([tmp_path / "run"], device="cpu")


@pytest.mark.parametrize("content", [b"{", b"3\n", b"\xff\n", b"[" * 100_000])
def test_damaged_metrics_are_named(tmp_path, setdiv, content):
    without_digests(shutil.copytree(setdiv, tmp_path / "run"))
    (tmp_path / "run" / "metrics.jsonl").write_bytes(content)
    with pytest.raises(RunError, match=r"metrics\.jsonl is missing or damaged"):
        Run(tmp_path / "run").metrics()


@pytest.mark.parametrize("damage", [b"half", None])
def test_weights_that_do_not_fit(tmp_path, setdiv, vsepp, damage):
    without_digests(shutil.copytree(setdiv, tmp_path / "run"))
    (tmp_path / "run" / "model.safetensors").write_bytes(damage or (vsepp / "model.safetensors").read_bytes())
    with pytest.raises(RunError, match=r"does not fit the run's config\.json or is damaged"):
        evaluate([tmp_path / "run"], device="cpu")


def test_spoilt_weights_are_not_ranked(tmp_path, setdiv):
    without_digests(shutil.copytree(setdiv, tmp_path / "run"))
    weights = load_file(tmp_path / "run" / "model.safetensors")
    weights["image.adapter.layer.bias"][0] = torch.nan
    save_file(weights, tmp_path / "run" / "model.safetensors")
    with pytest.raises(RunError, match="similarities that are not finite"):
        evaluate([tmp_path / "run"], device="cpu")
