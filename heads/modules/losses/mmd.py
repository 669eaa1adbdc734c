"""Maximum mean discrepancy between modalities, from PVSE, as SetDiv section 3.4 uses it."""

from typing import Literal

import torch
from torch import Tensor

from ..aggregators.aggregated import Aggregated
from ..similarity.shared import unit
from .common import Loss

Kernel = Literal["exponential", "gaussian"]


def mmd(images: Tensor, captions: Tensor, kernel: Kernel = "exponential") -> Tensor:
    """Return the squared maximum mean discrepancy between all image and all caption elements, normalised.

    mean k(x, x') - 2 mean k(x, y) + mean k(y, y'), pairs of an element with itself included.

    Args:
        images: `[I, K1, D]`, or `[I, D]` as sets of one.
        captions: `[C, K2, D]` or `[C, D]`.
        kernel: `exponential` is exp(-|x - y| / 2), as public code has it, `gaussian` exp(-|x - y|^2 / 2).

    Returns:
        A scalar. Elements that coincide have distance 0 and gradient 0.
    """
    with torch.autocast(images.device.type, enabled=False):
        x, y = unit(images).flatten(0, -2), unit(captions).flatten(0, -2)
        return _mean_kernel(x, x, kernel) - 2 * _mean_kernel(x, y, kernel) + _mean_kernel(y, y, kernel)


class Mmd(Loss):
    """`mmd` between the embeddings of both sides.

    Args:
        kernel: see `mmd`.
    """

    def __init__(self, *, kernel: Kernel = "exponential") -> None:
        super().__init__()
        self.kernel = kernel

    def forward(self, similarity: Tensor, positives: Tensor, images: Aggregated, captions: Aggregated) -> Tensor:
        """Return the discrepancy of both embeddings; ValueError unless they are vectors or sets."""
        return mmd(self.vectors_or_sets("image", images), self.vectors_or_sets("text", captions), self.kernel)


def _mean_kernel(x: Tensor, y: Tensor, kernel: str) -> Tensor:
    squared = 2 - 2 * x @ y.T
    if kernel == "gaussian":
        return (-0.5 * squared).exp().mean()
    # Elements as near as the rounding error of the product count as coinciding: the root's slope is infinite at 0,
    # and what was filled in gets no gradient whatever that slope.
    distance = squared.masked_fill(squared < 16 * torch.finfo(squared.dtype).eps, 0).sqrt()
    return (-0.5 * distance).exp().mean()
