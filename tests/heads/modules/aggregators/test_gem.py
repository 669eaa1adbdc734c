"""Generalised mean pooling: against its formula, at its two limits, and where the plain power breaks."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from xret.heads.modules.aggregators.gem import FLOOR, GeM, generalised_mean
from xret.heads.modules.padding import max_rows, mean_rows


@settings(max_examples=30)
@given(
    seed=st.integers(0, 1000),
    length=st.lists(st.integers(0, 6), min_size=1, max_size=4),
    p=st.floats(0.2, 20),
)
def test_is_the_root_of_the_mean_of_powers(seed, length, p):
    local = torch.randn(len(length), 6, 3, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    pooled = generalised_mean(local, torch.tensor(length), torch.tensor(p, dtype=torch.float64))
    for b, rows in enumerate(length):
        for column in range(3):
            powers = [max(x, FLOOR) ** p for x in local[b, :rows, column].tolist()]
            expected = (sum(powers) / rows) ** (1 / p) if rows else 0.0
            assert pooled[b, column].item() == pytest.approx(expected, rel=1e-9)


def test_gradients_are_those_of_the_formula():
    local = torch.rand(3, 4, 2, dtype=torch.float64).add(0.1).requires_grad_()
    p = torch.tensor(3.0, dtype=torch.float64, requires_grad=True)
    length = torch.tensor([4, 1, 0])
    assert torch.autograd.gradcheck(lambda x, p: generalised_mean(x, length, p), (local, p))


def test_from_average_to_maximum():
    local, length = torch.rand(3, 5, 4, dtype=torch.float64) + 0.1, torch.tensor([5, 2, 1])
    at = [generalised_mean(local, length, torch.tensor(p, dtype=torch.float64)) for p in (1.0, 1e6)]
    torch.testing.assert_close(at[0], mean_rows(local, length))
    torch.testing.assert_close(at[1], max_rows(local, length), rtol=1e-5, atol=0)


@pytest.mark.parametrize("scale", [1e-30, 1.0, 1e30])
@pytest.mark.parametrize("p", [1.001, 3.0, 1000.0])
def test_neither_values_nor_slopes_explode(scale, p):
    module = GeM(4, 4)
    torch.nn.init.constant_(module.weight, p - 1 + math.log(-math.expm1(1 - p)))
    local = (scale * torch.randn(3, 5, 4)).requires_grad_()  # half of it negative
    pooled = module(local, torch.tensor([5, 2, 0]), None).embedding
    pooled.sum().backward()
    assert pooled.isfinite().all()
    assert local.grad.isfinite().all()
    assert module.weight.grad.isfinite()
    assert (local.grad >= 0).all()
    assert local.grad.max() <= 5  # moving all rows alike moves the mean by as much, shared by the rows
    assert (local.grad[local < FLOOR] == 0).all()


def test_exponent_is_learned_from_where_it_begins():
    module = GeM(2, 2)
    assert module.p.item() == pytest.approx(3, rel=1e-6)
    local = torch.tensor([[[1.0, 2.0], [3.0, 0.5]]])
    module(local, torch.tensor([2]), None).embedding.sum().backward()
    assert module.weight.grad > 0  # a larger exponent comes nearer to the maximum
    assert list(module.state_dict()) == ["weight"]
