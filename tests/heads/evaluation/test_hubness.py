"""The correction of hubness against QB-Norm's formula in plain numpy."""

import json
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from captioned_store import make_captioned_store
from command_line import run
from plain_evaluation import globals_of, plain_rsum
from scipy.stats import skew
from scores import score
from small_store import make_store

from xret import ablate
from xret.heads.evaluation import evaluation, hubness, scoring
from xret.heads.evaluation.evaluation import evaluate
from xret.heads.evaluation.paper_rows import ROWS, Row
from xret.metrics import inverted_softmax, skewness
from xret.pipeline.errors import RunError
from xret.pipeline.store import FeatureCache


def qb_norm(scores, bank, scale):
    """Equation of the inverted softmax, [Q, N] by a bank [B, N]: exp(scale s) over its sum over the bank."""
    return np.exp(scale * scores) / np.exp(scale * bank).sum(0)


@torch.no_grad()
def corrected(path, split, multiple):
    """Return the scores of both ways, each [I, C], from embeddings of all at once; and the image of each caption.

    The scale is `multiple` over the deviation on val.
    """
    seen, bank, val = (score(path, split=one) for one in (split, "train", "val"))
    images, captions = seen.image.embedding, seen.text.embedding
    own = seen.similarity.double().numpy()
    by_captions, by_images = (
        seen.model.similarity(*pair).double().numpy()
        for pair in ((images, bank.text.embedding), (bank.image.embedding, captions))
    )
    scale = multiple / val.similarity.double().numpy().std()
    to_text, to_image = qb_norm(own, by_images, scale), qb_norm(own.T, by_captions.T, scale).T
    return np.log(to_text) / scale, np.log(to_image) / scale, seen.caption_image.numpy()


def rsum_of(to_text, to_image, owner):
    """Count each way in its own matrix; ties, up to rounding, for the query."""
    best = [to_text[row, owner == row].max() for row in range(len(to_text))]
    own = to_image[owner, range(len(owner))]
    ranks = (
        [np.sum(row[owner != one] > best[one] + 2e-7) for one, row in enumerate(to_text)],
        np.sum(to_image > own + 2e-7, axis=0),
    )
    return sum(100 * np.mean(np.array(way) < k) for way in ranks for k in (1, 5, 10))


def test_the_formula_by_blocks_or_at_once():
    rng = np.random.default_rng(0)
    scores, bank = rng.normal(size=(5, 7)), rng.normal(size=(11, 7))
    found = inverted_softmax(torch.from_numpy(scores), torch.from_numpy(bank), 3.0)
    expected = np.log(11 * qb_norm(scores, bank, 3.0)) / 3
    np.testing.assert_allclose(found, expected)
    blocks = torch.from_numpy(bank).split(4)
    np.testing.assert_allclose(scores + hubness.item_bias(blocks, [1.0, 3.0])[1].numpy(), expected)
    bank[rng.random(bank.shape) < 0.3] = -np.inf  # does not count
    found = hubness.item_bias(torch.from_numpy(bank).split(4), [3.0])[0]
    means = [np.exp(3 * item[np.isfinite(item)]).mean() for item in bank.T]
    np.testing.assert_allclose(found, -np.log(means) / 3)


def test_what_a_head_has_learned_of_an_item_does_not_count(vsepp):
    seen = score(vsepp, split="train")
    similarity, own = seen.similarity.double().numpy(), seen.caption_image.numpy()
    theirs = np.arange(len(similarity))[:, None] == own
    rows = seen.batches.image_rows
    for modality, side, owners, of_item, learned in (
        ("images", seen.image, rows, similarity, theirs),
        ("captions", seen.text, rows[own], similarity.T, theirs.T),
    ):
        found = hubness.learned_bias(seen.ranker, modality, [side.embedding], [2.0], owners=owners)[0]
        means = [np.exp(2 * scores[~mine]).mean() for scores, mine in zip(of_item, learned, strict=True)]
        np.testing.assert_allclose(found, -np.log(means) / 2, atol=1e-5)


def test_skewness_is_that_of_counts_in_a_loop(monkeypatch):
    scores = np.random.default_rng(1).normal(size=(40, 30)) + np.linspace(0, 2, 30)
    counts = np.zeros(30)
    for row in scores:
        counts[np.argsort(-row)[:10]] += 1
    monkeypatch.setattr(hubness, "BLOCK", 100)
    assert skewness(torch.from_numpy(scores)) == pytest.approx(skew(counts))
    assert skewness(torch.zeros(3, 4)) == 0


@pytest.mark.parametrize("name", ["setdiv", "vsepp", "frozen"])
def test_each_scale_is_tried_on_val_and_the_best_is_taken(request, name, tmp_path):
    frozen = name == "frozen"
    path = make_store(tmp_path / "s.zarr", text="tokens", space="one") if frozen else request.getfixturevalue(name)
    found = evaluate(path, device="cpu", ties="optimistic", hubness=True)
    assert found.results == evaluate(path, device="cpu", ties="optimistic").results
    told = found.hubness
    assert list(told.val_rsum) == ["none", *(f"{one:g}" for one in hubness.MULTIPLES)]
    for multiple in hubness.MULTIPLES:
        assert told.val_rsum[f"{multiple:g}"] == pytest.approx(rsum_of(*corrected(path, "val", multiple)))
    assert told.val_rsum["none" if told.scale is None else f"{told.scale:g}"] == max(told.val_rsum.values())
    if told.scale is None:
        assert [one.rsum for one in told.results] == [one.rsum for one in found.results]
    else:
        assert told.results[0].rsum == pytest.approx(rsum_of(*corrected(path, "test", told.scale)))


def test_an_ensemble_has_the_mean_of_the_corrected_scores(setdiv, vsepp):
    told = evaluate([setdiv, vsepp], device="cpu", ties="optimistic", hubness=True).hubness
    for multiple in hubness.MULTIPLES:
        first, second = (corrected(run, "val", multiple) for run in (setdiv, vsepp))
        mean = [(one + other) / 2 for one, other in zip(first[:2], second[:2], strict=True)]
        assert told.val_rsum[f"{multiple:g}"] == pytest.approx(rsum_of(*mean, first[2]))
    assert len(told.scales) == (0 if told.scale is None else 2)


def test_an_ensemble_matches_the_biases_of_stores_in_other_orders(monkeypatch):
    """Numbers by hand: two rankers of four images with two captions each, the second in another order."""
    rng, order = np.random.default_rng(0), np.array([2, 0, 3, 1])
    spoken = np.concatenate([[2 * row, 2 * row + 1] for row in order])
    scores, ofs = rng.normal(size=(2, 4, 8)), [(rng.normal(size=4), rng.normal(size=8)) for _ in range(2)]
    seen, biases = {}, {}
    for name, rows, columns in (("first", range(4), range(8)), ("second", order, spoken)):
        number = len(seen)
        facts = {"ids": [str(row) for row in rows], "texts": [str(column) for column in columns], "file_names": []}
        facts |= {"sentid": np.array(columns), "cocoid": None, "skipped": 0, "log_circular_variance": None}
        matrix, owner = torch.from_numpy(scores[number][rows][:, columns]), torch.arange(4).repeat_interleave(2)
        side = scoring.Side(torch.empty(0), None, torch.empty(0))
        seen[name] = scoring.Scored(None, None, side, side, "val", similarity=matrix, caption_image=owner, **facts)
        biases[name] = [torch.from_numpy(of[list(at)]) for of, at in zip(ofs[number], (rows, columns), strict=True)]

    def biases_of(scored, scales):
        name = next(name for name, one in seen.items() if one is scored)
        return tuple(torch.outer(torch.tensor(scales, dtype=torch.float64), bias) for bias in biases[name])

    monkeypatch.setattr(evaluation, "embed_split", lambda ranker, *_, **__: seen[ranker.name])
    monkeypatch.setattr(evaluation, "biases_of", biases_of)
    kept = scores.copy()
    rsums = evaluation.choose_scale([SimpleNamespace(name=name) for name in seen])[2]
    for multiple in hubness.MULTIPLES:
        mean = (
            sum(
                one + multiple / one.std() * (image[:, None] + text)
                for one, (image, text) in zip(kept, ofs, strict=True)
            )
            / 2
        )
        assert rsums[f"{multiple:g}"] == pytest.approx(plain_rsum(mean, np.repeat(range(4), 2).tolist()))
    assert len({*rsums.values()}) > 1


def test_papers_values_stand_beside_none_that_are_corrected(vsepp, store, monkeypatch):
    monkeypatch.setitem(ROWS, "f30k", Row("F30K", "small", "full", 12))
    found = evaluate(vsepp, device="cpu", hubness=True)
    assert (found.results[0].paper_rsum, found.hubness.results[0].paper_rsum) == (409.8, None)


def test_views_are_compared_in_their_mean(tmp_path):
    store = make_store(tmp_path / "views.zarr", text="tokens", space="one", views=2)
    told = evaluate(store, device="cpu", ties="optimistic", views=True, hubness=True).hubness

    def unit(rows):
        return rows / np.linalg.norm(rows, axis=1, keepdims=True)

    def images(split, views):
        return np.mean([unit(globals_of(store, split, view=view)[0]) for view in views], 0)

    def captions(split):
        return unit(globals_of(store, split)[1])

    own, owner = images("val", (0, 1)) @ captions("val").T, score(store, split="val").caption_image.numpy()
    for multiple in hubness.MULTIPLES:
        scale = multiple / own.std()
        to_text = np.log(qb_norm(own, images("train", (0,)) @ captions("val").T, scale)) / scale
        to_image = np.log(qb_norm(own.T, captions("train") @ images("val", (0, 1)).T, scale)).T / scale
        assert told.val_rsum[f"{multiple:g}"] == pytest.approx(rsum_of(to_text, to_image, owner))


def test_the_command_tells_both_tables(vsepp):
    told = json.loads(run("eval", vsepp, "--hubness", "--device", "cpu", "--json").stdout)
    assert set(told["hubness"]) == {"scale", "scales", "val_rsum", "skewness", "results"}
    assert len(told["hubness"]["results"]) == len(told["results"]) == 1


def test_what_it_learns_from_is_not_what_it_is_evaluated_on(vsepp, tmp_path):
    store = FeatureCache.open(evaluate(vsepp, device="cpu").stores[0]).url
    for split in ("train", "val"):
        with pytest.raises(RunError, match="evaluate another split"):
            evaluate(vsepp, split=split, device="cpu", hubness=True)
        with pytest.raises(RunError, match="evaluate another split"):
            ablate(store, recipe="linear", vary={"model.dim": [8]}, out=tmp_path / "a", split=split, hubness=True)
    assert not (tmp_path / "a").exists()
    store = make_captioned_store(tmp_path / "test.zarr")
    with pytest.raises(RunError, match="has no 'train'"):
        evaluate(vsepp, store=store, device="cpu", hubness=True)
