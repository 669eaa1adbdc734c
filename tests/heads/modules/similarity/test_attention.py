"""SCAN's cross-attention against a loop over pairs, rows and words, and what padding must not change."""

import math

import pytest
import torch

from xret.heads.modules.embedding import Sequence
from xret.heads.modules.similarity import attention
from xret.similarities import CrossAttention

SETTINGS = [(direction, pooling) for direction in ("t-i", "i-t") for pooling in ("lse", "average")]


def sequences(lengths, width=6, seed=0, longest=None):
    """Return random sequences; values after a length are NaN."""
    generator = torch.Generator().manual_seed(seed)
    rows = torch.full((len(lengths), longest or max(lengths), width), math.nan, dtype=torch.float64)
    for row, length in zip(rows, lengths, strict=True):
        row[:length] = torch.randn(length, width, generator=generator, dtype=torch.float64)
    return Sequence(rows, torch.tensor(lengths))


def cross_attention(images, captions, **parameters):
    return CrossAttention(**parameters)(images, captions)


def by_loop(queries, context, pooling, lambda_softmax, lambda_lse, slope):
    """Evaluate one pair as SCAN section 3.1 says: `queries [T, D]` attend to `context [M, D]`."""
    queries, context = ([row / row.norm() for row in rows] for rows in (queries, context))
    s = [[(q @ v).item() for q in queries] for v in context]
    clipped = [[value if value > 0 else slope * value for value in row] for row in s]
    norms = [math.sqrt(sum(value**2 for value in row)) for row in clipped]
    relevance = []
    for t, query in enumerate(queries):
        weights = [math.exp(lambda_softmax * row[t] / max(n, 1e-8)) for row, n in zip(clipped, norms, strict=True)]
        attended = sum(weight / sum(weights) * v for weight, v in zip(weights, context, strict=True))
        relevance.append((query @ attended / attended.norm()).item())
    if pooling == "average":
        return sum(relevance) / len(relevance)
    return math.log(sum(math.exp(lambda_lse * value) for value in relevance)) / lambda_lse


@pytest.mark.parametrize("slope", [0.0, 0.1])
@pytest.mark.parametrize(("direction", "pooling"), SETTINGS)
def test_agrees_with_a_loop_over_pairs(direction, pooling, slope):
    images, captions = sequences([4, 1, 3]), sequences([2, 5, 1, 3], seed=1)
    values = {"lambda_softmax": 4.0, "lambda_lse": 5.0}
    actual = cross_attention(images, captions, direction=direction, pooling=pooling, negative_slope=slope, **values)
    for i in range(3):
        for c in range(4):
            regions, words = images.rows[i, : images.length[i]], captions.rows[c, : captions.length[c]]
            pair = (words, regions) if direction == "t-i" else (regions, words)
            expected = by_loop(*pair, pooling, *values.values(), slope)
            assert actual[i, c].item() == pytest.approx(expected, rel=1e-10)


@pytest.mark.parametrize(("direction", "pooling"), SETTINGS)
def test_blocks_change_neither_values_nor_gradients(direction, pooling, monkeypatch):
    images, captions = sequences([4, 2, 3]), sequences([2, 5, 1, 3, 4], seed=1)
    found = []
    for cells, kept in ((10**6, 10**6), (3 * 4 * 5 * 2, 10**6), (3 * 4 * 5 * 2, 0), (1, 0)):
        monkeypatch.setattr(attention, "CELLS", cells)
        monkeypatch.setattr(attention, "KEPT", kept)
        rows = [side.rows.nan_to_num().requires_grad_() for side in (images, captions)]
        sides = [Sequence(row, side.length) for row, side in zip(rows, (images, captions), strict=True)]
        similarity = cross_attention(*sides, direction=direction, pooling=pooling)
        with torch.no_grad():
            torch.testing.assert_close(cross_attention(*sides, direction=direction, pooling=pooling), similarity)
        weight = torch.arange(15.0, dtype=torch.float64).view(3, 5)
        found.append([similarity.detach(), *torch.autograd.grad((weight * similarity).sum(), rows)])
    for other in found[1:]:
        torch.testing.assert_close(other, found[0])
    for gradient, side in zip(found[0][1:], (images, captions), strict=True):
        assert (gradient[side.rows.isnan()] == 0).all()


@pytest.mark.parametrize(("direction", "pooling"), SETTINGS)
def test_a_sample_without_rows_is_finite(direction, pooling):
    images, captions = sequences([3, 0]), sequences([2, 0, 1], seed=1)
    rows = [side.rows.requires_grad_() for side in (images, captions)]
    similarity = cross_attention(images, captions, direction=direction, pooling=pooling)
    assert similarity.isfinite().all()
    queries_missing = similarity[:, 1] if direction == "t-i" else similarity[1]
    assert (queries_missing == 0).all()
    assert all(gradient.isfinite().all() for gradient in torch.autograd.grad(similarity.sum(), rows))


@pytest.mark.parametrize("direction", ["t-i", "i-t"])
def test_weights_are_those_of_each_pair_and_what_they_attend_to_is_what_is_scored(direction):
    images, captions = sequences([4, 1, 3]), sequences([2, 5, 1], seed=1)
    similarity = CrossAttention(direction=direction, pooling="average")
    weights, scores = similarity.attention(images, captions), similarity(images, captions)
    assert weights.shape == (3, 3, 4, 5)
    for i, regions in enumerate(zip(*images, strict=True)):
        for c, words in enumerate(zip(*captions, strict=True)):
            (places, spoken), weight = (rows[:length] for rows, length in (regions, words)), weights[i, c]
            weight = weight[: len(places), : len(spoken)]
            weight, queries, context = (weight.T, spoken, places) if direction == "t-i" else (weight, places, spoken)
            torch.testing.assert_close(weight.sum(1), torch.ones(len(queries), dtype=torch.float64))
            attended = weight @ torch.nn.functional.normalize(context, dim=1)
            assert torch.cosine_similarity(queries, attended).mean().item() == pytest.approx(scores[i, c].item())


@pytest.mark.parametrize(("direction", "queries"), [("t-i", 16), ("i-t", 36)])
def test_the_papers_equations_cost_cosines_attended_vectors_and_their_products(direction, queries):
    cost = CrossAttention(direction).paper_cost([36, 64], [16, 64])
    assert cost.macs == 36 * 16 * 64 + 36 * 16 * 64 + queries * 64
