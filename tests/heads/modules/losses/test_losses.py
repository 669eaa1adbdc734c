"""Losses together: the total of a system, half precision, and the registry."""

import pytest
import torch
from recorded import assert_near, leaf, own

from xret.heads.modules.aggregators import Aggregated
from xret.heads.modules.losses import LOSSES
from xret.heads.modules.losses.diversity import Diversity
from xret.heads.modules.losses.mmd import MMD
from xret.heads.modules.similarity.sets import SmoothChamfer


def mmd(images, captions):
    return MMD()(None, None, Aggregated(images), Aggregated(captions))


def diversity(slots, form="exponential"):
    return Diversity(form=form).of("image", Aggregated(None, slots))


def test_recorded_total_of_setdiv(golden):
    data = golden("triplet_and_regularisers")
    leaves = {name: leaf(data, f"in_{name}", torch.float64) for name in ("img", "txt", "img_slots", "txt_slots")}
    images = Aggregated(leaves["img"], leaves["img_slots"])
    captions = Aggregated(leaves["txt"], leaves["txt_slots"])
    similarity = SmoothChamfer()(images.embedding, captions.embedding)
    weights = {"triplet": 1, "mmd": 0.01, "diversity": 0.01}
    total = sum(weight * LOSSES[name]()(similarity, own(6, 5), images, captions) for name, weight in weights.items())
    total.backward()
    assert_near(total, data["out64_total_hard_mmd0.01_div0.01"], 1e-7)
    for name, tensor in leaves.items():
        assert_near(tensor.grad, data[f"grad64_total_hard_mmd0.01_div0.01_{name}"], 1e-7)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_embeddings_are_regularised_in_float32(dtype):
    images, captions = torch.randn(4, 3, 16).to(dtype), torch.randn(6, 3, 16).to(dtype)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        losses = mmd(images, captions), diversity(images), diversity(images, "gram")
    whole = images.double()
    expected = mmd(whole, captions.double()), diversity(whole), diversity(whole, "gram")
    for loss, reference in zip(losses, expected, strict=True):
        assert loss.dtype == torch.float32
        assert loss.item() == pytest.approx(reference.item(), rel=1e-5, abs=1e-6)


def test_registry_can_be_made_without_memory():
    for name, loss in LOSSES.items():
        with torch.device("meta"):
            made = loss(4, 7) if name == "caption-generation" else loss()
        made.to_empty(device="cpu")
