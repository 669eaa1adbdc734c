"""Maximum mean discrepancy between modalities, from PVSE, as SetDiv section 3.4 uses it."""

from typing import Literal

import torch
from torch import Tensor

from ..aggregators.aggregated import Aggregated
from ..similarity.shared import unit
from .common import Loss

Kernel = Literal["exponential", "gaussian"]


class Mmd(Loss):
    """The squared maximum mean discrepancy between all image and all caption elements, normalised.

    mean k(x, x') - 2 mean k(x, y) + mean k(y, y'), pairs of an element with itself included; a vector is a set of one.

    Args:
        kernel: `exponential` is exp(-|x - y| / 2), as public code has it, `gaussian` exp(-|x - y|^2 / 2).
    """

    def __init__(self, *, kernel: Kernel = "exponential") -> None:
        super().__init__()
        self.kernel = kernel

    def forward(self, similarity: Tensor, positives: Tensor, images: Aggregated, captions: Aggregated) -> Tensor:
        """Return the discrepancy of both sides' vectors or sets, a scalar; ValueError where they are neither.

        Elements that coincide have distance 0 and gradient 0.
        """
        sides = self.vectors_or_sets("image", images), self.vectors_or_sets("text", captions)
        with torch.autocast(sides[0].device.type, enabled=False):
            x, y = (unit(side).flatten(0, -2) for side in sides)
            own = _mean_kernel(x, x, self.kernel) + _mean_kernel(y, y, self.kernel)
            return own - 2 * _mean_kernel(x, y, self.kernel)


def _mean_kernel(x: Tensor, y: Tensor, kernel: str) -> Tensor:
    squared = 2 - 2 * x @ y.T
    if kernel == "gaussian":
        return (-0.5 * squared).exp().mean()
    # Elements as near as the rounding error of the product count as coinciding: the root's slope is infinite at 0,
    # and what was filled in gets no gradient whatever that slope.
    distance = squared.masked_fill(squared < 16 * torch.finfo(squared.dtype).eps, 0).sqrt()
    return (-0.5 * distance).exp().mean()
