"""InfoNCE, soft contrastive loss and matching cross-entropy: recorded values, loops over pairs, pairs left out."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from recorded import DTYPES, assert_near, assert_recorded, bits, leaf, near, own
from torch import nn
from torch.nn.functional import normalize

from xret.heads.modules.embedding import Gaussian
from xret.heads.modules.losses.contrastive import InfoNCE
from xret.heads.modules.losses.matching import MatchingBCE, SoftContrastive
from xret.heads.modules.similarity.gaussian import SampledDistance
from xret.heads.modules.similarity.samples import monte_carlo_log_odds
from xret.heads.modules.similarity.sets import Cosine

soft_contrastive = SoftContrastive()
SCALES = [(5, 5), (15, 15), (1, 0.5)]


def infonce(similarity, positives, scale=1.0):
    loss = InfoNCE()
    del loss.scale
    loss.scale = scale
    return loss(similarity, positives)


def matching_bce(similarity, positives, scale=5.0, shift=5.0, **pseudo_positives):
    loss = MatchingBCE(**pseudo_positives)
    del loss.scale, loss.shift
    loss.scale, loss.shift = scale, shift
    return loss(similarity, positives)


LOSSES = [infonce, soft_contrastive, matching_bce, lambda s, p: matching_bce(s, p, pseudo_positives=0.3)]


# ---- InfoNCE


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("scale", [1, 20])
def test_recorded_infonce(golden, scale, dtype):
    data = golden("set_regularisers")
    images, captions = leaf(data, "in_nce_img", dtype), leaf(data, "in_nce_txt", dtype)
    module = InfoNCE(scale=scale).to(dtype)
    loss = module(Cosine()(images, captions), own(9, 1), None, None)
    key = f"infonce_tau{scale}"
    assert_recorded(data, key, loss, {"img": images, "txt": captions}, dtype)
    assert_near(module.scale.grad.view(1), data[f"grad{bits(dtype)}_{key}_tau"], near(dtype), 1e-7)


def infonce_by_loop(similarity, positives):
    total = 0.0
    for s, p in ((similarity, positives), (similarity.T, positives.T)):
        terms = []
        for row, own_row in zip((3 * s).tolist(), p.tolist(), strict=True):
            others = sum(math.exp(x) for x, is_own in zip(row, own_row, strict=True) if not is_own)
            terms += [math.log(1 + others * math.exp(-x)) for x, is_own in zip(row, own_row, strict=True) if is_own]
        total += sum(terms) / max(len(terms), 1) / 2
    return total


# ---- soft contrastive


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("scale", "shift"), SCALES)
def test_recorded_soft_contrastive_of_samples(golden, scale, shift, dtype):
    data, key = golden("probabilistic_losses"), f"a{scale}_b{shift}"
    images, captions = leaf(data, "soft/in_img_samples", dtype), leaf(data, "soft/in_txt_samples", dtype)
    a, b = (torch.tensor(float(x), dtype=dtype, requires_grad=True) for x in (scale, shift))
    odds = monte_carlo_log_odds(images, captions, a, b)
    loss = SoftContrastive()(odds, own(6, 1), None, None)
    tolerance = 2e-4 if dtype is torch.float32 and scale == 15 else near(dtype)
    assert_near(odds.sigmoid(), data[f"soft/out64_match_prob_{key}"], tolerance)
    leaves = {"img": images, "txt": captions, "scale": a, "shift": b}
    value = data.pop(f"soft/out{bits(dtype)}_loss_{key}")
    assert_recorded({**data, f"soft/out{bits(dtype)}_{key}": value}, key, loss, leaves, dtype, "soft/", tolerance)


@pytest.mark.parametrize(("scale", "shift"), SCALES)
def test_recorded_soft_contrastive_with_the_logistic_link(golden, scale, shift):
    data = golden("probabilistic_losses")
    images, captions = (torch.tensor(data[f"soft/in_{side}_samples"]).double() for side in ("img", "txt"))
    odds = monte_carlo_log_odds(images, captions, scale, shift, link="logistic")
    expected = data[f"soft/out64_plain_logistic_loss_a{scale}_b{shift}"]
    assert_near(soft_contrastive(odds, own(6, 1)), expected, 1e-9)


def soft_contrastive_by_loop(similarity, positives):
    pairs = zip(similarity.flatten().tolist(), positives.flatten().tolist(), strict=True)
    return 2 * sum(math.log(1 + math.exp(-x if is_own else x)) for x, is_own in pairs)


def test_samples_far_apart_have_a_gradient():
    # The distance of two unit means with unit variances in 1024 dimensions is about 45: p is about exp(-1320).
    similarity = torch.tensor([[-1320.0]], requires_grad=True)
    loss = soft_contrastive(similarity, torch.tensor([[True]]))
    loss.backward()
    assert loss.item() == 2640
    assert similarity.grad.item() == -2


# ---- matching cross-entropy


def squared_wasserstein(images, captions):
    means = [normalize(side.mean, dim=1) for side in (images, captions)]
    roots = [(side.log_variance / 2).exp() for side in (images, captions)]
    return -sum((one[:, None] - other).square().sum(2) for one, other in (means, roots))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("key", "scale", "shift", "pseudo"),
    [("match_a5_b5", 5, 5, 0), ("match_a3_b2", 3, 2, 0), ("pseudo0.1", 5, 5, 0.1), ("wasserstein_a5_b5", 5, 5, 0)],
)
def test_recorded_matching(golden, key, scale, shift, pseudo, dtype):
    data = golden("probabilistic_losses")
    leaves = {
        f"{side}_{part}": leaf(data, f"csd/in_{side}_{part}", dtype)
        for side in ("img", "txt")
        for part in ("mean", "logvar")
    }
    compare = squared_wasserstein if key.startswith("wasserstein") else SampledDistance()
    similarity = compare(*(Gaussian(leaves[f"{side}_mean"], leaves[f"{side}_logvar"]) for side in ("img", "txt")))
    if compare is not squared_wasserstein:
        assert_near(-similarity, data[f"csd/out{bits(dtype)}_distance"], near(dtype))
    module = MatchingBCE(pseudo_positives=pseudo).to(dtype)
    nn.init.constant_(module.scale, scale)
    nn.init.constant_(module.shift, shift)
    loss = module(similarity, torch.tensor(data["csd/in_match"]) > 0, None, None)
    leaves |= {"scale": module.scale, "shift": module.shift}
    assert_recorded(data, key, loss, leaves, dtype, "csd/")


def bce_by_loop(logits, labels):
    pairs = zip(logits.flatten().tolist(), labels.flatten().tolist(), strict=True)
    terms = [math.log(1 + math.exp(-x if label else x)) for x, label in pairs if x > -math.inf]
    return sum(terms) / max(len(terms), 1)


def matching_by_loop(similarity, positives, pseudo=0.0):
    total = 2 * bce_by_loop(3 * similarity + 1, positives)
    for s, p in ((similarity, positives), (similarity.T, positives.T)):
        labels = p.clone()
        for row in range(len(s)):
            closest = max((s[row, j].item() for j in range(s.shape[1]) if p[row, j]), default=math.inf)
            for column in range(s.shape[1]):
                labels[row, column] |= s[row, column].item() >= closest
        total += pseudo * bce_by_loop(3 * s + 1, labels)
    return total


# ---- all of them


@given(
    seed=st.integers(0, 10_000),
    images=st.integers(1, 5),
    captions=st.integers(1, 8),
    share=st.sampled_from([0.0, 0.5]),
)
def test_losses_are_the_loops_over_pairs_but_ignored_ones(seed, images, captions, share):
    generator = torch.Generator().manual_seed(seed)
    similarity = torch.randn(images, captions, generator=generator, dtype=torch.float64).requires_grad_()
    positives = torch.rand(images, captions, generator=generator) < 0.4  # any number a row and a column
    ignored = ~positives & (torch.rand(images, captions, generator=generator) < share)
    kept = similarity.masked_fill(ignored, -torch.inf)
    scale, shift = (torch.tensor(x, dtype=torch.float64, requires_grad=True) for x in (3.0, 1.0))
    for loss, expected in (
        (infonce(kept, positives, scale), infonce_by_loop(kept, positives)),
        (soft_contrastive(kept, positives), soft_contrastive_by_loop(kept, positives)),
        (matching_bce(kept, positives, scale, shift), matching_by_loop(kept, positives)),
        (matching_bce(kept, positives, scale, shift, pseudo_positives=0.5), matching_by_loop(kept, positives, 0.5)),
    ):
        assert loss.item() == pytest.approx(expected, rel=1e-9, abs=1e-12)
        gradients = torch.autograd.grad(loss, (similarity, scale, shift), allow_unused=True, retain_graph=True)
        assert all(g is None or g.isfinite().all() for g in gradients)
        assert (gradients[0][ignored] == 0).all()


@pytest.mark.parametrize("loss", LOSSES)
@pytest.mark.parametrize("everything", [True, False])
def test_one_sort_of_pairs_alone_has_a_gradient(loss, everything):
    similarity = torch.rand(2, 3, requires_grad=True)
    value = loss(similarity, torch.full((2, 3), everything))
    value.backward()
    assert value.isfinite()
    assert similarity.grad.isfinite().all()
    if loss is infonce:  # it compares the two sorts, and stays attached to the graph
        assert value.item() == 0
        assert (similarity.grad == 0).all()
