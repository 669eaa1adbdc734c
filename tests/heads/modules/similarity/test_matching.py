"""Maximal pair assignment against recorded values and scipy, and what must always hold."""

import importlib
from itertools import product

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from recorded import assert_near
from scipy.optimize import linear_sum_assignment

from xret.heads.modules.similarity.matching import Assignment, match
from xret.heads.modules.similarity.sets import Cosine
from xret.heads.modules.similarity.shared import element_cosines

matching = importlib.import_module("xret.heads.modules.similarity.matching")
SQUARE = ("main", "K2", "K3", "K5")
UNEQUAL = ("rect3x5", "rect5x3")


def sets(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def cosines_of(images, captions):
    """Return the cosines pair by pair, `[I, C, K1, K2]`."""
    return torch.stack([torch.stack([Cosine()(x, y) for y in captions]) for x in images])


def assignment(images, captions):
    """Return which element of the caption each of the image's is matched with, `[I, C, K1]`; -1: none."""
    cosines = element_cosines(images, captions)
    k1, k2 = cosines.shape[1:3]
    if k1 <= k2:
        return match(cosines).transpose(1, 2)
    own = match(cosines.transpose(1, 2))
    left_over = torch.full_like(cosines[:, :, 0], -1, dtype=torch.int64)
    return left_over.scatter(1, own, torch.arange(k2)[:, None].expand_as(own)).transpose(1, 2)


def total_of(cosines, found):
    """Return the sum of the cosines that an assignment picks, `[I, C]`."""
    picked = cosines.gather(3, found.clamp(min=0)[..., None]).squeeze(3)
    return (picked * (found >= 0)).sum(2)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("case", SQUARE + UNEQUAL)
def test_recorded_values_and_gradients(golden, case, dtype):
    data = golden("similarity")
    images, captions = (torch.tensor(data[f"{case}/in_{side}"]).to(dtype).requires_grad_() for side in ("img", "txt"))
    found = assignment(images, captions)
    clear = torch.tensor(data[f"{case}/out64_mpa_gap"]) > 1e-4  # nearer than that, float32 may take the second best
    assert clear.all()
    assert found.tolist() == data[f"{case}/out64_mpa_assign"].tolist()
    assert_near(total_of(cosines_of(images, captions), found), data[f"{case}/out64_mpa_sumcos"], 1e-6)
    score = Assignment()(images, captions)
    bits, tolerance = ("64", 1e-9) if dtype is torch.float64 else ("32", 1e-5)
    if case in SQUARE:
        assert_near(score, data[f"{case}/out{bits}_mpa_sim"], tolerance)
    else:
        assert_near(score, data[f"{case}/out64_mpa_sim_over_min"], tolerance)
    (score * torch.tensor(data[f"{case}/in_cotangent"])).sum().backward()
    for side, embedding in (("img", images), ("txt", captions)):
        assert_near(embedding.grad, data[f"{case}/grad{bits}_mpa_{side}"], tolerance)


@pytest.mark.parametrize("case", ("main", "K3", "K5", "rect5x3"))
def test_cosines_and_not_their_exponentials_decide(golden, case):
    data = golden("similarity")
    images, captions = (torch.tensor(data[f"{case}/in_{side}"]).double() for side in ("img", "txt"))
    pairs = min(images.shape[1], captions.shape[1])
    best = torch.tensor(data[f"{case}/out64_mpa_best_sum_exp"])
    differs = torch.tensor(data[f"{case}/out_mpa_exp_objective_differs"])
    assert differs.any()
    below = Assignment()(images, captions) * pairs < best - 1e-9
    assert below.equal(differs)


@pytest.mark.parametrize(
    ("k1", "k2", "sums"),
    [
        *((k1, k2, sums) for k1, k2 in [(1, 1), (1, 4), (4, 1), (2, 3), (4, 4), (5, 3), (5, 5)] for sums in (0, 10**6)),
        *((k1, k2, matching.SUMS) for k1, k2 in [(2, 6), (8, 8), (9, 9), (3, 20), (20, 3), (12, 16)]),
        (9, 9, 10**6),  # the way there takes 36 bits
    ],
)
@settings(max_examples=5, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(seed=st.integers(0, 1000))
def test_matching_is_scipys(k1, k2, sums, monkeypatch, seed):
    monkeypatch.setattr(matching, "SUMS", sums)
    images, captions = sets(2, k1, 8, seed=seed), sets(3, k2, 8, seed=seed + 1)
    cosines, found, score = cosines_of(images, captions), assignment(images, captions), Assignment()(images, captions)
    for i, c in product(range(2), range(3)):
        pair = cosines[i, c].numpy()
        rows, columns = linear_sum_assignment(pair, maximize=True)
        expected = np.full(k1, -1)
        expected[rows] = columns
        assert found[i, c].tolist() == expected.tolist()
        assert score[i, c].item() == pytest.approx(np.mean(np.exp(pair[rows, columns]) - 1))


@pytest.mark.parametrize("size", [2, 4, 6])
def test_ties_are_settled_the_same_way_each_time_and_in_blocks(size, monkeypatch):
    # All elements alike, along an axis: their cosines are exactly 0 or 1.
    images, captions = (torch.eye(8)[:count, None].expand(count, size, 8) for count in (5, 3))
    found = assignment(images, captions)
    assert found.sort(2).values.equal(torch.arange(size).expand(5, 3, size))
    assert found.equal(found[:1, :1].expand_as(found))
    monkeypatch.setattr(matching, "PAIRS", 1)
    assert assignment(images, captions).equal(found)


def test_blocks_inside_change_nothing(monkeypatch):
    images, captions = sets(7, 4, 6), sets(5, 4, 6, seed=1)
    found = assignment(images, captions)
    monkeypatch.setattr(matching, "PAIRS", 5 * 2)
    assert assignment(images, captions).equal(found)


def test_the_entire_sets_count_in_evaluation_too():
    # The first caption has the one closest element, the second all four: MIL would take the first.
    image = torch.eye(8, dtype=torch.float64)[None, :4]
    one = torch.cat([image[:, :1], torch.eye(8, dtype=torch.float64)[None, 5:]], 1)
    scores = Assignment().eval()(image, torch.cat([one, image + 0.1]))[0]
    assert scores[0].item() == pytest.approx((np.e - 1) / 4)
    assert scores[1] > scores[0]
