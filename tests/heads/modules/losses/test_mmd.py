"""Maximum mean discrepancy against recorded values and a loop over pairs."""

import math

import pytest
import torch
from recorded import DTYPES, assert_near, bits, leaf

from xret.heads.modules.aggregators import Aggregated
from xret.heads.modules.losses.mmd import MMD


def mmd(images, captions):
    return MMD()(None, None, Aggregated(images), Aggregated(captions))


@pytest.mark.parametrize("dtype", DTYPES)
def test_recorded_mmd(golden, dtype):
    data = golden("triplet_and_regularisers")
    images, captions = leaf(data, "in_img", dtype), leaf(data, "in_txt", dtype)
    loss = mmd(images, captions)
    loss.backward()
    value, gradient = (1e-9, 1e-7) if dtype is torch.float64 else (0, 1e-3)
    assert_near(loss, data[f"out{bits(dtype)}_mmd_root_exact"], value, 0 if dtype is torch.float64 else 1e-5)
    assert_near(images.grad, data[f"grad{bits(dtype)}_mmd_root_exact_img"], gradient)
    assert_near(captions.grad, data[f"grad{bits(dtype)}_mmd_root_exact_txt"], gradient)


@pytest.mark.parametrize("dtype", DTYPES)
def test_recorded_mmd_with_one_caption(golden, dtype):
    data = golden("triplet_and_regularisers")
    loss = mmd(leaf(data, "single/in_img_set", dtype), leaf(data, "single/in_txt_set", dtype))
    # The recorded distances of this case come from a matrix product: a point is 1e-8 away from itself.
    assert_near(loss, data[f"single/out{bits(dtype)}_mmd_root"], 1e-7, 0 if dtype is torch.float64 else 1e-5)


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
