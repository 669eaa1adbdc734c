"""Pooling of local rows: hand-made values, and padding that must not count."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from xret.heads.modules.aggregators.pooling import First, KMax, Last, sorted_rows
from xret.nn import Average, Global, Max

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
