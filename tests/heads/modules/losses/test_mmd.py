"""Maximum mean discrepancy against recorded values and a loop over pairs."""

import math

import pytest
import torch
from recorded import DTYPES, assert_gradients, assert_near, bits, leaf

from xret.heads.modules.aggregators import Aggregated
from xret.heads.modules.losses.mmd import MMD


def mmd(images, captions):
    return MMD()(None, None, Aggregated(images), Aggregated(captions))


@pytest.mark.parametrize("dtype", DTYPES)
def test_recorded_values(golden, dtype):
    data = golden("triplet_and_regularisers")
    leaves = {side: leaf(data, f"in_{side}", dtype) for side in ("img", "txt")}
    loss, exact = mmd(*leaves.values()), dtype is torch.float64
    assert_near(loss, data[f"out{bits(dtype)}_mmd_root_exact"], 1e-9, 0 if exact else 1e-5)
    assert_gradients(data, "mmd_root_exact", loss, leaves, dtype, tolerance=1e-7 if exact else 1e-3)
    # The recorded distances of one caption an image come from a matrix product: a point is 1e-8 away from itself.
    single = mmd(*(leaf(data, f"single/in_{side}_set", dtype) for side in leaves))
    assert_near(single, data[f"single/out{bits(dtype)}_mmd_root"], 1e-7, 0 if exact else 1e-5)


def mmd_by_loop(x, y):
    x, y = (torch.nn.functional.normalize(e, dim=-1).flatten(0, -2).tolist() for e in (x, y))

    def mean(a, b):
        return sum(math.exp(-0.5 * math.dist(p, q)) for p in a for q in b) / (len(a) * len(b))

    return mean(x, x) - 2 * mean(x, y) + mean(y, y)


@pytest.mark.parametrize("shape", [(3, 5), (3, 1, 5), (2, 3, 5)])
def test_mmd_is_the_loop(shape):
    images, captions = torch.randn(shape, dtype=torch.float64), torch.randn(7, *shape[1:], dtype=torch.float64)
    assert mmd(images, captions).item() == pytest.approx(mmd_by_loop(images, captions), rel=1e-9)


@pytest.mark.parametrize("dtype", DTYPES)
def test_mmd_of_coinciding_elements_has_no_gradient(dtype):
    # Collapsed sets and repeated captions: every distance is zero up to rounding.
    images = torch.randn(1, 1, 512, dtype=dtype).expand(4, 4, 512).clone().requires_grad_()
    captions = (3 * images.detach()[:2]).requires_grad_()
    loss = mmd(images, captions)
    loss.backward()
    assert abs(loss.item()) < 1e-5
    assert images.grad.norm() < 1e-5
    assert captions.grad.norm() < 1e-5
