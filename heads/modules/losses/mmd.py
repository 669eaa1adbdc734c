"""Maximum mean discrepancy between modalities, from PVSE, as SetDiv section 3.4 uses it."""

import torch
from torch import Tensor

from ..aggregators.aggregated import Aggregated
from ..similarity.shared import unit
from .common import LOSSES, Loss


@LOSSES.register("mmd", "beside triplet: both modalities have one distribution")
class MMD(Loss):
    """The squared maximum mean discrepancy between all image and all caption elements, normalised.

    mean k(x, x') - 2 mean k(x, y) + mean k(y, y'), pairs of an element with itself included; a vector is a set of one.
    The kernel k is exp(-|x - y| / 2), as in public code.
    """

    def forward(self, similarity: Tensor, positives: Tensor, images: Aggregated, captions: Aggregated) -> Tensor:
        """Return the discrepancy of both sides' vectors or sets, a scalar; ValueError where they are neither.

        Elements that coincide have distance 0 and gradient 0.
        """
        sides = self.vectors_or_sets("image", images), self.vectors_or_sets("text", captions)
        with torch.autocast(sides[0].device.type, enabled=False):
            x, y = (unit(side).flatten(0, -2) for side in sides)
            own = _mean_kernel(x, x) + _mean_kernel(y, y)
            return own - 2 * _mean_kernel(x, y)


def _mean_kernel(x: Tensor, y: Tensor) -> Tensor:
    squared = 2 - 2 * x @ y.T
    # Elements as near as the rounding error of the product count as coinciding: the root's slope is infinite at 0,
    # and what was filled in gets no gradient whatever that slope.
    distance = squared.masked_fill(squared < 16 * torch.finfo(squared.dtype).eps, 0).sqrt()
    return (-0.5 * distance).exp().mean()
