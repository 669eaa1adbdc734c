"""Runs and stores that are evaluated: moved, or of others."""

import pytest
from plain_evaluation import plain_rsum, plain_similarity, recipe_of
from scores import score
from small_store import make_store

from xret.heads.evaluation.evaluation import evaluate
from xret.heads.runs.run import Run
from xret.heads.training.train import train
from xret.pipeline.errors import CacheError, RunError
from xret.pipeline.store import FeatureCache

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
        r"is not there or not usable \(.*before\.zarr: there is no feature store.*; name where it is now with --store"
    )
    with pytest.raises(RunError, match=sentence):
        evaluate([tmp_path / "run"], device="cpu")
    with pytest.raises(RunError, match=sentence):
        score(tmp_path / "run", device="cpu")
    assert evaluate([tmp_path / "run"], store=str(tmp_path / "after.zarr"), device="cpu").results
    with pytest.raises(CacheError, match="there is no feature store"):
        evaluate([tmp_path / "run"], store=url, device="cpu")


def test_a_folder_that_is_no_run(tmp_path):
    with pytest.raises(RunError, match=r"is no run: it has no run\.json"):
        evaluate([tmp_path], device="cpu")
