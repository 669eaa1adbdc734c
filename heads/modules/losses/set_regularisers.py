"""What keeps the elements of a set apart: global discriminative and intra-set divergence loss.

Source: *Maximal Matching Matters* (MaxMatch, ACL 2025), eq. 7 and 8 and its listings 4 and 5, which also take the
mean over the elements of a set (eq. 7) and over samples (eq. 8).
"""

from typing import Literal

import torch
from torch import Tensor, nn

from ..aggregators.aggregated import Aggregated
from ..checks import one_of
from ..similarity.shared import unit
from .common import both, element_cosines, set_embedding, slots_of

Elements = Literal["set", "slots"]


def global_discriminative(elements: Tensor, global_: Tensor, *, scale: float = 0.5, margin: float = 0.6) -> Tensor:
    """Return the mean of exp(scale (cos(element, global feature) - margin)) over samples and elements (eq. 7).

    Args:
        elements: `[B, K, D]`.
        global_: the global feature of each sample, `[B, D]`.
        scale: the paper's s.
        margin: the paper's delta 2.

    Returns:
        A scalar.
    """
    with torch.autocast(elements.device.type, enabled=False):
        cosines = (unit(elements) * unit(global_)[:, None]).sum(2)
        return (scale * (cosines - margin)).exp().mean()


def intra_set_divergence(elements: Tensor, *, scale: float = 0.5, margin: float = 0.6) -> Tensor:
    """Return the mean of exp(scale (cos(x, x') - margin)) over samples and pairs of their elements (eq. 8).

    Args:
        elements: `[B, K, D]`.
        scale: the paper's s.
        margin: the paper's delta 3.

    Returns:
        A scalar; zero where K is 1.
    """
    with torch.autocast(elements.device.type, enabled=False):
        cosines = element_cosines(elements)
        return (scale * (cosines - margin)).exp().sum() / max(cosines.numel(), 1)


class GlobalDiscriminative(nn.Module):
    """`global_discriminative`, the mean of both sides (eq. 7).

    Args:
        scale: see `global_discriminative`.
        margin: see `global_discriminative`.
        elements: take the final `set`, or the `slots` before the global feature is added to them.
    """

    def __init__(self, *, scale: float = 0.5, margin: float = 0.6, elements: Elements = "set") -> None:
        super().__init__()
        one_of("global-discriminative", Elements, elements=elements)
        self.scale = scale
        self.margin = margin
        self.elements = elements

    def forward(self, similarity: Tensor, positives: Tensor, images: Aggregated, captions: Aggregated) -> Tensor:
        """Return the loss of both sides; ValueError where there is no set, or no global feature."""
        return both(self._of, images, captions) / 2

    def _of(self, side: str, aggregated: Aggregated) -> Tensor:
        elements = _elements("global-discriminative", self.elements, side, aggregated)
        if aggregated.global_ is None:
            raise ValueError(
                f"the global-discriminative loss needs the {side} side's global feature, but the model gives none: "
                "choose element-slots or leave the loss out"
            )
        return global_discriminative(elements, aggregated.global_, scale=self.scale, margin=self.margin)


class IntraSetDivergence(nn.Module):
    """`intra_set_divergence`, the sum of both sides (eq. 8).

    Args:
        scale: see `intra_set_divergence`.
        margin: see `intra_set_divergence`.
        elements: take the final `set`, or the `slots` before the global feature is added to them.
    """

    def __init__(self, *, scale: float = 0.5, margin: float = 0.6, elements: Elements = "set") -> None:
        super().__init__()
        one_of("intra-set-divergence", Elements, elements=elements)
        self.scale = scale
        self.margin = margin
        self.elements = elements

    def forward(self, similarity: Tensor, positives: Tensor, images: Aggregated, captions: Aggregated) -> Tensor:
        """Return the loss of both sides; ValueError where there is no set."""
        return both(self._of, images, captions)

    def _of(self, side: str, aggregated: Aggregated) -> Tensor:
        elements = _elements("intra-set-divergence", self.elements, side, aggregated)
        return intra_set_divergence(elements, scale=self.scale, margin=self.margin)


def _elements(loss: str, which: str, side: str, aggregated: Aggregated) -> Tensor:
    return (set_embedding if which == "set" else slots_of)(loss, side, aggregated)
