"""Diversity of slots against recorded values and a hand calculation."""

import math

import pytest
import torch
from recorded import DTYPES, assert_near, bits, leaf, near

from xret.heads.modules.aggregators import Aggregated
from xret.heads.modules.losses.diversity import Diversity


def diversity(slots, form="exponential"):
    return Diversity(form=form).of("image", Aggregated(None, slots))


@pytest.mark.parametrize("dtype", DTYPES)
def test_recorded_diversity(golden, dtype):
    data = golden("triplet_and_regularisers")
    images, captions = leaf(data, "in_img_slots", dtype), leaf(data, "in_txt_slots", dtype)
    loss = Diversity()(None, None, Aggregated(None, images), Aggregated(None, captions))
    loss.backward()
    assert_near(loss, data[f"out{bits(dtype)}_div_slots_mean"], near(dtype))
    assert_near(images.grad, data[f"grad{bits(dtype)}_div_slots_mean_img_slots"], near(dtype))
    assert_near(captions.grad, data[f"grad{bits(dtype)}_div_slots_mean_txt_slots"], near(dtype))
    pairs = math.comb(images.shape[1], 2)
    assert_near(diversity(images) * pairs, data[f"out{bits(dtype)}_div_img_slots_pairsum"], near(dtype))


def test_diversity_by_hand_and_gradcheck():
    # Two opposite, two orthogonal, two equal slots: squared distances 4, 2 and 0.
    slots = torch.tensor([[[2.0, 0], [-3, 0]], [[1, 0], [0, 5]], [[1, 1], [2, 2]]], dtype=torch.float64)
    expected = (math.exp(-8) + math.exp(-4) + 1) / 3
    assert diversity(slots).item() == pytest.approx(expected, rel=1e-12)
    assert torch.autograd.gradcheck(diversity, torch.randn(2, 3, 4, dtype=torch.float64, requires_grad=True))


def test_diversity_of_a_single_slot_is_an_attached_zero():
    slots = torch.randn(2, 1, 4, requires_grad=True)
    loss = diversity(slots)
    loss.backward()
    assert loss.item() == 0
    assert (slots.grad == 0).all()


def test_diversity_without_slots_names_the_side():
    with_slots, without = Aggregated(torch.ones(2, 3, 4), torch.ones(2, 3, 4)), Aggregated(torch.ones(2, 4))
    with pytest.raises(ValueError, match="slots, which the image side does not give"):
        Diversity()(None, None, without, with_slots)
    with pytest.raises(ValueError, match="slots, which the text side does not give"):
        Diversity()(None, None, with_slots, without)


@pytest.mark.parametrize("dtype", DTYPES)
def test_recorded_gram_diversity(golden, dtype):
    data = golden("triplet_and_regularisers")
    images, captions = leaf(data, "single/in_img_set", dtype), leaf(data, "single/in_txt_set", dtype)
    sides = Aggregated(None, images), Aggregated(None, captions)
    loss = Diversity(form="gram")(None, None, *sides)
    loss.backward()
    assert_near(loss, data[f"single/out{bits(dtype)}_gram_diversity"], near(dtype))
    assert_near(images.grad, data[f"single/grad{bits(dtype)}_gram_diversity_img"], near(dtype))
    assert_near(captions.grad, data[f"single/grad{bits(dtype)}_gram_diversity_txt"], near(dtype))


def test_gram_diversity_by_hand_and_gradcheck():
    # Equal slots: the Gram matrix without its diagonal has two ones; orthogonal slots: none.
    slots = torch.tensor([[[1, 1], [2, 2]], [[1, 0], [0, 5]]], dtype=torch.float64)
    assert diversity(slots, "gram").item() == pytest.approx((math.sqrt(2) + 0) / 2 / 4, rel=1e-12)
    slots = torch.randn(2, 3, 4, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(lambda x: diversity(x, "gram"), slots)


def test_gram_diversity_where_nothing_is_alike_has_no_gradient():
    for slots in (torch.randn(2, 1, 4), torch.eye(4)[None, :3].clone()):
        slots.requires_grad_()
        loss = diversity(slots, "gram")
        loss.backward()
        assert loss.item() == 0
        assert (slots.grad == 0).all()
        slots.requires_grad_(False)
