"""Several runs as one: the mean of their similarities, by ids."""

import shutil
from dataclasses import asdict

import pytest
import torch
from captioned_store import make_captioned_store
from plain_evaluation import plain_rsum, plain_similarity, recipe_of, run_on
from scores import score
from small_store import make_store

from xret.heads.evaluation import rankers
from xret.heads.evaluation.evaluation import evaluate
from xret.heads.evaluation.metrics import ranks, recall_table
from xret.heads.runs import features as run_features
from xret.heads.training.train import train
from xret.pipeline.errors import RunError

pytestmark = pytest.mark.usefixtures("one_thread")


def test_an_ensemble_is_the_mean_of_its_similarities(store, setdiv, vsepp):
    result = evaluate([setdiv, vsepp], device="cpu")
    assert result.to_dict()["run"] == [str(setdiv), str(vsepp)]
    first, owner = plain_similarity(setdiv, store)
    second, _ = plain_similarity(vsepp, store)
    assert result.results[0].rsum == pytest.approx(plain_rsum((first + second) / 2, owner))
    assert result.results[0].log_circular_variance is None
    alone, twice = evaluate([vsepp], device="cpu"), evaluate([vsepp, vsepp], device="cpu")
    assert twice.results[0].rsum == alone.results[0].rsum


def test_runs_of_two_stores_are_one_ensemble_by_default(vsepp, folder, store):
    regions = make_store(folder / "regions.zarr", image="roi")
    train(regions, recipe_of("vsepp"), folder / "regions", device="cpu")
    result = evaluate([vsepp, folder / "regions"], device="cpu")
    assert result.to_dict()["store"] == [store, regions]
    first, owner = plain_similarity(vsepp, store)
    second, _ = plain_similarity(folder / "regions", regions)
    assert result.results[0].rsum == pytest.approx(plain_rsum((first + second) / 2, owner))
    with pytest.raises(RunError, match=r"regions needs the feature set 'roi@.*' of images, and .*small\.zarr has grid"):
        evaluate([vsepp, folder / "regions"], store=store, device="cpu")


def test_an_ensemble_goes_by_ids_not_by_order(setdiv, vsepp, tmp_path):
    there = make_captioned_store(tmp_path / "there.zarr", captions=3)
    turned = make_captioned_store(tmp_path / "turned.zarr", captions=3, order=[7, *range(7), *range(11, 7, -1)])
    runs = [run_on(setdiv, there, tmp_path / "one"), run_on(vsepp, turned, tmp_path / "two")]
    (table,) = evaluate(runs, device="cpu").results
    first, second = (score(run, device="cpu") for run in runs)
    mean = torch.empty(12, 36)
    for i, image in enumerate(first.ids):
        for c, caption in enumerate(first.sentid):
            at = second.ids.index(image), second.sentid.tolist().index(caption)
            mean[i, c] = (first.similarity[i, c] + second.similarity[at]) / 2
    expected = recall_table(*ranks(mean, first.caption_image))
    assert {key: getattr(table, key) for key in asdict(expected)} == asdict(expected)
    assert second.caption_image.tolist() != [second.ids.index(first.ids[row]) for row in first.caption_image]


@pytest.mark.parametrize(("change", "counts"), [({"order": range(1, 13)}, "11.*36 and 36"), ({"captions": 2}, "12")])
def test_stores_that_differ_make_no_ensemble(setdiv, vsepp, tmp_path, change, counts):
    there = make_captioned_store(tmp_path / "there.zarr", captions=3)
    other = make_captioned_store(tmp_path / "other.zarr", **{"captions": 3} | change)
    runs = [run_on(setdiv, there, tmp_path / "one"), run_on(vsepp, other, tmp_path / "two")]
    sentence = f"two and .*one cannot be one ensemble: of 12 and 12 images {counts} .* or their stores hold different"
    with pytest.raises(RunError, match=sentence):
        evaluate(runs, device="cpu")


def test_an_ensemble_must_see_the_same_samples(store, setdiv, folder, monkeypatch):
    original = run_features.image_set_of_run

    def one_broken(run, cache):
        found = original(run, cache)
        if run.path.name == "setdiv2":
            found.status[61] = 1
        return found

    shutil.copytree(setdiv, folder / "setdiv2")
    monkeypatch.setattr(rankers, "image_set_of_run", one_broken)
    with pytest.raises(
        RunError, match="cannot be one ensemble: of 11 and 12 images 11 are in both, of 27 and 30 captions 27: "
    ):
        evaluate([setdiv, folder / "setdiv2"], device="cpu")
