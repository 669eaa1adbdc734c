"""Distillation against torch's own divergence and a slow loop."""

import pytest
import torch
from torch.nn.functional import kl_div

from xret.losses import Distillation


def matrices(seed=0):
    draw = torch.Generator().manual_seed(seed)
    return (torch.rand(4, 7, generator=draw, dtype=torch.float64) * 2 - 1 for _ in range(2))


@pytest.mark.parametrize("scale", [1.0, 30.0])
def test_it_is_torchs_divergence_of_both_directions(scale):
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


def test_pairs_that_are_left_out_are_left_out_of_the_teachers_too():
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
