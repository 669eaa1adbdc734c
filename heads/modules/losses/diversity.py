"""Diversity of the slots: SetDiv's exponential form and PVSE's Gram form."""

from typing import Literal

import torch
from torch import Tensor

from ..aggregators.aggregated import Aggregated
from .common import LOSSES, SideLoss, cosines_within, mean_exponential_within

Form = Literal["exponential", "gram"]


@LOSSES.register("diversity", "beside triplet, for sets: elements differ")
class Diversity(SideLoss):
    """The diversity loss of the image slots plus that of the caption slots; zero for sets of one.

    Args:
        form: `exponential` (SetDiv section 3.4): the mean of exp(-2 |x - x'|^2) over samples and pairs of their unit
            slots, as in the public code, where the paper prints a sum; `gram` (PVSE): the mean over samples of
            |G - 1| / K^2, G the Gram matrix of the unit slots, with the Frobenius norm, as in the public code.
    """

    def __init__(self, *, form: Form = "exponential") -> None:
        super().__init__()
        self.form = form

    def of(self, side: str, aggregated: Aggregated) -> Tensor:
        """Return the loss of a side's slots `[B, K, D]`; ValueError where there are none."""
        slots = self.needed(aggregated.slots, "slots", side, "element-slots")
        with torch.autocast(slots.device.type, enabled=False):
            if self.form == "exponential":
                return mean_exponential_within(slots, 4, 1)  # of unit vectors, |x - x'|^2 = 2 - 2 cos
            # The Gram matrix holds each pair twice.
            gram = 2**0.5 * torch.linalg.vector_norm(cosines_within(slots).triu(1), dim=(1, 2))
            return gram.mean() / slots.shape[1] ** 2
