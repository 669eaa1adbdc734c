"""The triplet loss against recorded values and a loop over explicit triplets."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from recorded import DTYPES, assert_near, bits, leaf, near, own

from xret.heads.modules.aggregators import Aggregated
from xret.heads.modules.losses.triplet import Triplet
from xret.heads.modules.similarity.sets import MIL, Chamfer, Cosine, SmoothChamfer

SIMILARITIES = {"smooth_chamfer_a16": SmoothChamfer(), "mil": MIL(), "chamfer": Chamfer()}


NEGATIVES = {"hard": "hardest", "all": "all", "semi": "semi-hard"}


def triplet(similarity, positives, **parameters):
    return Triplet(**parameters)(similarity, positives)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kind", NEGATIVES)
def test_recorded_triplet_of_a_matrix(golden, kind, dtype):
    data = golden("triplet_and_regularisers")
    similarity = leaf(data, "matrix/in_sim", dtype)
    loss = triplet(similarity, own(6, 5), negatives=NEGATIVES[kind])
    loss.backward()
    assert_near(loss, data[f"matrix/out{bits(dtype)}_{kind}"], near(dtype))
    assert_near(similarity.grad, data[f"matrix/grad{bits(dtype)}_{kind}_sim"], near(dtype))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("kind", "name"),
    [(kind, name) for kind in ("hard", "all") for name in SIMILARITIES] + [("semi", "smooth_chamfer_a16")],
)
def test_recorded_triplet_of_sets(golden, kind, name, dtype):
    data = golden("triplet_and_regularisers")
    key = f"triplet_{kind}_{name}"
    images, captions = leaf(data, "in_img", dtype), leaf(data, "in_txt", dtype)
    loss = triplet(SIMILARITIES[name](images, captions), own(6, 5), negatives=NEGATIVES[kind])
    loss.backward()
    assert_near(loss, data[f"out{bits(dtype)}_{key}"], near(dtype))
    assert_near(images.grad, data[f"grad{bits(dtype)}_{key}_img"], near(dtype))
    assert_near(captions.grad, data[f"grad{bits(dtype)}_{key}_txt"], near(dtype))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("key", "compare", "inputs", "negatives", "reduction", "factor"),
    [
        ("hard_sum", Cosine(), "", "hardest", "sum", 1),
        ("all_sum", Cosine(), "", "all", "sum", 1),
        ("hard_mil_mean", MIL(), "_set", "hardest", "mean", 1),
        # That code divides by all 64 cells of the matrix; 56 of them are triplets.
        ("all_mil_mean", MIL(), "_set", "all", "mean", 56 / 64),
    ],
)
def test_recorded_triplet_with_one_caption(golden, key, compare, inputs, negatives, reduction, factor, dtype):
    data = golden("triplet_and_regularisers")
    images, captions = leaf(data, f"single/in_img{inputs}", dtype), leaf(data, f"single/in_txt{inputs}", dtype)
    loss = factor * triplet(compare(images, captions), own(8, 1), negatives=negatives, reduction=reduction)
    loss.backward()
    assert_near(loss, data[f"single/out{bits(dtype)}_{key}"], near(dtype))
    assert_near(images.grad, data[f"single/grad{bits(dtype)}_{key}_img"], near(dtype))
    assert_near(captions.grad, data[f"single/grad{bits(dtype)}_{key}_txt"], near(dtype))


def triplet_by_loop(similarity, positives, margin, negatives, reduction):
    """Go through every (positive, negative) triplet of both directions, in plain Python floats."""
    total = 0.0
    for s, p in ((similarity, positives), (similarity.T, positives.T)):
        terms = []
        for anchor, row in enumerate(p.tolist()):
            for positive in (j for j, is_own in enumerate(row) if is_own):
                costs = [
                    margin + s[anchor, j].item() - s[anchor, positive].item()
                    for j, is_own in enumerate(row)
                    if not is_own
                ]
                if negatives == "hardest":
                    costs = [max([0.0, *costs])]
                if negatives == "semi-hard":
                    costs = [min(cost, margin) for cost in costs]
                terms += [max(0.0, cost) for cost in costs]
        count = len([t for t in terms if t > 0]) if negatives == "semi-hard" else len(terms)
        total += sum(terms) / (max(count, 1) if reduction == "mean" else 1)
    return total


@given(
    seed=st.integers(0, 10_000),
    images=st.integers(1, 5),
    captions=st.integers(1, 8),
    negatives=st.sampled_from(["hardest", "all", "semi-hard"]),
    reduction=st.sampled_from(["mean", "sum"]),
    shift=st.sampled_from([0.0, -10.0]),
)
def test_triplet_is_the_loop(seed, images, captions, negatives, reduction, shift):
    generator = torch.Generator().manual_seed(seed)
    similarity = torch.rand(images, captions, generator=generator, dtype=torch.float64) + shift
    positives = torch.rand(images, captions, generator=generator) < 0.4  # any number a row and a column
    similarity.requires_grad_()
    loss = triplet(similarity, positives, margin=0.3, negatives=negatives, reduction=reduction)
    loss.backward()
    expected = triplet_by_loop(similarity.detach(), positives, 0.3, negatives, reduction)
    assert loss.item() == pytest.approx(expected, rel=1e-12, abs=1e-12)
    assert similarity.grad.isfinite().all()


@pytest.mark.parametrize("reduction", ["mean", "sum"])
@pytest.mark.parametrize("negatives", ["hardest", "all", "semi-hard"])
@pytest.mark.parametrize("positives", [True, False])
def test_nothing_to_compare_is_an_attached_zero(negatives, reduction, positives):
    similarity = torch.randn(2, 3, requires_grad=True)
    loss = triplet(similarity, torch.full((2, 3), positives), negatives=negatives, reduction=reduction)
    loss.backward()
    assert loss.item() == 0
    assert (similarity.grad == 0).all()


def test_warmup_uses_all_negatives_for_the_first_epochs():
    similarity, positives = torch.randn(4, 8), own(4, 2)
    nothing = Aggregated(torch.zeros(4, 2))
    loss = Triplet(warmup_epochs=2)
    assert loss.epoch == 0
    for epoch, negatives in ((0, "all"), (1, "all"), (1.99, "all"), (2, "hardest"), (7, "hardest")):
        loss.epoch = epoch
        expected = triplet(similarity, positives, negatives=negatives)
        assert loss(similarity, positives, nothing, nothing) == expected
    assert triplet(similarity, positives, negatives="all") != triplet(similarity, positives)


@given(
    seed=st.integers(0, 10_000),
    negatives=st.sampled_from(["hardest", "all", "semi-hard"]),
    reduction=st.sampled_from(["mean", "sum"]),
    batch=st.integers(2, 5),
)
def test_pair_of_similarity_minus_infinity_takes_no_part(seed, negatives, reduction, batch):
    # One image, its caption, and others: what the image may not be compared with could as well be absent.
    generator = torch.Generator().manual_seed(seed)
    similarity = torch.rand(batch, batch, generator=generator, dtype=torch.float64)
    ignored = (torch.rand(batch, batch, generator=generator) < 0.5) & ~own(batch, 1)
    similarity.requires_grad_()
    loss = triplet(similarity.masked_fill(ignored, -torch.inf), own(batch, 1), negatives=negatives, reduction=reduction)
    loss.backward()
    expected = 0.0
    for s, drop in ((similarity.detach(), ignored), (similarity.detach().T, ignored.T)):
        costs = [
            [0.2 + s[i, j].item() - s[i, i].item() for j in range(batch) if j != i and not drop[i, j]]
            for i in range(batch)
        ]
        if negatives == "hardest":
            costs = [[max([0.0, *row])] for row in costs]
        terms = [max(0.0, min(c, 0.2) if negatives == "semi-hard" else c) for row in costs for c in row]
        count = len([t for t in terms if t > 0]) if negatives == "semi-hard" else len(terms)
        expected += sum(terms) / (max(count, 1) if reduction == "mean" else 1)
    assert loss.item() == pytest.approx(expected, rel=1e-12, abs=1e-12)
    assert similarity.grad.isfinite().all()
    assert (similarity.grad[ignored] == 0).all()
