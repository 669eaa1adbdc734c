"""Dropout that takes a CPU a tenth of the time of torch's, which draws a number of 64 bits for every value, one by one.

Here one such number decides about four values, and so the rate is rounded to a multiple of 1/65536.
"""

import torch
from torch import Tensor, nn
from torch.nn import functional

from ...pipeline.device import DrawnLots, draw_lots, stacked

LOTS = 1 << 16  # of a value; those below the rate's share of them drop it


def dropout(x: Tensor, rate: float | Tensor, training: bool) -> Tensor:
    """Return `x` with each value zero by the chance `rate` and the rest scaled up; `x` itself unless `training`.

    The rate is a tensor where several heads are computed at once, each with its own, none of them 0.
    """
    together = stacked()
    if not training or (isinstance(rate, float) and not rate) or not (together or x.is_cpu):
        return functional.dropout(x, float(rate), training)
    number = -(-x.numel() // 4)
    lots = (DrawnLots.apply(x, number) if together else draw_lots(number, x.device)[0]).view(torch.int16)
    dropped = (rate * LOTS).round() if isinstance(rate, Tensor) else round(rate * LOTS)
    kept = lots[: x.numel()].view(x.shape) >= dropped - LOTS // 2
    return x * kept.to(x.dtype).mul_(LOTS / (LOTS - dropped))


class Dropout(nn.Dropout):
    """`dropout` as a layer."""

    def forward(self, input: Tensor) -> Tensor:
        """Return what `dropout` gives."""
        return dropout(input, self.p, self.training)
