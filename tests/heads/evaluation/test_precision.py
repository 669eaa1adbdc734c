"""Precision against recorded numbers, and the mean over all orders of ties."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from recorded_scores import rankings

from xret.heads.evaluation import metrics
from xret.heads.evaluation.metrics import recall
from xret.heads.evaluation.precision import best_ranks, map_at_r, plausible_matches, r_precision

TIES = ("pessimistic", "optimistic", "mean")


@pytest.mark.parametrize("way", ["i2t", "t2i"])
@pytest.mark.parametrize("ties", TIES)  # there are no ties, so that no rule matters
def test_recorded_with_several_right_items(golden, way, ties):
    data = golden("multi_positive")
    similarity, relevant = torch.tensor(data["in_sim"]), torch.tensor(data["in_relevant"])
    rows = torch.tensor(data["in_query_images" if way == "i2t" else "in_query_captions"])
    similarity, relevant = (m if way == "i2t" else m.T for m in (similarity, relevant))
    similarity, relevant = similarity[rows], relevant[rows]
    for name, measure in (("map_at_r", map_at_r), ("rprecision", r_precision)):
        found = measure(similarity, relevant, ties).numpy()
        np.testing.assert_allclose(found, data[f"out_{way}_{name}_per_query"], rtol=1e-12)
        assert found.mean() == pytest.approx(float(data[f"out_{way}_{name}"]), rel=1e-12)
    for k in (1, 5, 10):
        assert recall(best_ranks(similarity, relevant), k, ties) == pytest.approx(100 * float(data[f"out_{way}_r{k}"]))


@pytest.mark.parametrize("way", ["i2t", "t2i"])
def test_recorded_plausible_matches(golden, way):
    data = golden("plausible_match")
    similarity, codes = torch.tensor(data["in_sim"]), torch.tensor(data["in_class_codes"])
    means, firsts = [], []
    for zeta in (0, 1, 2):
        relevant = plausible_matches(codes, zeta)[:, torch.arange(300) // 5]
        scores, right = (similarity, relevant) if way == "i2t" else (similarity.T, relevant.T)
        found = r_precision(scores, right).numpy()
        np.testing.assert_allclose(found, data[f"out_{way}_rp_zeta{zeta}_per_query"], rtol=1e-12)
        means.append(100 * found.mean())
        firsts.append(recall(best_ranks(scores, right), 1))
    assert np.mean(means) == pytest.approx(float(data[f"out_{way}_pmrp"]), rel=1e-12)
    assert np.mean(firsts) == pytest.approx(float(data[f"out_{way}_pmr1"]), rel=1e-12)


def plain(order, right, count):
    """Return R-Precision and mAP@R of one ranking, from the definition."""
    hits = [item in right for item in order[:count]]
    gains = [hit * sum(hits[: r + 1]) / (r + 1) for r, hit in enumerate(hits)]
    return sum(hits) / count, sum(gains) / count


@settings(max_examples=60)
@given(
    scores=st.lists(st.sampled_from([-float("inf"), -1.0, 0.0, 2.0]), min_size=1, max_size=6),
    right=st.sets(st.integers(0, 5), min_size=1),
    outside=st.integers(0, 2),
)
def test_ties_are_the_worst_best_and_mean_of_all_orders(scores, right, outside):
    right = {item % len(scores) for item in right}
    count = len(right) + outside  # some right items may not be in the gallery
    relevant = torch.tensor([[item in right for item in range(len(scores))]])
    values = [plain(order, right, count) for order in rankings(scores)]
    for ties, choose in (("pessimistic", min), ("optimistic", max), ("mean", np.mean)):
        for place, measure in enumerate((r_precision, map_at_r)):
            found = measure(torch.tensor([scores]), relevant, ties, torch.tensor([count]))
            assert found.item() == pytest.approx(choose([value[place] for value in values])), (ties, measure)


@pytest.mark.parametrize("most", [3, 60])  # few right items of many, which are not all sorted, and many
@pytest.mark.parametrize("ties", ["pessimistic", "optimistic"])
def test_large_galleries_are_sorted_with_the_right_ones_last_or_first(most, ties, monkeypatch):
    monkeypatch.setattr(metrics, "BLOCK", 900)  # two rows at once
    rng = np.random.default_rng(0)
    scores = rng.integers(0, 30, (5, 400))
    relevant = np.zeros((5, 400), dtype=bool)
    for row in relevant:
        row[rng.choice(400, rng.integers(1, most + 1), replace=False)] = True
    expected = []
    for row, right in zip(scores, relevant, strict=True):
        order = np.lexsort((right if ties == "pessimistic" else ~right, -row))
        expected.append(plain(order.tolist(), set(np.flatnonzero(right).tolist()), int(right.sum())))
    for place, measure in enumerate((r_precision, map_at_r)):
        found = measure(torch.tensor(scores, dtype=torch.float32), torch.tensor(relevant), ties)
        assert found.tolist() == pytest.approx([value[place] for value in expected])


def test_best_ranks_are_those_of_own_items():
    # Where every caption has one image, both ways of counting are one.
    similarity = torch.randint(-3, 3, (7, 21), generator=torch.Generator().manual_seed(0)).float()
    owner = torch.arange(21) // 3
    relevant = torch.arange(7)[:, None] == owner
    expected = metrics.ranks(similarity, owner)
    for way, found in enumerate((best_ranks(similarity, relevant), best_ranks(similarity.T, relevant.T))):
        for part, wanted in zip(found, expected[way], strict=True):
            assert part.tolist() == wanted.tolist()


def test_queries_that_ask_nothing_are_left_out():
    similarity = torch.tensor([[1.0, 2.0], [2.0, 1.0], [0.0, 0.0]])
    relevant = torch.tensor([[False, False], [True, False], [True, True]])
    assert r_precision(similarity, relevant).tolist() == [1, 1]
    assert map_at_r(similarity, relevant).tolist() == [1, 1]
    assert len(best_ranks(similarity, relevant).better) == 2
    for measure in (r_precision, map_at_r, best_ranks):
        with pytest.raises(ValueError, match="no query has a right item in the gallery"):
            measure(similarity, torch.zeros(3, 2, dtype=torch.bool))


def test_plausible_matches_by_hand():
    codes = torch.tensor([[1, 1, 0, 0], [1, 0, 0, 0], [0, 0, 1, 0], [1, 1, 0, 0]]).bool()
    distance = [[0, 1, 3, 0], [1, 0, 2, 1], [3, 2, 0, 3], [0, 1, 3, 0]]
    for zeta in (0, 1, 2):
        assert plausible_matches(codes, zeta).tolist() == [[d <= zeta for d in row] for row in distance]
