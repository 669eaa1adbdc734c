"""Featurewise sort pooling.

Source: Zhang, Hare, Pruegel-Bennett: *FSPool: Learning Set Representations with Featurewise Sort Pooling*
(ICLR 2020), section 3; a baseline of VSE-infinity (section 5.2).
"""

import torch
from torch import Tensor, nn

from .aggregated import AGGREGATORS
from .pooling import Pooling, sorted_rows

PIECES = 20  # of each function, as published


def interpolation(length: Tensor, number: int, pieces: int, dtype: torch.dtype) -> Tensor:
    """Return the share of each knot of a piecewise linear function on [0, 1] at each place.

    Of L rows, the first stands at 0 and the last at 1; a single row at 0. Times the values at the knots
    `[pieces + 1, W]` it gives the function `[B, number, W]` at the rows.

    Args:
        length: L of each sample, `[B]`.
        number: rows N to evaluate at; those after L count as the last.
        pieces: number of linear pieces.
        dtype: of the result.

    Returns:
        `[B, N, pieces + 1]`.
    """
    exact = torch.promote_types(dtype, torch.float32)
    rank = torch.arange(number, device=length.device, dtype=exact)
    knot = torch.arange(pieces + 1, device=length.device, dtype=exact)
    place = (rank / (length[:, None] - 1).clamp(min=1)).clamp(max=1)
    return (1 - (place[..., None] * pieces - knot).abs()).clamp(min=0).to(dtype)


@AGGREGATORS.register("fspool", "sorted values with learned weights; samples with many rows")
class FSPool(Pooling):
    """A weighted sum of each feature's sorted values; the weights are a learned function of the relative rank.

    Every feature has its own piecewise linear function, so that sets of any size can be pooled. The weights need
    not add up to one.
    """

    def __init__(self, local_dim: int, dim: int) -> None:
        super().__init__(local_dim, dim)
        self.weight = nn.Parameter(torch.randn(PIECES + 1, dim))

    def pool(self, local: Tensor, length: Tensor) -> Tensor:
        """Return the weighted sum of the sorted rows."""
        rows = sorted_rows(local, length)
        shares = interpolation(length.to(local.device), local.shape[1], len(self.weight) - 1, rows.dtype)
        # Summed over the rows first: as many terms as there are knots remain, however long the sample.
        return ((shares.transpose(1, 2) @ rows) * self.weight).sum(1)
