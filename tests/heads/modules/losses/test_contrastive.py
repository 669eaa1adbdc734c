"""Losses over all pairs: recorded values, loops over pairs, torch's own functions, pairs left out."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from recorded import DTYPES, assert_near, assert_recorded, bits, leaf, near, own
from torch import nn
from torch.nn.functional import binary_cross_entropy_with_logits, kl_div, normalize

from xret.heads.modules.embedding import Gaussian
from xret.heads.modules.similarity.sets import monte_carlo_log_odds
from xret.losses import Distillation, InfoNCE, MatchingBCE, Sigmoid, SoftContrastive
from xret.similarities import Cosine, SampledDistance

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


POSITIVES = torch.tensor([[1, 1, 0, 0], [0, 0, 1, 0], [0, 1, 0, 1]]) > 0


def similarity():
    torch.manual_seed(0)
    return torch.rand(3, 4, dtype=torch.float64) * 2 - 1


def test_the_logarithm_of_the_scale_is_the_same_scale():
    matrix = similarity()
    plain, logarithm = InfoNCE(scale=20), InfoNCE(scale=20, logarithm=True)
    torch.testing.assert_close(logarithm(matrix, POSITIVES), plain(matrix, POSITIVES), rtol=1e-5, atol=0)
    assert logarithm.scale.item() == pytest.approx(math.log(20))
    with torch.no_grad():
        logarithm.scale.fill_(50.0)
    torch.testing.assert_close(logarithm(matrix, POSITIVES), InfoNCE(scale=100)(matrix, POSITIVES), rtol=1e-5, atol=0)


def test_a_fixed_scale_is_no_weight_and_is_not_kept_with_them():
    for logarithm in (False, True):
        fixed = InfoNCE(learned=False, logarithm=logarithm, scale=3)
        assert not list(fixed.parameters())
        assert not fixed.state_dict()
        assert fixed.factor().item() == pytest.approx(3)


def test_the_sigmoid_loss_judges_every_pair_that_is_not_ignored():
    matrix, loss = similarity(), Sigmoid()
    terms = binary_cross_entropy_with_logits(10 * matrix - 10, POSITIVES.double(), reduction="none")
    torch.testing.assert_close(loss(matrix, POSITIVES), terms.sum() / 4)
    matrix[0, 2] = -torch.inf
    found = loss(matrix, POSITIVES)
    torch.testing.assert_close(found, (terms.sum() - terms[0, 2]) / 4)
    found.backward()
    assert all(p.grad.isfinite().all() for p in loss.parameters())


def test_a_scale_that_has_reached_its_bound_can_fall_again():
    """Where captions are the positives of wrong images, a small scale is best: its gradient leads there."""
    loss = InfoNCE(scale=99, logarithm=True)
    optimizer = torch.optim.SGD(loss.parameters(), lr=0.1)
    good = POSITIVES.double() * 0.2
    for matrix, bound in ((good, 100.0), (1 - 2 * POSITIVES.double(), 99.0)):
        for _ in range(20):
            optimizer.zero_grad()
            loss(matrix, POSITIVES).backward()
            optimizer.step()
        assert loss.factor().item() <= bound * (1 + 1e-6)
    with pytest.raises(ValueError, match="with logarithm, scale is at most 100, not 200"):
        InfoNCE(scale=200, logarithm=True)
    assert InfoNCE(scale=200).factor().item() == 200


def matrices(seed=0):
    draw = torch.Generator().manual_seed(seed)
    return (torch.rand(4, 7, generator=draw, dtype=torch.float64) * 2 - 1 for _ in range(2))


@pytest.mark.parametrize("scale", [1.0, 30.0])
def test_distillation_is_torchs_divergence_of_both_directions(scale):
    ours, theirs = matrices()
    found = Distillation(scale=scale)(ours, torch.zeros(4, 7) > 0, None, None, taught=theirs)
    expected = [
        kl_div((scale * a).log_softmax(1), (scale * b).log_softmax(1), reduction="batchmean", log_target=True)
        for a, b in ((ours, theirs), (ours.T, theirs.T))
    ]
    torch.testing.assert_close(found, sum(expected) / 2)
    assert float(Distillation(scale=scale)(theirs, torch.zeros(4, 7) > 0, None, None, taught=theirs)) == pytest.approx(
        0
    )


def test_pairs_that_distillation_leaves_out_are_left_out_of_the_teachers_too():
    ours, theirs = matrices(1)
    ignored = torch.zeros(4, 7, dtype=torch.bool)
    ignored[0, 2] = ignored[3, 2] = True
    left_out = ours.masked_fill(ignored, -torch.inf).requires_grad_()
    found = Distillation(scale=3.0)(left_out, torch.zeros(4, 7) > 0, None, None, taught=theirs)
    total = 0.0
    for mine, other, out in ((ours, theirs, ignored), (ours.T, theirs.T, ignored.T)):
        rows = []
        for a, b, some in zip(mine, other, ~out, strict=True):
            q, p = (3 * a[some]).softmax(0), (3 * b[some]).softmax(0)
            rows.append((p * (p / q).log()).sum())
        total += torch.stack(rows).mean() / 2
    torch.testing.assert_close(found.detach(), total)
    (gradient,) = torch.autograd.grad(found, left_out)
    assert gradient.isfinite().all()
    assert (gradient[ignored] == 0).all()
