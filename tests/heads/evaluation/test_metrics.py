"""Recall against recorded numbers, brute force over all orders of ties, and chance."""

import itertools
import json
import math
from collections import Counter

import pytest
import torch
from conftest import GOLDEN
from hypothesis import given
from hypothesis import strategies as st
from recorded_scores import rankings, recipe_scores

from xret.heads.evaluation import metrics

TIES = ("pessimistic", "optimistic", "mean")


def assert_recorded(table, expected):
    for short, way in (("i2t", "image_to_text"), ("t2i", "text_to_image")):
        for name, key in (("r1", "R@1"), ("r5", "R@5"), ("r10", "R@10"), ("medr", "medr")):
            assert getattr(table, way)[key] == pytest.approx(expected[short][name], rel=1e-12), (way, key)
    assert table.rsum == pytest.approx(expected["rsum"], rel=1e-12)


@pytest.fixture
def recorded():
    return json.loads((GOLDEN / "metrics.json").read_text())


def test_recorded_small(golden):
    data = golden("recall_small")
    image_to_text, text_to_image = metrics.ranks(torch.tensor(data["in_sim"]), torch.arange(500) // 5)
    assert image_to_text.better.tolist() == data["out_i2t_rank"].tolist()
    assert text_to_image.better.tolist() == data["out_t2i_rank"].tolist()
    assert (image_to_text.tied == 0).all()
    assert (image_to_text.own == 1).all()
    expected = {
        d: {name: float(data[f"out_{d}_{name}"]) for name in ("r1", "r5", "r10", "medr")} for d in ("i2t", "t2i")
    } | {"rsum": float(data["out_rsum"])}
    for ties in TIES:  # there are no ties, so that no rule matters
        assert_recorded(metrics.recall_table(image_to_text, text_to_image, ties), expected)


def test_recorded_mid(recorded):
    recipe = recorded["recall_mid"]["recipe"]
    similarity = recipe_scores(recipe, recipe["n_images"])
    table = metrics.recall_table(*metrics.ranks(similarity, torch.arange(similarity.shape[1]) // 5))
    assert_recorded(table, recorded["recall_mid"]["expected"])


@pytest.mark.slow
def test_recorded_5k_and_its_folds(recorded):
    similarity = recipe_scores(recorded["recall_5k"]["recipe"])
    caption_image = torch.arange(25000) // 5
    assert_recorded(
        metrics.recall_table(*metrics.ranks(similarity, caption_image)), recorded["recall_5k"]["expected_5k"]
    )
    tables = [metrics.recall_table(*metrics.fold_ranks(similarity, caption_image, fold)) for fold in metrics.FOLDS]
    for table, expected in zip(tables, recorded["recall_5k"]["expected_1k_folds"], strict=True):
        assert_recorded(table, expected)
    assert_recorded(metrics.mean_table(tables), recorded["recall_5k"]["expected_1k_mean"])


@given(
    scores=st.lists(st.integers(-2, 1), min_size=2, max_size=6),
    owns=st.integers(1, 3),
    k=st.integers(1, 6),
)
def test_ties_are_the_best_worst_and_mean_of_all_orders(scores, owns, k):
    own = list(range(min(owns, len(scores) - 1)))
    # The other captions belong to a second image, whose own row does not matter here.
    caption_image = torch.tensor([0 if i in own else 1 for i in range(len(scores))])
    similarity = torch.tensor([scores, scores], dtype=torch.float64)
    image_to_text, _ = metrics.ranks(similarity, caption_image)
    query = metrics.Ranks(*(part[:1] for part in image_to_text))
    # Every own item counts as early (late) as ties allow in the rules for a single query.
    positions = [min(ranking.index(i) for i in own) for ranking in rankings(scores)]
    best = max(scores[i] for i in own)
    tied_wrong = sum(scores[i] == best for i in range(len(scores)) if i not in own)
    better = sum(value > best for value in scores)
    assert [int(part) for part in query] == [better, tied_wrong, sum(scores[i] == best for i in own)]
    assert min(positions) == better
    assert max(positions) == better + tied_wrong
    assert metrics.recall(query, k, "optimistic") == 100 * (min(positions) < k)
    assert metrics.recall(query, k, "pessimistic") == 100 * (max(positions) < k)
    hits = sum(position < k for position in positions) / len(positions)
    assert metrics.recall(query, k, "mean") == pytest.approx(100 * hits, abs=1e-9)
    assert metrics.median_rank(query, "optimistic") == 1 + min(positions)
    assert metrics.median_rank(query, "pessimistic") == 1 + max(positions)
    assert metrics.median_rank(query, "mean") == pytest.approx(1 + sum(positions) / len(positions))


@given(
    seed=st.integers(0, 10_000),
    images=st.integers(1, 6),
    captions=st.integers(1, 12),
    block=st.sampled_from([1, 7, 1 << 21]),
)
def test_counts_are_the_loop_in_any_block(seed, images, captions, block):
    generator = torch.Generator().manual_seed(seed)
    # Few values, so that ties are common; captions in any order, and images without a caption.
    similarity = torch.randint(-3, 0, (images, captions), generator=generator).float()
    caption_image = torch.randint(0, images, (captions,), generator=generator)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(metrics, "BLOCK", block)
        directions = metrics.ranks(similarity, caption_image)

    owner = caption_image.tolist()
    expected = ([], [])
    for i in sorted(set(owner)):
        expected[0].append((similarity[i].tolist(), [j for j in range(captions) if owner[j] == i]))
    for j in range(captions):
        expected[1].append((similarity[:, j].tolist(), [owner[j]]))
    for counts, queries in zip(directions, expected, strict=True):
        rows = []
        for scores, own in queries:
            best = max(scores[i] for i in own)
            wrong = Counter((scores[i] > best) - (scores[i] < best) for i in range(len(scores)) if i not in own)
            rows.append([wrong[1], wrong[0], sum(scores[i] == best for i in own)])
        assert torch.stack(list(counts), 1).tolist() == rows


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_constant_embeddings_score_exactly_chance(dtype):
    n = 40
    counted = metrics.ranks(torch.full((n, 5 * n), 0.25, dtype=dtype), torch.arange(5 * n) // 5)
    table = metrics.recall_table(*counted, ties="mean")
    for k in (1, 5, 10):
        chance = 100 * (1 - math.comb(5 * n - 5, k) / math.comb(5 * n, k))
        assert table.image_to_text[f"R@{k}"] == pytest.approx(chance, rel=1e-12)
        assert table.text_to_image[f"R@{k}"] == pytest.approx(100 * k / n, rel=1e-12)
    # The first of 5 own captions among 200 stands on average at 201 / 6, the one own image at 41 / 2.
    assert table.image_to_text["medr"] == pytest.approx(201 / 6)
    assert table.text_to_image["medr"] == pytest.approx(41 / 2)
    worst, best = (metrics.recall_table(*counted, ties=ties) for ties in ("pessimistic", "optimistic"))
    assert worst.rsum == 0
    assert best.rsum == 600
    assert (worst.image_to_text["medr"], worst.text_to_image["medr"]) == (196, 40)


def test_infinite_scores_are_ranked_and_nan_is_refused_by_place():
    similarity = torch.zeros(3, 4)
    for score in (math.inf, -math.inf):
        similarity[0, 0] = score
        image_to_text, text_to_image = metrics.ranks(similarity[:2, :2], torch.arange(2))
        assert image_to_text.better.tolist() == text_to_image.better.tolist() == [int(score < 0), 0]
    similarity[2, 1] = math.nan
    with pytest.raises(ValueError, match="image 2 and caption 1 is NaN"):
        metrics.ranks(similarity, torch.tensor([0, 1, 2, 2]))


def test_a_matrix_that_does_not_fit_is_refused():
    owner = torch.arange(15) // 3
    for similarity in (torch.rand(15, 5), torch.rand(5, 14)):  # the transpose, and a caption too few
        with pytest.raises(ValueError, match=f"15 captions, and the similarity {similarity.shape[1]} columns"):
            metrics.ranks(similarity, owner)
    for images, protocol in ((6000, "1k-folds"), (5000, "eccv")):
        with pytest.raises(ValueError, match=f"protocol is '{protocol}', but must be full, or 1k-folds of 5,000"):
            metrics.recalls(torch.zeros(images, 1), torch.zeros(1, dtype=torch.int64), protocol)


def test_median_of_an_even_number_lies_between():
    better = torch.tensor([0, 3, 1, 100])
    assert metrics.median_rank(metrics.Ranks(better, torch.zeros_like(better), torch.ones_like(better))) == 3


def test_folds_are_consecutive_and_see_only_themselves(monkeypatch):
    assert [image for fold in metrics.FOLDS for image in fold] == list(range(5000))
    assert [len(fold) for fold in metrics.FOLDS] == [1000] * 5

    monkeypatch.setattr(metrics, "FOLDS", [range(3), range(3, 6)])
    similarity = torch.randn(6, 12, generator=torch.Generator().manual_seed(0))
    first = metrics.recall_table(*metrics.ranks(similarity[:3, :6], torch.arange(6) // 2))
    second = metrics.recall_table(*metrics.ranks(similarity[3:, 6:], torch.arange(6) // 2))
    mean = metrics.recalls(similarity, torch.arange(12) // 2, "1k-folds", "pessimistic")
    assert mean.rsum == (first.rsum + second.rsum) / 2
    for way in metrics.WAYS:
        for name, value in getattr(mean, way).items():
            assert value == (getattr(first, way)[name] + getattr(second, way)[name]) / 2


def test_recorded_circular_variance(golden):
    data = golden("set_regularisers")
    expected = math.log(data["out64_circular_variance"].mean())
    assert metrics.log_circular_variance(torch.tensor(data["in_set"])) == pytest.approx(expected, rel=1e-9)


def test_circular_variance_by_hand():
    # Opposite elements cancel: variance 1; orthogonal ones: 1 - sqrt(1/2).
    sets = torch.tensor([[[3.0, 0], [-1, 0]], [[1, 0], [0, 7]]])
    expected = math.log((1 + 1 - math.sqrt(0.5)) / 2)
    assert metrics.log_circular_variance(sets) == pytest.approx(expected)
    # More samples than are looked at in one go.
    assert metrics.log_circular_variance(sets.repeat(1500, 1, 1)) == pytest.approx(expected)
    assert metrics.log_circular_variance(sets[:1], sets[1:].expand(3, -1, -1)) == pytest.approx(
        math.log((1 + 3 * (1 - math.sqrt(0.5))) / 4)
    )
    assert metrics.log_circular_variance(sets, power=2) == pytest.approx(math.log((1 + 0.5) / 2))
    collapsed = metrics.log_circular_variance(torch.randn(4, 1, 8).expand(4, 3, 8))
    assert math.isfinite(collapsed)
    assert collapsed < -30


@pytest.mark.parametrize("counts", [[1], [1, 1, 1], [2, 0, 1], [1, 2, 1], [3, 1], [6, 1]])
def test_chance_is_the_mean_over_all_orders(counts):
    owners = [image for image, own in enumerate(counts) for _ in range(own)]
    found = 0.0
    for k in (1, 5, 10):
        orders = list(itertools.permutations(range(len(counts))))
        found += 100 * sum(sum(owner in order[:k] for owner in owners) for order in orders) / len(orders) / len(owners)
        orders = list(itertools.permutations(owners))
        asked = [image for image, own in enumerate(counts) if own]
        found += 100 * sum(sum(image in order[:k] for image in asked) for order in orders) / len(orders) / len(asked)
    assert metrics.chance(counts) == pytest.approx(found)
