"""Rows and their padding: which rows of a batch count, and what one makes of those that do.

A batch of samples with different numbers of rows is padded to the longest. The first `length[b]` rows of sample b are
valid, those after them are padding, and whatever stands there changes no result. A sample may have no row at all.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn import functional

from ...pipeline.device import stacked


def valid_rows(rows: Tensor, length: Tensor) -> Tensor:
    """Return which rows of `rows [B, N, ...]` are no padding, bool `[B, N]` on their device; `length [B]` is on any."""
    return torch.arange(rows.shape[1], device=rows.device) < length.to(rows.device)[:, None]


def zero_padding(rows: Tensor, length: Tensor) -> Tensor:
    """Return `rows [B, N]` or `[B, N, C]` with zeros in the place of padding."""
    padding = torch.arange(rows.shape[1], device=rows.device) >= length.to(rows.device)[:, None]
    return rows.masked_fill(padding if rows.ndim == 2 else padding[..., None], 0)


def with_ends(token: Tensor, length: Tensor, start: int, end: int) -> tuple[Tensor, Tensor]:
    """Return `token [B, N]` with `start` before and `end` after each sample's valid ids, `[B, N + 2]`, and lengths."""
    longer = functional.pad(token, (1, 1))
    longer[:, 0] = start
    length = length.to(token.device) + 2
    return longer.scatter(1, length[:, None] - 1, end), length


def rows_of_all(parts: Sequence[tuple[Tensor, Tensor]]) -> tuple[Tensor, Tensor]:
    """Return the valid rows of several batches of the same B samples one after the other, and their numbers `[B]`.

    Of rows `[B, N_p, C]` and lengths `[B]` each: `[B, sum of all N_p, C]`, with zeros after a sample's own rows.
    """
    rows = torch.cat([own for own, _ in parts], 1)
    padding = torch.cat([~valid_rows(own, length) for own, length in parts], 1)
    order = padding.int().argsort(dim=1, stable=True)  # the valid ones first, as they stand
    number = torch.stack([length.to(rows.device) for _, length in parts]).sum(0)
    return zero_padding(rows.gather(1, order[..., None].expand_as(rows)), number), number


def mean_rows(rows: Tensor, length: Tensor) -> Tensor:
    """Return the mean of the valid rows of `rows [B, N, C]`, `[B, C]`; zeros where there are none."""
    number = length.to(rows).clamp(min=1)[:, None]
    if stacked():  # rows of many heads are not copied
        return ((valid_rows(rows, length) / number).to(rows)[:, None] @ rows)[:, 0]
    return zero_padding(rows, length).sum(1) / number


def max_rows(rows: Tensor, length: Tensor) -> Tensor:
    """Return the maximum of the valid rows of `rows [B, N, C]`, `[B, C]`; zeros where there are none."""
    valid = valid_rows(rows, length)
    # A padded row must lose even where every value is negative.
    rows = rows.masked_fill(~valid[..., None], -torch.inf)
    return rows.amax(1).masked_fill(~valid.any(1)[:, None], 0)


def last_row(rows: Tensor, length: Tensor) -> Tensor:
    """Return the last valid row of each sample of `rows [B, N, C]`, `[B, C]`; zeros where there is none."""
    length = length.to(rows.device)
    place = (length.clamp(min=1) - 1)[:, None, None]
    last = rows.gather(1, place.expand(-1, 1, rows.shape[2]))[:, 0]
    return last.masked_fill((length < 1)[:, None], 0)


def softmax(scores: Tensor, valid: Tensor, axis: int) -> Tensor:
    """Return the softmax of `scores` along `axis` over what is `valid`, which broadcasts to them; zero elsewhere.

    Where nothing is valid all weights are zero, and so are the gradients.
    """
    # The most negative number, not -inf: a sample without rows must not become NaN.
    weights = scores.masked_fill(~valid, torch.finfo(scores.dtype).min).softmax(axis)
    return weights.masked_fill(~valid, 0)


class MovedRows(torch.autograd.Function):
    """Some rows of a matrix, or all of them with rows of zeros between, by the ways there and back (`way_back`).

    No row is taken twice, so that its gradient is another gather, which nobody has to sort.
    """

    @staticmethod
    def forward(ctx: Any, rows: Tensor, there: Tensor, back: Tensor) -> Tensor:
        """Return the rows on the way `there` of `rows [R, C]`."""
        ctx.save_for_backward(there, back)
        return _rows_at(rows, there)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        """Return the gradient of `rows`."""
        return _rows_at(gradient, ctx.saved_tensors[1]), None, None


def _rows_at(rows: Tensor, places: Tensor) -> Tensor:
    if len(places) > len(rows):  # some are of zeros
        rows = functional.pad(rows, (0, 0, 0, 1))
    return rows.index_select(0, places)


def way_back(chosen: Tensor, number: int) -> Tensor:
    """Return the way back from those `chosen [R]` of `number` rows to all of them: R for what is not chosen."""
    return torch.full((number,), len(chosen)).scatter(0, chosen, torch.arange(len(chosen)))
