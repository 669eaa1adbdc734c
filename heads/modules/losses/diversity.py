"""Diversity of the slots: SetDiv's exponential form and PVSE's Gram form."""

from typing import Literal

import torch
from torch import Tensor

from ..aggregators.aggregated import Aggregated
from .common import SideLoss, element_cosines
from .set_regularisers import intra_set_divergence

Form = Literal["exponential", "gram", "gram-squared"]


def diversity(slots: Tensor) -> Tensor:
    """Return the mean of exp(-2 |x - x'|^2) over samples and pairs of their unit slots (SetDiv section 3.4).

    Args:
        slots: `[B, K, D]`.

    Returns:
        A scalar; zero where K is 1.
    """
    return intra_set_divergence(slots, scale=4, margin=1)  # of unit vectors, |x - x'|^2 = 2 - 2 cos


def gram_diversity(slots: Tensor, *, squared: bool = False) -> Tensor:
    """Return the mean over samples of |G - 1| / K^2, G the Gram matrix of the unit slots (PVSE).

    Args:
        slots: `[B, K, D]`.
        squared: take the square of the Frobenius norm; the public code takes the norm.

    Returns:
        A scalar; zero where K is 1.
    """
    with torch.autocast(slots.device.type, enabled=False):
        # Each pair stands twice in the Gram matrix.
        norm = 2**0.5 * torch.linalg.vector_norm(element_cosines(slots), dim=1)
        return (norm.square() if squared else norm).mean() / slots.shape[1] ** 2


class Diversity(SideLoss):
    """The diversity loss of the image slots plus that of the caption slots.

    Args:
        form: `exponential` (SetDiv): `diversity`; `gram` (PVSE): `gram_diversity`; `gram-squared`: its squared norm.
    """

    def __init__(self, *, form: Form = "exponential") -> None:
        super().__init__()
        self.form = form

    def of(self, side: str, aggregated: Aggregated) -> Tensor:
        """Return the loss of a side's slots; ValueError where there are none."""
        slots = self.needed(aggregated.slots, "slots", side, "element-slots")
        if self.form == "exponential":
            return diversity(slots)
        return gram_diversity(slots, squared=self.form == "gram-squared")
