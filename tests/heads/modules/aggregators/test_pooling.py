"""Pooling of local rows: hand-made values, and padding that must not count."""

from functools import partial

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from xret.heads.modules.aggregators import AGGREGATORS, Average, Global, Max
from xret.heads.modules.aggregators.pooling import First, KMax, Last, k_max_rows, sorted_rows
from xret.heads.modules.padding import max_rows, mean_rows, valid_rows

LOCAL = torch.tensor([[[-1.0, 4.0], [-3.0, 2.0], [99.0, 99.0]], [[1.0, 2.0], [3.0, -4.0], [-5.0, 6.0]]])
LENGTH = torch.tensor([2, 3])


def pooled_by(part):
    """The vectors that an aggregator makes of local rows."""
    return lambda local, length: part(local.shape[2], local.shape[2])(local, length, None).embedding


POOLS = [mean_rows, max_rows, partial(k_max_rows, k=2), sorted_rows, pooled_by(First), pooled_by(Last)]


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


@pytest.mark.parametrize("pool", POOLS)
@pytest.mark.parametrize("garbage", [0.0, 1e30, -1e30, float("inf"), float("nan")])
def test_padding_changes_nothing(pool, garbage):
    local = torch.randn(3, 5, 4, dtype=torch.float64)
    length = torch.tensor([5, 1, 3])
    alone = [pool(row[None, :n], torch.tensor([n]))[0] for row, n in zip(local, length, strict=True)]
    local[~valid_rows(local, length)] = garbage
    local.requires_grad_()
    pooled = pool(local, length)
    for sample, expected in zip(pooled, alone, strict=True):
        torch.testing.assert_close(sample[: len(expected)], expected)
    pooled.sum().backward()
    assert (local.grad[~valid_rows(local, length)] == 0).all()


@pytest.mark.parametrize("pool", POOLS)
def test_sample_without_rows_is_zero(pool):
    local = torch.randn(2, 3, 4, requires_grad=True)
    pooled = pool(local, torch.tensor([0, 2]))
    pooled.sum().backward()
    assert (pooled[0] == 0).all()
    assert local.grad.isfinite().all()


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
@pytest.mark.parametrize("pool", POOLS)
def test_dtype_is_kept(pool, dtype):
    local = torch.randn(2, 3, 4).to(dtype)
    pooled = pool(local, LENGTH)
    assert pooled.dtype == dtype
    torch.testing.assert_close(pooled.double(), pool(local.double(), LENGTH), rtol=0.02, atol=0.01)


@settings(max_examples=30)
@given(
    seed=st.integers(0, 1000),
    length=st.lists(st.integers(0, 6), min_size=1, max_size=4),
    k=st.integers(1, 9),
)
def test_k_max_is_the_mean_of_the_k_largest(seed, length, k):
    local = torch.randn(len(length), 6, 3, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    pooled = k_max_rows(local, torch.tensor(length), k)
    for b, rows in enumerate(length):
        for column in range(3):
            largest = sorted(local[b, :rows, column].tolist(), reverse=True)[:k]
            assert pooled[b, column].item() == pytest.approx(sum(largest) / max(len(largest), 1))


def test_k_max_lies_between_maximum_and_average():
    local, length = torch.randn(3, 5, 4), torch.tensor([5, 2, 1])
    torch.testing.assert_close(k_max_rows(local, length, 1), max_rows(local, length))
    torch.testing.assert_close(k_max_rows(local, length, 5), mean_rows(local, length))
    with pytest.raises(ValueError, match="KMax: k is 0, but must be between 1 and"):
        KMax(4, 4, k=0)


def test_registry_says_what_each_needs():
    said = {name: (part.uses_local, part.uses_global, part.embedding) for name, part in AGGREGATORS.items()}
    assert said["global"] == (False, True, "vector")
    assert said["average"] == said["max"] == (True, False, "vector")
    assert said["pie-net"] == said["pcme"] == (True, True, "set")


def test_width_is_not_changed():
    with pytest.raises(ValueError, match="Average keeps the width of the local rows, which is 300 and not 1024"):
        Average(300, 1024)
