"""Losses computed in blocks against those of the whole matrix: values, gradients, and what is kept meanwhile."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn.functional import normalize

from xret.heads.modules.losses import LOSSES
from xret.heads.modules.losses.blocks import BlockLoss, Pairs, compared_masks, compared_pairs, in_blocks, pairs_of
from xret.heads.modules.losses.contrastive import InfoNCE, Sigmoid
from xret.heads.modules.losses.regularisers import SideLoss
from xret.pipeline.device import stacking

KINDS = {
    "infonce": lambda: InfoNCE(scale=7),
    "infonce, logarithm": lambda: InfoNCE(scale=20, logarithm=True),
    "infonce, fixed": lambda: InfoNCE(scale=5, learned=False),
    "infonce, large": lambda: InfoNCE(scale=300),
    "sigmoid": lambda: Sigmoid(scale=8),
}


def batch(seed, images, captions, dim=5, ignored=0.2, positive=0.3):
    generator = torch.Generator().manual_seed(seed)
    sides = [torch.randn(count, dim, generator=generator, dtype=torch.float64) for count in (images, captions)]
    chance = torch.rand(images, captions, generator=generator)
    return sides, chance < positive, (chance >= positive) & (chance < positive + ignored)


def value_and_gradients(loss, sides, compute):
    """The loss, and its gradients by embeddings and weights."""
    leaves = [side.clone().requires_grad_() for side in sides]
    value = compute(*leaves)
    gradients = torch.autograd.grad(3 * value, [*leaves, *loss.parameters()])
    return [value.detach(), *gradients]


def whole(loss, positives, ignored):
    def compute(images, captions):
        similarity = normalize(images, dim=1) @ normalize(captions, dim=1).T
        return loss(similarity.masked_fill(ignored, -torch.inf), positives)

    return compute


def blockwise(loss, positives, ignored, side):
    pairs = pairs_of(positives), pairs_of(ignored)
    return lambda *sides: in_blocks(loss, *(normalize(one, dim=1) for one in sides), *pairs, side=side)


@pytest.mark.parametrize("kind", KINDS)
@given(
    seed=st.integers(0, 10_000),
    images=st.integers(1, 9),
    captions=st.integers(1, 9),
    side=st.integers(1, 10),
    ignored=st.sampled_from([0.0, 0.3, 0.9]),
    positive=st.sampled_from([0.0, 0.1, 0.4, 1.0]),
)
@settings(max_examples=40, deadline=None)
def test_blocks_are_the_whole(kind, seed, images, captions, side, ignored, positive):
    loss = KINDS[kind]().double()
    sides, positives, left_out = batch(seed, images, captions, ignored=ignored, positive=positive)
    ours = value_and_gradients(loss, sides, blockwise(loss, positives, left_out, side))
    reference = value_and_gradients(loss, sides, whole(loss, positives, left_out))
    for found, expected in zip(ours, reference, strict=True):
        torch.testing.assert_close(found, expected, rtol=1e-10, atol=1e-12)


def test_positives_and_ignored_pairs_come_in_any_order():
    loss, (sides, positives, ignored) = InfoNCE(scale=7).double(), batch(5, 8, 9)
    own, others = pairs_of(positives), pairs_of(ignored)
    shuffled = [
        Pairs(*(axis[torch.randperm(len(axis), generator=torch.Generator().manual_seed(1))] for axis in pairs))
        for pairs in (own, others)
    ]
    torch.testing.assert_close(in_blocks(loss, *sides, *shuffled, side=4), in_blocks(loss, *sides, own, others, side=3))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("positive", [0.3, 0.05, 0.0])
def test_what_many_heads_compute_together_is_the_same(kind, positive):
    loss = KINDS[kind]().double()
    sides, positives, ignored = batch(3, 5, 8, positive=positive)
    alone = value_and_gradients(loss, sides, whole(loss, positives, ignored))
    with stacking([], None):
        together = value_and_gradients(loss, sides, whole(loss, positives, ignored))
    torch.testing.assert_close(together, alone)


@pytest.mark.parametrize("kind", KINDS)
def test_float32_is_as_close_as_rounding_allows(kind):
    loss, (sides, positives, ignored) = KINDS[kind](), batch(7, 90, 130, dim=32, positive=0.01, ignored=0.01)
    sides = [side.float() for side in sides]
    ours = value_and_gradients(loss, sides, blockwise(loss, positives, ignored, 32))
    reference = value_and_gradients(loss, sides, whole(loss, positives, ignored))
    for found, expected in zip(ours, reference, strict=True):
        torch.testing.assert_close(found, expected, rtol=2e-5, atol=2e-6 * expected.abs().max().item())


@pytest.mark.parametrize("kind", KINDS)
def test_extreme_scales_have_finite_gradients(kind):
    loss, (sides, positives, ignored) = KINDS[kind](), batch(9, 12, 12, positive=0.1)
    with torch.no_grad():
        (loss.log_scale if kind == "sigmoid" else loss.scale).fill_(4.6 if kind != "infonce" else 100.0)
    found = value_and_gradients(loss, [side.float() for side in sides], blockwise(loss, positives, ignored, 5))
    assert all(part.isfinite().all() for part in found)


@pytest.mark.parametrize("kind", KINDS)
def test_no_block_is_kept(kind):
    """What is held for going back is a small share of the matrix."""
    loss, kept, count = KINDS[kind](), [], 1024
    sides, _, nowhere = batch(1, count, count, dim=4, ignored=0)
    leaves = [side.float().requires_grad_() for side in sides]
    positives = torch.eye(count) > 0
    held = {}
    for name, compute in (
        ("blocks", blockwise(loss, positives, nowhere, 64)),
        ("whole", whole(loss, positives, nowhere)),
    ):
        kept.clear()
        with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t.numel()) or t, lambda t: t):
            compute(*leaves)
        held[name] = sum(kept)
    assert held["whole"] > count**2
    assert held["blocks"] < count**2 / 4


@pytest.mark.parametrize("spread", [0, 30, 60, 69, 71, 90, 200, 1e30])
def test_one_exponential_serves_where_float32_allows_it(spread):
    """Rows and columns that lie far below the others, against float64."""
    torch.manual_seed(0)
    matrix = 5 * torch.randn(6, 7)
    matrix[2] -= spread
    matrix[:, 4] -= spread
    leaf, reference = matrix.clone().requires_grad_(), matrix.double().requires_grad_()
    weights, own = (torch.rand(6), torch.rand(6), torch.rand(7)), torch.eye(6, 7) > 0
    found = InfoNCE().of_block(leaf * 1, pairs_of(own), pairs_of(own & ~own))
    negatives = reference.masked_fill(own, -torch.inf)
    expected = reference[own], negatives.logsumexp(1), negatives.logsumexp(0)
    for ours, theirs in zip(found, expected, strict=True):
        torch.testing.assert_close(ours, theirs.float())
    sum((ours * weight).sum() for ours, weight in zip(found, weights, strict=True)).backward()
    sum((theirs * weight).sum() for theirs, weight in zip(expected, weights, strict=True)).backward()
    torch.testing.assert_close(leaf.grad, reference.grad.float(), rtol=1e-4, atol=1e-7)


def test_which_losses_can_be_computed_in_blocks():
    assert {name for name, loss in LOSSES.items() if hasattr(loss, "of_block")} == {"infonce", "sigmoid"}
    with pytest.raises(ValueError, match="compares vectors"):
        none = pairs_of(torch.zeros(2, 2) > 0)
        in_blocks(Sigmoid(), torch.zeros(2, 3, 4), torch.zeros(2, 3, 4), none, none)


@pytest.mark.parametrize("base", [BlockLoss, SideLoss])
def test_a_loss_without_its_formula_cannot_be_made(base):
    with pytest.raises(TypeError, match="abstract method"):
        type("Half", (base,), {})()


@given(
    seed=st.integers(0, 1000),
    images=st.integers(1, 6),
    captions=st.integers(1, 12),
    texts=st.integers(1, 12),
    numbered=st.booleans(),
)
def test_listed_pairs_are_those_of_the_matrix(seed, images, captions, texts, numbered):
    generator = torch.Generator().manual_seed(seed)
    caption_image = torch.randint(images, (captions,), generator=generator)
    text = torch.randint(texts, (captions,), generator=generator) * 10
    own = torch.arange(images)[:, None] == caption_image
    alike = (own.int() @ (text[:, None] == text).int()) > 0  # an own caption has that text
    same = alike & ~own if numbered else torch.zeros_like(own)
    for positive in (True, False):
        found = compared_pairs(caption_image, text if numbered else None, same_is_positive=positive)
        expected = (own | same, torch.zeros_like(own)) if positive else (own, same)
        for pairs, matrix in zip(found, expected, strict=True):
            listed = torch.zeros(images, captions, dtype=torch.int64)
            listed.index_put_(pairs, torch.tensor(1), accumulate=True)
            assert torch.equal(listed, matrix.long())  # each once
        masks = compared_masks(images, caption_image, text if numbered else None, same_is_positive=positive)
        assert torch.equal(masks[0], expected[0])
        assert not expected[1].any() if masks[1] is None else torch.equal(masks[1], expected[1])
