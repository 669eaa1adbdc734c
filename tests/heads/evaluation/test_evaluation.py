"""Evaluation of runs and ensembles against a plain one; and of runs and stores that were moved, or do not fit."""

import inspect
import json
from dataclasses import asdict, replace

import numpy as np
import pytest
import torch
from captioned_store import make_captioned_store
from plain_evaluation import plain_rsum, plain_similarity, run_on
from scores import score
from small_store import make_store
from small_trainings import recipe_of
from torch.nn.functional import normalize

import xret
from xret.heads.diagnostics import diagnose
from xret.heads.evaluation import scoring
from xret.heads.evaluation.averaging import average
from xret.heads.evaluation.comparison import compare_runs
from xret.heads.evaluation.evaluation import evaluate
from xret.heads.evaluation.metrics import ranks, recall_table, recalls
from xret.heads.evaluation.paper_rows import ROWS, row_of
from xret.heads.evaluation.scoring import Ranker, compare, embed, embed_split, representatives
from xret.heads.modules.similarity import shared
from xret.heads.recipes.recipe import EXPECTED
from xret.heads.runs.features import batches_of, sets_of_run
from xret.heads.runs.run import Run
from xret.heads.training.train import train
from xret.pipeline.errors import CacheError, RunError
from xret.pipeline.reading.features import Features
from xret.pipeline.store import FeatureCache


@pytest.mark.parametrize("name", ["setdiv", "vsepp"])
def test_the_table_is_that_of_a_plain_count(request, store, name):
    run = request.getfixturevalue(name)
    result = evaluate([run], device="cpu")
    assert (result.runs, result.stores) == ((str(run),), (store,))
    (table,) = result.results
    assert table.rsum == pytest.approx(plain_rsum(*plain_similarity(run, store)))
    assert (table.images, table.captions, table.skipped) == (12, 30, 0)
    assert (table.split, table.protocol, table.ties) == ("test", "full", "pessimistic")
    assert (table.log_circular_variance is None) == (name == "vsepp")
    written = json.loads(json.dumps(result.to_dict()))
    assert (written["run"], written["store"]) == (str(run), store)
    assert written["results"] == [asdict(table)]


@pytest.mark.parametrize("captions", [20, 10])  # MSR-VTT, VATEX
def test_many_captions_an_image(vsepp, tmp_path, captions):
    store = make_captioned_store(tmp_path / "videos.zarr", captions=captions, order=range(6))
    (table,) = evaluate([vsepp], store=store, device="cpu").results
    assert (table.images, table.captions, table.captions_per_image) == (6, 6 * captions, captions)
    similarity, owner = plain_similarity(vsepp, store)
    assert owner == [row // captions for row in range(6 * captions)]
    assert table.rsum == pytest.approx(plain_rsum(similarity, owner))
    assert table.mean_recall == pytest.approx(table.rsum / 6)
    assert f"6 images, {6 * captions} captions ({captions}.00 an image)" in str(table)


def test_the_papers_number_stands_beside_ours(vsepp, tmp_path):
    flickr = make_captioned_store(tmp_path / "flickr.zarr", order=range(1000), captions=1, dataset="flickr30k")
    (table,) = evaluate([vsepp], store=flickr, device="cpu").results
    assert table.paper_rsum == Run(vsepp).recipe.expected["f30k"] == 409.8
    last = f"the paper's RSUM 409.80, difference {table.rsum - 409.8:+.2f}"
    assert str(table).splitlines()[-1].startswith(f"{last} (the paper trains its encoders")  # of vsepp
    assert str(replace(table, frozen=False)).splitlines()[-1] == last
    assert evaluate([vsepp, vsepp], store=flickr, device="cpu").results[0].paper_rsum is None
    fewer = make_captioned_store(tmp_path / "fewer.zarr", order=range(999), captions=1, dataset="flickr30k")
    assert evaluate([vsepp], store=fewer, device="cpu").results[0].paper_rsum is None


def test_recipes_expect_values_of_the_rows_whose_number_of_images_is_known():
    known = {name: (*row[1:],) for name, row in ROWS.items() if row.images is not None}
    assert known == {
        "coco_1k": ("coco", "1k-folds", 5000),
        "coco_5k": ("coco", "full", 5000),
        "f30k": ("flickr30k", "full", 1000),
    }
    assert set(known) == set(EXPECTED)
    assert [row_of("coco", "full"), row_of("vatex", "full"), row_of("vatex", "1k-folds")] == ["coco_5k", "vatex", None]


def test_failed_samples_are_left_out_and_counted(setdiv, folder):
    other = make_store(folder / "broken.zarr", broken=(61, 64))
    (table,) = evaluate([setdiv], store=other, device="cpu").results
    assert (table.images, table.captions, table.skipped) == (10, 25, 2)
    expected, owner = plain_similarity(setdiv, other)
    assert table.rsum == pytest.approx(plain_rsum(expected, owner))
    scores, cache = score(setdiv, store=other), FeatureCache.open(other)
    torch.testing.assert_close(scores.similarity, expected)
    assert scores.caption_image.tolist() == owner
    good = [row for row in range(60, 72) if row not in (61, 64)]
    assert scores.file_names == [f"{row}.jpg" for row in good]
    texts = zip(cache.caption_image, cache.caption_texts(0, cache.captions), strict=True)
    assert scores.texts == [text for image, text in texts if image in good]


def test_memory_that_does_not_suffice_is_a_sentence(setdiv, monkeypatch):
    def embed(*_):
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(scoring, "embed_all", embed)
    with pytest.raises(RunError, match="split 'test' does not fit in the memory of cpu; evaluate a smaller split"):
        evaluate([setdiv], device="cpu")


def test_blocks_change_nothing(setdiv, monkeypatch):
    whole = evaluate([setdiv], device="cpu")
    monkeypatch.setattr(shared, "block_side", lambda *_: 7)
    monkeypatch.setattr(scoring, "BATCH", 5)
    assert evaluate([setdiv], device="cpu").results[0].rsum == whole.results[0].rsum


def test_captions_of_one_text_and_one_embedding_are_one():
    base = torch.tensor([[1.0, 2.0], [3.0, 4.0]]).repeat(3, 1)  # rows 0, 2, 4 and rows 1, 3, 5 are alike
    base[2] *= 1 + 1e-5  # another rounding
    base[4] *= 1.1  # another embedding
    texts = ["a", "b", "a", "c", "a", "b"]
    assert representatives(base, texts).tolist() == [0, 1, 0, 3, 4, 1]
    assert representatives(base[:, None].repeat(1, 3, 1), texts).tolist() == [0, 1, 0, 3, 4, 1]


def test_ties_of_equal_captions_are_exact(setdiv):
    torch.manual_seed(0)
    model = Run(setdiv).model(torch.device("cpu"))
    captions = torch.randn(60, 4, 16)
    captions[1::2] = captions[::2] * (1 + 1e-5 * torch.randn(30, 1, 1))
    texts = [str(row // 2) for row in range(60)]
    similarity = compare(model, torch.randn(7, 4, 16), captions, texts)
    assert torch.equal(similarity[:, ::2], similarity[:, 1::2])
    # Not by chance: compared one by one, they differ.
    other = compare(model, torch.randn(7, 4, 16), captions, [str(row) for row in range(60)])
    assert not torch.equal(other[:, ::2], other[:, 1::2])


def test_a_direction_ranks_as_by_the_similarity_of_that_direction(setdiv, vsepp, trained):
    ranker = Ranker(setdiv, device="cpu")
    for direction in ("image", "caption"):
        (found,) = (told := evaluate(setdiv, direction=direction, device="cpu")).results
        assert told.to_dict()["direction"] == direction and f"direction {direction}" in str(told)
        ranker.model.compare.direction = direction
        expected = recall_table(*embed_split(ranker, "test").ranks())
        assert (found.image_to_text, found.rsum) == (expected.image_to_text, expected.rsum)
    for run, direction in ((vsepp, "image"), (trained("scan"), "caption"), (setdiv, "images")):
        with pytest.raises(RunError, match="have a direction"):
            evaluate(run, direction=direction, device="cpu")
    with pytest.raises(RunError, match="leave calibration out"):
        evaluate(setdiv, direction="caption", calibration=True, device="cpu")


def test_an_ensemble_is_the_mean_of_its_similarities_on_one_store_or_two(store, setdiv, vsepp, folder):
    regions = make_store(folder / "regions.zarr", image="roi")
    train(regions, recipe_of("vsepp", 2), folder / "regions", device="cpu")
    first, owner = plain_similarity(vsepp, store)
    for other, there, stores in ((setdiv, store, store), (folder / "regions", regions, [store, regions])):
        result = evaluate([vsepp, other], device="cpu")
        assert (result.to_dict()["run"], result.to_dict()["store"]) == ([str(vsepp), str(other)], stores)
        second, _ = plain_similarity(other, there)
        assert result.results[0].rsum == pytest.approx(plain_rsum((first + second) / 2, owner))
        assert result.results[0].log_circular_variance is None


def test_an_ensemble_goes_by_ids_not_by_order(setdiv, vsepp, tmp_path):
    there = make_captioned_store(tmp_path / "there.zarr", captions=3)
    turned = make_captioned_store(tmp_path / "turned.zarr", captions=3, order=[7, *range(7), *range(11, 7, -1)])
    runs = [run_on(setdiv, there, tmp_path / "one"), run_on(vsepp, turned, tmp_path / "two")]
    (table,) = evaluate(runs, device="cpu").results
    first, second = (score(run) for run in runs)
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


def test_words_of_another_store_are_read_with_the_vocabulary_of_the_run(setdiv, folder):
    other = make_store(folder / "other.zarr", test=20, words="unheard")
    assert (FeatureCache.open(other).caption_set().fingerprint,) != Run(setdiv).info.fingerprints("text")
    result = evaluate([setdiv], store=other, device="cpu")
    assert (result.stores, result.results[0].images) == ((other,), 20)
    assert result.results[0].rsum == pytest.approx(plain_rsum(*plain_similarity(setdiv, other)))


def test_features_that_are_not_those_of_the_run_are_refused(setdiv, store, folder):
    other = make_store(folder / "weights.zarr", weights="b")
    with pytest.raises(RunError) as caught:
        evaluate([setdiv], store=other, device="cpu")
    (needed,), there = Run(setdiv).info.names("image"), FeatureCache.open(other).image_set().name
    assert f"{other} has no image features equal to '{needed}' (it has {there})" in str(caught.value)
    states = make_store(folder / "states.zarr", text="tokens")
    train(states, recipe_of("vsepp", 2), folder / "states", device="cpu")
    with pytest.raises(RunError, match=r"no text features equal to 'states@.*' \(it has words@"):
        evaluate([folder / "states"], store=store, device="cpu")


def test_a_store_or_features_for_none_of_them_are_refused(setdiv, store):
    with pytest.raises(RunError, match="`store` is another store for a run"):
        evaluate(store, store=store)
    for look in (evaluate, compare_runs, diagnose, xret.load):
        runs = (setdiv, setdiv) if look is compare_runs else (setdiv,)
        with pytest.raises(RunError, match="reads the sets that it was trained on; leave `features` out"):
            look(*runs, features="grid,words")


def test_a_store_that_was_moved_is_asked_for(vsepp, store, tmp_path):
    run, gone = run_on(vsepp, str(tmp_path / "gone.zarr"), tmp_path / "run"), str(tmp_path / "gone.zarr")
    with pytest.raises(RunError, match=r"not usable \(.*no feature store.*; name where it is now with `store`"):
        evaluate([run], device="cpu")
    assert evaluate([run], store=store, device="cpu").results
    with pytest.raises(CacheError, match="there is no feature store"):
        evaluate([run], store=gone, device="cpu")


CPU = torch.device("cpu")
# A vector, a set, a Gaussian and a sequence.
KINDS = {"vsepp": [], "setdiv": [], "pcmepp": [], "scan": ["data.unit=image"]}


@pytest.fixture(scope="module")
def several(folder):
    return make_store(folder / "views.zarr", views=3)


@pytest.fixture(scope="module")
def run_of(several, folder):
    def run(name):
        path = folder / f"{name}-of-views"
        if not path.exists():
            train(several, recipe_of(name, 2, *KINDS[name]), path, device="cpu")
        return Run(path)

    return run


@torch.no_grad()
def similarity_of(run, cache, view):
    """Compare the test images in one view, read from the set itself, with the captions as evaluation embeds them."""
    model, images = run.model(CPU), cache.image_set()
    captions = embed(model, batches_of(sets_of_run(run, cache), model, "test", CPU))[1]
    rows = np.arange(*cache.splits["test"])
    local, global_ = (torch.from_numpy(read(rows, view)) for read in (images.local, images.global_))
    features = Features(torch.full((len(rows),), local.shape[1]), local, global_)
    return model.similarity(model.embed_images(features).embedding, captions)


@pytest.mark.parametrize("name", KINDS)
def test_it_is_the_mean_of_the_similarities(run_of, several, name):
    run, cache = run_of(name), FeatureCache.open(several)
    each = [similarity_of(run, cache, view) for view in range(3)]
    assert (each[0] - each[1]).abs().max() > 1e-3
    scores, first = score(run.path, views=3), score(run.path)
    torch.testing.assert_close(scores.similarity, sum(each) / 3, rtol=1e-4, atol=1e-5)
    table = recalls(sum(each) / 3, scores.caption_image, "full", "mean")
    (result,) = evaluate(run.path, views=True, ties="mean", device="cpu").results
    assert result.rsum == pytest.approx(table.rsum)
    torch.testing.assert_close(first.similarity, each[0], rtol=1e-4, atol=1e-5)
    assert scores.log_circular_variance == first.log_circular_variance
    if name == "vsepp":  # of vectors it is the mean of the normalised embeddings
        model = run.model(CPU)
        sets = sets_of_run(run, cache)
        embedded = [embed(model, batches_of(sets, model, "test", CPU, views=(view,))) for view in range(3)]
        mean = torch.stack([normalize(images, dim=1) for images, _ in embedded]).mean(0)
        expected = mean @ normalize(embedded[0][1], dim=1).T
        torch.testing.assert_close(scores.similarity, expected, rtol=1e-4, atol=1e-5)


def test_an_ensemble_takes_each_run_with_the_views_it_has(run_of, vsepp):
    runs = [run_of("vsepp").path, vsepp]
    found = evaluate(runs, views=True, device="cpu")
    assert found.views == (3, 1)
    assert found.to_dict()["views"] == [3, 1]
    assert "mean over 3 and 1 views of each image" in str(found)
    alone = evaluate(runs[0], views=True, device="cpu")
    assert (alone.to_dict()["views"], evaluate(runs[0], device="cpu").views) == (3, (1,))
    scores = [score(run, views=views) for run, views in zip(runs, (3, 1), strict=True)]
    mean = (scores[0].similarity + scores[1].similarity) / 2
    assert found.results[0].rsum == pytest.approx(recalls(mean, scores[0].caption_image, "full", "pessimistic").rsum)


def test_a_set_of_one_view_is_refused(vsepp):
    for ask, runs in ((evaluate, [vsepp]), (compare_runs, [vsepp, vsepp])):
        with pytest.raises(RunError, match=r"'grid@.*has one view of each image.*leave `views` out"):
            ask(*runs, views=True, device="cpu")


@pytest.mark.parametrize("opens", [average, evaluate, compare_runs, Ranker])
def test_code_that_a_run_brings_is_not_run_unless_it_is_trusted(opens):
    assert inspect.signature(opens).parameters["trust"].default is False
