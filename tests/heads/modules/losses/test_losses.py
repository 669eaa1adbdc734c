"""Losses together: the total of a system, half precision, and the registry."""

import pytest
import torch

from xret.heads.modules.aggregators import Aggregated
from xret.heads.modules.losses import LOSSES
from xret.heads.modules.losses.diversity import Diversity
from xret.heads.modules.losses.infonce import InfoNCE
from xret.heads.modules.losses.mmd import MMD
from xret.heads.modules.losses.sigmoid import Sigmoid


def mmd(images, captions):
    return MMD()(None, None, Aggregated(images), Aggregated(captions))


def diversity(slots, form="exponential"):
    return Diversity(form=form).of("image", Aggregated(None, slots))


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


@pytest.mark.parametrize("loss", [InfoNCE(), Sigmoid()])
def test_half_similarities_are_compared_in_float32(loss):
    similarity, positives = torch.randn(4, 6).half(), torch.arange(4)[:, None] == torch.tensor([0, 0, 1, 2, 3, 3])
    similarity = similarity.masked_fill(torch.arange(24).view(4, 6) == 2, -torch.inf)
    found = loss(similarity, positives)
    assert found.dtype == torch.float32
    assert found.item() == pytest.approx(loss(similarity.double(), positives).item(), rel=1e-5)


def test_registry_can_be_made_without_memory():
    for name, loss in LOSSES.items():
        with torch.device("meta"):
            made = loss(4, 7) if name == "caption-generation" else loss()
        made.to_empty(device="cpu")
