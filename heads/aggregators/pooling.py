"""Aggregators without weights: the global feature as it is, and the average or maximum of the local rows."""

import torch
from torch import Tensor, nn

from .aggregated import Aggregated


def valid_rows(local: Tensor, length: Tensor) -> Tensor:
    """Return which rows of `local [B, N, C]` are no padding, as booleans `[B, N]`."""
    return torch.arange(local.shape[1], device=local.device) < length.to(local.device)[:, None]


def mean_rows(local: Tensor, length: Tensor) -> Tensor:
    """Average the first `length[b]` rows of `local [B, N, C]`, `[B, C]`; zeros where there are none."""
    rows = local.masked_fill(~valid_rows(local, length)[..., None], 0)
    return rows.sum(1) / length.to(local).clamp(min=1)[:, None]


def max_rows(local: Tensor, length: Tensor) -> Tensor:
    """Take the maximum of the first `length[b]` rows, `[B, C]`; zeros where there are none."""
    valid = valid_rows(local, length)
    # A padded row must lose even where every value is negative.
    rows = local.masked_fill(~valid[..., None], -torch.inf)
    return rows.amax(1).masked_fill(~valid.any(1)[:, None], 0)


class Global(nn.Module):
    """The global feature is the embedding (VSE++: the average-pooled map, the last GRU state)."""

    uses_local = False
    embedding = "vector"

    def __init__(self, local_dim: int, dim: int) -> None:
        super().__init__()

    def forward(self, local: Tensor | None, length: Tensor, global_: Tensor) -> Aggregated:
        """Return `global_ [B, D]` unchanged."""
        return Aggregated(global_)


class _Pool(nn.Module):
    uses_local = True
    embedding = "vector"

    def __init__(self, local_dim: int, dim: int) -> None:
        super().__init__()
        if local_dim != dim:
            raise ValueError(
                f"{type(self).__name__.lower()} pooling keeps the width of the local rows, "
                f"which is {local_dim} and not {dim}: let the adapter project them (words: local 'gru')"
            )


class Average(_Pool):
    """The average of a sample's local rows (AvgPool, VSE-infinity section 3.1)."""

    def forward(self, local: Tensor, length: Tensor, global_: Tensor) -> Aggregated:
        """Return the mean of the valid rows of `local [B, N, D]`, `[B, D]`."""
        return Aggregated(mean_rows(local, length))


class Max(_Pool):
    """The maximum of a sample's local rows, one feature at a time (MaxPool, VSE-infinity section 3.1)."""

    def forward(self, local: Tensor, length: Tensor, global_: Tensor) -> Aggregated:
        """Return the maximum of the valid rows of `local [B, N, D]`, `[B, D]`."""
        return Aggregated(max_rows(local, length))
