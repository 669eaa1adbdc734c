"""InfoNCE, the sigmoid loss and distillation against loops over pairs and torch's own functions."""

import math

import pytest
import torch
from torch.nn.functional import binary_cross_entropy_with_logits, kl_div

from xret.losses import Distillation, InfoNCE, Sigmoid

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
