"""Pooling of local rows: hand-made values, and padding that must not count."""

import pytest
import torch

from xret.heads.aggregators import AGGREGATORS, Average, Global, Max
from xret.heads.aggregators.pooling import max_rows, mean_rows, valid_rows

LOCAL = torch.tensor([[[-1.0, 4.0], [-3.0, 2.0], [99.0, 99.0]], [[1.0, 2.0], [3.0, -4.0], [-5.0, 6.0]]])
LENGTH = torch.tensor([2, 3])


def test_by_hand():
    # The first sample's values of column one are all negative: a padded zero, or 99, must not win.
    average = Average(2, 2)(LOCAL, LENGTH, None).embedding
    torch.testing.assert_close(average, torch.tensor([[-2.0, 3.0], [-1 / 3, 4 / 3]]))
    assert Max(2, 2)(LOCAL, LENGTH, None).embedding.tolist() == [[-1.0, 4.0], [3.0, 6.0]]


def test_global_is_the_embedding():
    global_ = torch.randn(2, 5)
    aggregated = Global(300, 5)(None, LENGTH, global_)
    assert aggregated.embedding is global_
    assert aggregated.slots is None
    assert aggregated.attention is None


@pytest.mark.parametrize("pool", [mean_rows, max_rows])
@pytest.mark.parametrize("garbage", [0.0, 1e30, -1e30, float("inf"), float("nan")])
def test_padding_changes_nothing(pool, garbage):
    local = torch.randn(3, 5, 4, dtype=torch.float64)
    length = torch.tensor([5, 1, 3])
    expected = torch.stack([pool(row[None, :n], torch.tensor([n]))[0] for row, n in zip(local, length, strict=True)])
    local[~valid_rows(local, length)] = garbage
    local.requires_grad_()
    pooled = pool(local, length)
    torch.testing.assert_close(pooled, expected)
    pooled.sum().backward()
    assert (local.grad[~valid_rows(local, length)] == 0).all()


@pytest.mark.parametrize("pool", [mean_rows, max_rows])
def test_sample_without_rows_is_zero(pool):
    local = torch.randn(2, 3, 4, requires_grad=True)
    pooled = pool(local, torch.tensor([0, 2]))
    pooled.sum().backward()
    assert (pooled[0] == 0).all()
    assert local.grad.isfinite().all()


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
@pytest.mark.parametrize("pool", [mean_rows, max_rows])
def test_dtype_is_kept(pool, dtype):
    local = torch.randn(2, 3, 4).to(dtype)
    pooled = pool(local, LENGTH)
    assert pooled.dtype == dtype
    torch.testing.assert_close(pooled.double(), pool(local.double(), LENGTH), rtol=0.02, atol=0.01)


def test_registry_says_what_each_needs():
    assert {name: (part.uses_local, part.embedding) for name, part in AGGREGATORS.items()} == {
        "global": (False, "vector"),
        "average": (True, "vector"),
        "max": (True, "vector"),
        "element-slots": (True, "set"),
    }


def test_width_is_not_changed():
    with pytest.raises(
        ValueError, match="average pooling keeps the width of the local rows, which is 300 and not 1024"
    ):
        Average(300, 1024)
