"""Diversity of the slots: SetDiv's exponential form and PVSE's Gram form."""

from typing import Literal

import torch
from torch import Tensor, nn

from ..aggregators.aggregated import Aggregated
from ..checks import one_of
from .common import both, element_cosines, slots_of

Form = Literal["exponential", "gram", "gram-squared"]


def diversity(slots: Tensor) -> Tensor:
    """Return the mean of exp(-2 |x - x'|^2) over samples and pairs of their unit slots (SetDiv section 3.4).

    Args:
        slots: `[B, K, D]`.

    Returns:
        A scalar; zero where K is 1.
    """
    with torch.autocast(slots.device.type, enabled=False):
        cosines = element_cosines(slots)
        # Of unit vectors, |x - x'|^2 = 2 - 2 cos.
        return (4 * cosines - 4).exp().sum() / max(cosines.numel(), 1)


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


class Diversity(nn.Module):
    """The diversity loss of the image slots plus that of the caption slots.

    Args:
        form: `exponential` (SetDiv): `diversity`; `gram` (PVSE): `gram_diversity`; `gram-squared`: its squared norm.
    """

    def __init__(self, *, form: Form = "exponential") -> None:
        super().__init__()
        one_of("diversity", Form, form=form)
        self.form = form

    def forward(self, similarity: Tensor, positives: Tensor, images: Aggregated, captions: Aggregated) -> Tensor:
        """Return the loss of `images.slots` and `captions.slots`; ValueError where an aggregator has none."""
        return both(lambda side, aggregated: self._of(slots_of("diversity", side, aggregated)), images, captions)

    def _of(self, slots: Tensor) -> Tensor:
        if self.form == "exponential":
            return diversity(slots)
        return gram_diversity(slots, squared=self.form == "gram-squared")
