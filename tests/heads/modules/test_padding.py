"""Rows and their padding: whatever stands on padding changes nothing, and samples without rows give no NaN."""

from contextlib import nullcontext

import pytest
import torch
from torch.testing import assert_close

from xret.heads.modules.padding import last_row, mean_rows, rows_of_all, softmax, valid_rows, with_ends, zero_padding
from xret.pipeline.device import stacking

LENGTH = torch.tensor([2, 0, 3])


@pytest.mark.parametrize("garbage", [7.0, torch.inf, torch.nan])
def test_padding_becomes_zero_in_two_and_in_three_dimensions(garbage):
    rows = torch.arange(1.0, 19).view(3, 3, 2)
    expected = torch.stack([rows[b] * (torch.arange(3) < LENGTH[b])[:, None] for b in range(3)])
    dirty = rows.masked_fill(~valid_rows(rows, LENGTH)[..., None], garbage)
    assert torch.equal(zero_padding(dirty, LENGTH), expected)
    assert torch.equal(zero_padding(dirty[..., 0], LENGTH), expected[..., 0])


def test_last_row_of_each_sample():
    rows = torch.arange(1.0, 19).view(3, 3, 2)
    assert torch.equal(last_row(rows, LENGTH), torch.stack([rows[0, 1], torch.zeros(2), rows[2, 2]]))


@pytest.mark.parametrize("together", [nullcontext(), stacking([], None)])
def test_mean_of_each_sample(together):
    rows = torch.arange(1.0, 19).view(3, 3, 2)
    with together:
        assert_close(mean_rows(rows, LENGTH), torch.stack([rows[0, :2].mean(0), torch.zeros(2), rows[2].mean(0)]))


def test_softmax_is_that_of_the_valid_scores_alone():
    scores = torch.randn(3, 3, requires_grad=True)
    weights = softmax(scores, valid_rows(scores, LENGTH), 1)
    assert_close(weights[0], torch.cat([scores[0, :2].softmax(0), torch.zeros(1)]))
    assert_close(weights[2], scores[2].softmax(0))
    assert (weights[1] == 0).all()
    weights.square().sum().backward()
    assert scores.grad.isfinite().all()
    assert (scores.grad[1] == 0).all()


def test_lengths_may_lie_on_another_device_than_rows():
    token, rows = torch.zeros(3, 4, dtype=torch.long, device="meta"), torch.zeros(3, 4, 2, device="meta")
    longer, length = with_ends(token, LENGTH, 7, 8)
    assert (longer.shape, length.shape, length.device) == ((3, 6), (3,), token.device)
    joined, number = rows_of_all([(rows, LENGTH), (rows, LENGTH)])
    assert (joined.shape, number.shape, number.device) == ((3, 8, 2), (3,), rows.device)
