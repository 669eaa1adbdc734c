"""The triplet loss against recorded values and a loop over explicit triplets."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from recorded import DTYPES, assert_recorded, leaf, own

from xret.heads.modules.aggregators import Aggregated
from xret.heads.modules.losses.triplet import Triplet
from xret.heads.modules.similarity.sets import MIL, Chamfer, Cosine, SmoothChamfer

CHAMFERS = {"smooth_chamfer_a16": SmoothChamfer(), "mil": MIL(), "chamfer": Chamfer()}
NEGATIVES = {"hard": "hardest", "all": "all", "semi": "semi-hard"}
# The recorded case, its key, what compares the embeddings and which they are, the captions of an image, and how.
RECORDED = [
    *(("matrix/", kind, None, "", 5, {"negatives": negatives}) for kind, negatives in NEGATIVES.items()),
    *(
        ("", f"triplet_{kind}_{name}", compare, "", 5, {"negatives": NEGATIVES[kind]})
        for name, compare in CHAMFERS.items()
        for kind in (NEGATIVES if name == "smooth_chamfer_a16" else ("hard", "all"))
    ),
    ("single/", "hard_sum", Cosine(), "", 1, {"reduction": "sum"}),
    ("single/", "all_sum", Cosine(), "", 1, {"negatives": "all", "reduction": "sum"}),
    ("single/", "hard_mil_mean", MIL(), "_set", 1, {}),
    ("single/", "all_mil_mean", MIL(), "_set", 1, {"negatives": "all"}),
]


def triplet(similarity, positives, **parameters):
    return Triplet(**parameters)(similarity, positives)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("case", "key", "compare", "inputs", "captions", "parameters"), RECORDED)
def test_recorded_values(golden, case, key, compare, inputs, captions, parameters, dtype):
    data = golden("triplet_and_regularisers")
    sides = ("img", "txt") if compare else ("sim",)
    leaves = {side: leaf(data, f"{case}in_{side}{inputs}", dtype) for side in sides}
    similarity = compare(*leaves.values()) if compare else leaves["sim"]
    loss = triplet(similarity, own(len(similarity), captions), **parameters)
    # That code divides by all 64 cells of the matrix; 56 of them are triplets.
    loss = loss * 56 / 64 if key == "all_mil_mean" else loss
    assert_recorded(data, key, loss, leaves, dtype, case)


def triplet_by_loop(similarity, positives, margin, negatives, reduction):
    """Go through every (positive, negative) triplet of both directions, in plain Python floats."""
    total = 0.0
    for s, p in ((similarity.tolist(), positives), (similarity.T.tolist(), positives.T)):
        terms = []
        for anchor, row in enumerate(p.tolist()):
            others = [value for value, is_own in zip(s[anchor], row, strict=True) if not is_own and value > -math.inf]
            for positive in (value for value, is_own in zip(s[anchor], row, strict=True) if is_own):
                costs = [margin + other - positive for other in others]
                if negatives == "hardest":
                    costs = [max([0.0, *costs])]
                if negatives == "semi-hard":
                    costs = [min(cost, margin) for cost in costs]
                terms += [max(0.0, cost) for cost in costs]
        count = len([t for t in terms if t > 0]) if negatives == "semi-hard" else len(terms)
        total += sum(terms) / (max(count, 1) if reduction == "mean" else 1)
    return total


@pytest.mark.parametrize("reduction", ["mean", "sum"])
@pytest.mark.parametrize("negatives", ["hardest", "all", "semi-hard"])
@given(
    seed=st.integers(0, 10_000),
    images=st.integers(1, 5),
    captions=st.integers(1, 8),
    shift=st.sampled_from([0.0, -10.0]),
    share=st.sampled_from([0.0, 0.5]),
)
def test_triplet_is_the_loop_without_ignored_pairs(seed, images, captions, negatives, reduction, shift, share):
    generator = torch.Generator().manual_seed(seed)
    similarity = torch.rand(images, captions, generator=generator, dtype=torch.float64) + shift
    positives = torch.rand(images, captions, generator=generator) < 0.4  # any number a row and a column
    ignored = ~positives & (torch.rand(images, captions, generator=generator) < share)
    kept = similarity.requires_grad_().masked_fill(ignored, -torch.inf)
    loss = triplet(kept, positives, margin=0.3, negatives=negatives, reduction=reduction)
    loss.backward()
    expected = triplet_by_loop(kept, positives, 0.3, negatives, reduction)
    assert loss.item() == pytest.approx(expected, rel=1e-12, abs=1e-12)
    assert similarity.grad.isfinite().all()
    assert (similarity.grad[ignored] == 0).all()


@pytest.mark.parametrize("reduction", ["mean", "sum"])
@pytest.mark.parametrize("negatives", ["hardest", "all", "semi-hard", "distance-weighted"])
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
        loss.begin(epoch)
        expected = triplet(similarity, positives, negatives=negatives)
        assert loss(similarity, positives, nothing, nothing) == expected
    assert triplet(similarity, positives, negatives="all") != triplet(similarity, positives)


def test_distance_weighted_negatives_are_drawn_by_the_inverse_of_their_density():
    """Wu et al., eq. 3: distances of points on a sphere of n dimensions have d^(n-2) (1 - d^2/4)^((n-3)/2)."""
    torch.manual_seed(0)
    distances = torch.tensor([0.0, 1.39, 1.395, 1.405, 0.3, 1.42, 1.71]).double()  # the first is the positive's
    similarity, positives = (1 - distances.square() / 2).repeat(250, 1), (torch.arange(7) == 0).repeat(250, 1)
    weights = [(d**-510.0) * (1 - d * d / 4) ** -254.5 if 0 < d < 1.7 else 0 for d in distances.tolist()]
    weights[4] = 0.5**-510.0 * (1 - 0.25 / 4) ** -254.5  # nearer ones count as if they were there
    for nearest in (True, False):
        kept = similarity.clone().requires_grad_()
        used = kept if nearest else kept.masked_fill(torch.arange(7) == 4, -torch.inf)
        counts = torch.zeros(7, dtype=torch.float64)
        for _ in range(80):
            kept.grad = None
            triplet(used, positives, margin=3.0, negatives="distance-weighted").backward(retain_graph=True)
            counts += (kept.grad > 1e-5).double().mean(0) / 80
        expected = torch.tensor(weights, dtype=torch.float64)
        expected[4] *= nearest
        torch.testing.assert_close(counts, expected / expected.sum(), rtol=0, atol=0.015)
