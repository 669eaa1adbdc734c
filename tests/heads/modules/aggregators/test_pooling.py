"""Poolings of local rows: hand-made values, formulas one feature at a time, their limits, and padding."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from xret.heads.modules.aggregators import AGGREGATORS
from xret.heads.modules.aggregators.pooling import FLOOR, Pooling, generalised_mean, sorted_rows
from xret.heads.modules.padding import max_rows, mean_rows
from xret.nn import Average, First, FSPool, GeM, Global, KMax, Last, Max, PCMEPlusPlus, RegionGraph, TwinBranches

LOCAL = torch.tensor([[[-1.0, 4.0], [-3.0, 2.0], [99.0, 99.0]], [[1.0, 2.0], [3.0, -4.0], [-5.0, 6.0]]])
LENGTH = torch.tensor([2, 3])


def test_by_hand():
    # The first sample's values of column one are all negative: a padded zero, or 99, must not win.
    average = Average(2, 2)(LOCAL, LENGTH, None).embedding
    torch.testing.assert_close(average, torch.tensor([[-2.0, 3.0], [-1 / 3, 4 / 3]]))
    assert Max(2, 2)(LOCAL, LENGTH, None).embedding.tolist() == [[-1.0, 4.0], [3.0, 6.0]]
    assert KMax(2, 2)(LOCAL, LENGTH, None).embedding.tolist() == [[-2.0, 3.0], [2.0, 4.0]]
    assert First(2, 2)(LOCAL, LENGTH, None).embedding.tolist() == [[-1.0, 4.0], [1.0, 2.0]]
    assert Last(2, 2)(LOCAL, LENGTH, None).embedding.tolist() == [[-3.0, 2.0], [-5.0, 6.0]]
    assert sorted_rows(LOCAL, LENGTH).tolist() == [
        [[-1.0, 4.0], [-3.0, 2.0], [0.0, 0.0]],
        [[3.0, 6.0], [1.0, 2.0], [-5.0, -4.0]],
    ]


def test_global_is_the_embedding():
    global_ = torch.randn(2, 5)
    aggregated = Global(300, 5)(None, LENGTH, global_)
    assert aggregated.embedding is global_
    assert aggregated.slots is None
    assert aggregated.attention is None


@settings(max_examples=30)
@given(
    seed=st.integers(0, 1000),
    length=st.lists(st.integers(0, 6), min_size=1, max_size=4),
    k=st.integers(1, 9),
)
def test_k_max_is_the_mean_of_the_k_largest(seed, length, k):
    local = torch.randn(len(length), 6, 3, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    pooled = KMax(local.shape[2], local.shape[2], k=k)(local, torch.tensor(length), None).embedding
    for b, rows in enumerate(length):
        for column in range(3):
            largest = sorted(local[b, :rows, column].tolist(), reverse=True)[:k]
            assert pooled[b, column].item() == pytest.approx(sum(largest) / max(len(largest), 1))


@pytest.mark.parametrize("part", [part for part in AGGREGATORS.values() if issubclass(part, Pooling)])
def test_a_sample_without_rows_is_zero(part):
    found = part(8, 8)(torch.randn(3, 5, 8), torch.tensor([0, 5, 3]), None).embedding
    assert not found[0].any() and found[1:].any(1).all()


@pytest.mark.parametrize(
    ("part", "parameters"),
    [
        (FSPool, {}),
        (Average, {}),
        (RegionGraph, {"then": "average"}),
        (PCMEPlusPlus, {}),
        (TwinBranches, {"of": "average"}),
    ],
)
def test_what_only_pools_keeps_the_width(part, parameters):
    with pytest.raises(ValueError, match="keeps the width of the local rows, which is 3 and not 4"):
        part(3, 4, **parameters)


@settings(max_examples=30)
@given(
    seed=st.integers(0, 1000),
    length=st.lists(st.integers(0, 9), min_size=1, max_size=4),
    pieces=st.integers(1, 12),
)
def test_weights_of_fspool_are_interpolated(seed, length, pieces):
    torch.manual_seed(seed)
    module = FSPool(3, 3).double()
    module.weight = torch.nn.Parameter(torch.randn(pieces + 1, 3, dtype=torch.float64))
    local = torch.randn(len(length), 9, 3, dtype=torch.float64)
    pooled = module(local, torch.tensor(length), None).embedding
    knots = np.linspace(0, 1, pieces + 1)
    for b, rows in enumerate(length):
        places = np.linspace(0, 1, rows) if rows > 1 else np.zeros(rows)
        for column in range(3):
            values = np.sort(local[b, :rows, column].numpy())[::-1]
            weights = np.interp(places, knots, module.weight[:, column].detach().numpy())
            assert pooled[b, column].item() == pytest.approx((weights * values).sum(), rel=1e-9, abs=1e-12)


@settings(max_examples=30)
@given(
    seed=st.integers(0, 1000),
    length=st.lists(st.integers(0, 6), min_size=1, max_size=4),
    p=st.floats(0.2, 20),
)
def test_gem_is_the_root_of_the_mean_of_powers(seed, length, p):
    local = torch.randn(len(length), 6, 3, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    pooled = generalised_mean(local, torch.tensor(length), torch.tensor(p, dtype=torch.float64))
    for b, rows in enumerate(length):
        for column in range(3):
            powers = [max(x, FLOOR) ** p for x in local[b, :rows, column].tolist()]
            expected = (sum(powers) / rows) ** (1 / p) if rows else 0.0
            assert pooled[b, column].item() == pytest.approx(expected, rel=1e-9)


def test_gradients_of_gem_are_those_of_the_formula():
    local = torch.rand(3, 4, 2, dtype=torch.float64).add(0.1).requires_grad_()
    p = torch.tensor(3.0, dtype=torch.float64, requires_grad=True)
    length = torch.tensor([4, 1, 0])
    assert torch.autograd.gradcheck(lambda x, p: generalised_mean(x, length, p), (local, p))


def test_gem_from_average_to_maximum():
    local, length = torch.rand(3, 5, 4, dtype=torch.float64) + 0.1, torch.tensor([5, 2, 1])
    at = [generalised_mean(local, length, torch.tensor(p, dtype=torch.float64)) for p in (1.0, 1e6)]
    torch.testing.assert_close(at[0], mean_rows(local, length))
    torch.testing.assert_close(at[1], max_rows(local, length), rtol=1e-5, atol=0)


@pytest.mark.parametrize("scale", [1e-30, 1.0, 1e30])
@pytest.mark.parametrize("p", [1.001, 3.0, 1000.0])
def test_neither_values_of_gem_nor_slopes_explode(scale, p):
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


def test_exponent_of_gem_is_learned_from_where_it_begins():
    module = GeM(2, 2)
    assert module.p.item() == pytest.approx(3, rel=1e-6)
    local = torch.tensor([[[1.0, 2.0], [3.0, 0.5]]])
    module(local, torch.tensor([2]), None).embedding.sum().backward()
    assert module.weight.grad > 0  # a larger exponent comes nearer to the maximum
    assert list(module.state_dict()) == ["weight"]
