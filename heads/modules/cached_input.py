"""What is done to a cached feature before a head reads it: standardisation, and noise while training.

Frozen features of a small data set are learnt by heart within a few epochs; noise on them keeps a head from it.
Sources: *Frozen Feature Augmentation for Few-Shot Image Classification* (arXiv 2403.10519) for noise on cached
features, by channel and by value; dropout of whole channels is that of Tompson et al. (arXiv 1411.4280) over rows.
"""

from collections.abc import Iterable

import torch
from torch import Tensor, nn
from torch.nn.functional import dropout


class CachedInput(nn.Module):
    """Standardises a cached feature and, while training, drops or disturbs parts of it.

    Args:
        channels: width C of the feature.
        standardize: subtract each channel's mean and divide by its standard deviation, both of the training split.
            `measure` sets them; they are kept with the weights.
        channel_dropout: the share of the channels that is zero in all rows of a sample, drawn anew for each.
        dropout: the share of the values that is zero, drawn for each by itself. Both shares scale up what is left.
        noise: standard deviation of what is added to each value; with `standardize` in units of the channel's own.
    """

    mean: Tensor
    deviation: Tensor

    def __init__(
        self, channels: int, *, standardize: bool, channel_dropout: float, dropout: float, noise: float
    ) -> None:
        super().__init__()
        self.standardize, self.noise = standardize, noise
        self.channel_dropout, self.dropout = channel_dropout, dropout
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
        if not self.training:
            return x
        if self.channel_dropout:
            kept = x.new_ones(len(x), *(1,) * (x.ndim - 2), x.shape[-1])
            x = x * dropout(kept, self.channel_dropout)
        x = dropout(x, self.dropout) if self.dropout else x
        return x + self.noise * torch.randn_like(x) if self.noise else x
