"""What keeps the elements of a set apart: global discriminative and intra-set divergence loss.

Source: *Maximal Matching Matters* (MaxMatch, ACL 2025), eq. 7 and 8 and its listings 4 and 5, which also take the
mean over the elements of a set (eq. 7) and over samples (eq. 8).
"""

from typing import Literal

import torch
from torch import Tensor

from ..aggregators.aggregated import Aggregated
from ..similarity.shared import unit
from .common import SideLoss, element_cosines, set_of

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
        return _mean_exp((unit(elements) * unit(global_)[:, None]).sum(2), scale, margin)


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
        return _mean_exp(element_cosines(elements), scale, margin)


class SetRegulariser(SideLoss):
    """A loss of the elements of both sides' sets.

    Args:
        scale: of the cosines' exponential.
        margin: subtracted from the cosines.
        elements: take the final `set`, or the `slots` before the global feature is added to them.
    """

    def __init__(self, *, scale: float = 0.5, margin: float = 0.6, elements: Elements = "set") -> None:
        super().__init__()
        self.scale = scale
        self.margin = margin
        self.elements = elements

    def elements_of(self, side: str, aggregated: Aggregated) -> Tensor:
        """Return a side's elements `[B, K, D]`; ValueError where it has none."""
        if self.elements == "set":
            return self.needed(set_of(aggregated), "embedding sets", side, "element-slots")
        return self.needed(aggregated.slots, "slots", side, "element-slots")


class GlobalDiscriminative(SetRegulariser):
    """`global_discriminative`, the mean of both sides (eq. 7); parameters as for `SetRegulariser`."""

    def of(self, side: str, aggregated: Aggregated) -> Tensor:
        """Return half of a side's loss; ValueError where there is no set, or no global feature."""
        elements = self.elements_of(side, aggregated)
        global_ = self.needed(aggregated.global_, "the global feature", side, "element-slots")
        return global_discriminative(elements, global_, scale=self.scale, margin=self.margin) / 2


class IntraSetDivergence(SetRegulariser):
    """`intra_set_divergence`, the sum of both sides (eq. 8); parameters as for `SetRegulariser`."""

    def of(self, side: str, aggregated: Aggregated) -> Tensor:
        """Return a side's loss; ValueError where there is no set."""
        return intra_set_divergence(self.elements_of(side, aggregated), scale=self.scale, margin=self.margin)


def _mean_exp(cosines: Tensor, scale: float, margin: float) -> Tensor:
    return (scale * (cosines - margin)).exp().sum() / max(cosines.numel(), 1)
