"""What keeps the elements of a set apart: global discriminative and intra-set divergence loss.

Source: *Maximal Matching Matters* (MaxMatch, ACL 2025), eq. 7 and 8 and its listings 4 and 5, which also take the
mean over the elements of a set (eq. 7) and over samples (eq. 8).
"""

import torch
from torch import Tensor

from ..aggregators.aggregated import Aggregated
from ..similarity.shared import unit
from .common import LOSSES, SideLoss, mean_exponential_within, set_of

SCALE = 0.5  # the paper's s, in the exponential of the cosines


class SetRegulariser(SideLoss):
    """A loss of the elements of both sides' sets.

    Args:
        margin: the paper's delta, what is subtracted from the cosines first.
    """

    def __init__(self, *, margin: float = 0.6) -> None:
        super().__init__()
        self.margin = margin

    def elements_of(self, side: str, aggregated: Aggregated) -> Tensor:
        """Return a side's elements `[B, K, D]`; ValueError where it has none."""
        return self.needed(set_of(aggregated), "embedding sets", side, "element-slots")


@LOSSES.register("global-discriminative", "for sets: elements keep away from the global feature")
class GlobalDiscriminative(SetRegulariser):
    """The mean of exp(s (cos(element, global feature) - margin)) over samples and elements (eq. 7).

    The mean of both sides. Parameters as for `SetRegulariser`; the margin is the paper's delta 2.
    """

    def of(self, side: str, aggregated: Aggregated) -> Tensor:
        """Return half of a side's loss; ValueError where there is no set, or no global feature."""
        elements = self.elements_of(side, aggregated)
        global_ = self.needed(aggregated.global_, "the global feature", side, "element-slots")
        with torch.autocast(elements.device.type, enabled=False):
            cosines = (unit(elements) * unit(global_)[:, None]).sum(2)
            return (SCALE * (cosines - self.margin)).exp().mean() / 2


@LOSSES.register("intra-set-divergence", "for sets: elements keep away from each other")
class IntraSetDivergence(SetRegulariser):
    """The mean of exp(s (cos(x, x') - margin)) over samples and pairs of their elements (eq. 8).

    The sum of both sides; zero for sets of one. Parameters as for `SetRegulariser`; the margin is the paper's delta 3.
    """

    def of(self, side: str, aggregated: Aggregated) -> Tensor:
        """Return a side's loss; ValueError where there is no set."""
        elements = self.elements_of(side, aggregated)
        with torch.autocast(elements.device.type, enabled=False):
            return mean_exponential_within(elements, SCALE, self.margin)
