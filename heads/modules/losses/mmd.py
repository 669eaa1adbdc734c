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
            flat = [side.flatten(0, -2) for side in sides]
            x = unit(torch.cat(flat))
            squared = torch.addmm(x.new_full((), 2), x, x.T, alpha=-2)
            # Elements as near as the rounding error of the product count as coinciding: the root's slope is infinite at
            # 0, and what was filled in gets no gradient whatever that slope.
            distance = squared.masked_fill(squared < 16 * torch.finfo(squared.dtype).eps, 0).sqrt()
            share = torch.cat([x.new_full((len(t),), sign / len(t)) for t, sign in zip(flat, (1, -1), strict=True)])
            return share @ (-0.5 * distance).exp() @ share
