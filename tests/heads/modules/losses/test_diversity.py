"""Diversity of slots against recorded values."""

import math

import pytest
import torch
from recorded import DTYPES, assert_near, assert_recorded, bits, leaf, near

from xret.heads.modules.aggregators import Aggregated
from xret.heads.modules.losses.diversity import Diversity


def diversity(slots, form="exponential"):
    return Diversity(form=form).of("image", Aggregated(None, slots))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("form", "case", "key", "inputs"),
    [("exponential", "", "div_slots_mean", "slots"), ("gram", "single/", "gram_diversity", "set")],
)
def test_recorded_values(golden, form, case, key, inputs, dtype):
    data = golden("triplet_and_regularisers")
    leaves = {side: leaf(data, f"{case}in_{side}_{inputs}", dtype) for side in ("img", "txt")}
    loss = Diversity(form=form)(None, None, *(Aggregated(None, slots) for slots in leaves.values()))
    named = {f"{side}_slots" if form == "exponential" else side: slots for side, slots in leaves.items()}
    assert_recorded(data, key, loss, named, dtype, case)
    if form == "exponential":
        pairs = diversity(leaves["img"]) * math.comb(leaves["img"].shape[1], 2)
        assert_near(pairs, data[f"out{bits(dtype)}_div_img_slots_pairsum"], near(dtype))


def test_gram_diversity_where_nothing_is_alike_has_no_gradient():
    slots = torch.eye(4)[None, :3].clone().requires_grad_()
    loss = diversity(slots, "gram")
    loss.backward()
    assert loss.item() == 0
    assert (slots.grad == 0).all()
