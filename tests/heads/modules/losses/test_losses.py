"""Losses together: half precision, what a side does not give, and nothing to compare."""

import pytest
import torch

from xret.heads.modules.aggregators import Aggregated
from xret.heads.modules.embedding import Gaussian, Sequence
from xret.losses import (
    MMD,
    CaptionGeneration,
    Diversity,
    GlobalDiscriminative,
    InfoNCE,
    InformationBottleneck,
    IntraSetDivergence,
    Sigmoid,
    Uniformity,
)

GRAM, PCME = Diversity(form="gram"), InformationBottleneck(form="pcme")


def side(count, elements=3, width=16, dtype=torch.float64):
    """Return all that an aggregator can give of one side."""
    torch.manual_seed(count)
    sets, slots = torch.randn(2, count, elements, width).to(dtype)
    global_, mean, spread = torch.randn(3, count, width).to(dtype)
    gaussian = Gaussian(mean, spread + 4)
    return Aggregated(sets, slots=slots, global_=global_, gaussian=gaussian)


@pytest.mark.parametrize("loss", [InfoNCE(), Sigmoid()])
def test_half_similarities_are_compared_in_float32(loss):
    similarity, positives = torch.randn(4, 6).half(), torch.arange(4)[:, None] == torch.tensor([0, 0, 1, 2, 3, 3])
    similarity = similarity.masked_fill(torch.arange(24).view(4, 6) == 2, -torch.inf)
    found = loss(similarity, positives)
    assert found.dtype == torch.float32
    assert found.item() == pytest.approx(loss(similarity.double(), positives).item(), rel=1e-5)


GAUSSIAN = Gaussian(torch.ones(2, 4), torch.ones(2, 4))
ROWS = Sequence(torch.ones(2, 3, 5), torch.tensor([3, 3]))


@pytest.mark.parametrize(
    ("loss", "missing", "changes"),
    [
        (MMD(), "vectors or sets", {"embedding": GAUSSIAN}),
        (Uniformity(), "vectors or sets", {"embedding": GAUSSIAN}),
        (Diversity(), "slots", {"slots": None}),
        (InformationBottleneck(), "a Gaussian", {"gaussian": None}),
        (PCME, "samples", {"embedding": GAUSSIAN}),
        (GlobalDiscriminative(), "embedding sets", {"embedding": torch.ones(2, 4)}),
        (GlobalDiscriminative(), "the global feature", {"global_": None}),
        (IntraSetDivergence(), "embedding sets", {"embedding": torch.ones(2, 4)}),
        (CaptionGeneration(5, 7), "local rows", {"rows": None}),
        (CaptionGeneration(5, 7), "word ids", {"token": None}),
    ],
)
def test_what_a_side_does_not_give_is_named(loss, missing, changes):
    whole = side(2)._replace(rows=ROWS, token=ROWS)
    for given, name in (((whole._replace(**changes), whole), "image"), ((whole, whole._replace(**changes)), "text")):
        if {"rows": "text", "token": "image"}.get(*changes) != name:  # which this loss does not read there
            with pytest.raises(ValueError, match=f"needs {missing}, which the {name} side does not give"):
                loss(None, torch.eye(2) > 0, *given)


@pytest.mark.parametrize("loss", [Diversity(), GRAM, IntraSetDivergence()])
def test_sets_of_one_element_are_an_attached_zero(loss):
    sides = side(2, 1), side(3, 1)
    leaves = [one.slots if isinstance(loss, Diversity) else one.embedding for one in sides]
    for leaf in leaves:
        leaf.requires_grad_()
    value = loss(None, None, *sides)
    value.backward()
    assert value.item() == 0
    assert not any(leaf.grad.any() for leaf in leaves)
