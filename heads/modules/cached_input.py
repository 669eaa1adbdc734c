"""What is done to a cached feature before a head reads it: standardisation, and dropout while training."""

from collections.abc import Iterable

import torch
from torch import Tensor, nn

from .dropout import dropout


class CachedInput(nn.Module):
    """Standardises a cached feature and, while training, drops parts of it.

    Args:
        channels: width C of the feature.
        standardize: subtract each channel's mean and divide by its standard deviation, both of the training split.
            `measure` sets them; they are kept with the weights.
        dropout: the share of the values that is zero, drawn for each by itself; it scales up what is left.
    """

    mean: Tensor
    deviation: Tensor

    def __init__(self, channels: int, *, standardize: bool, dropout: float) -> None:
        super().__init__()
        self.standardize, self.dropout = standardize, dropout
        if standardize:
            self.register_buffer("mean", torch.zeros(channels))
            self.register_buffer("deviation", torch.ones(channels))

    @torch.no_grad()
    def measure(self, values: Iterable[Tensor]) -> None:
        """Take mean and deviation from `values`, many tensors `[R, C]`; a channel that never changes stays unscaled."""
        count, total = 0, torch.zeros_like(self.mean, dtype=torch.float64)
        squares = total.clone()
        for rows in values:
            rows = rows.double()
            count, total, squares = count + len(rows), total + rows.sum(0), squares + rows.square().sum(0)
        mean = total / max(count, 1)
        deviation = (squares / max(count, 1) - mean.square()).clamp(min=0).sqrt()
        self.mean.copy_(mean)
        self.deviation.copy_(torch.where(deviation > 1e-6 * mean.abs().clamp(min=1e-6), deviation, 1.0))

    def forward(self, x: Tensor) -> Tensor:
        """Return what the head reads of `x [B, C]` or `[B, N, C]`, of the same shape."""
        if self.standardize:
            x = (x - self.mean) / self.deviation
        return dropout(x, self.dropout, self.training)
