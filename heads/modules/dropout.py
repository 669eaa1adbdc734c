"""Dropout that takes a CPU a tenth of the time of torch's, which draws a number of 64 bits for every value, one by one.

Here one such number decides about four values, and so the rate is rounded to a multiple of 1/65536.
"""

import torch
from torch import Tensor, nn
from torch.nn import functional

LOTS = 1 << 16  # of a value; those below the rate's share of them drop it


def dropout(x: Tensor, rate: float, training: bool) -> Tensor:
    """Return `x` with each value zero by the chance `rate` and the rest scaled up; `x` itself unless `training`."""
    if x.device.type != "cpu" or not training or not rate:
        return functional.dropout(x, rate, training)
    lots = torch.empty(-(-x.numel() // 4), dtype=torch.int64).random_(-(1 << 63), None).view(torch.int16)
    dropped = round(rate * LOTS)
    kept = lots[: x.numel()].view(x.shape) >= dropped - LOTS // 2
    return x * kept.to(x.dtype).mul_(LOTS / (LOTS - dropped))


class Dropout(nn.Dropout):
    """`dropout` as a layer."""

    def forward(self, input: Tensor) -> Tensor:
        """Return what `dropout` gives."""
        return dropout(input, self.p, self.training)
