"""What every aggregator returns."""

from typing import NamedTuple

from torch import Tensor


class Aggregated(NamedTuple):
    """The embeddings of B samples, and what losses and figures may want to see of how they came about.

    Attributes:
        embedding: a vector `[B, D]` or a set of K elements `[B, K, D]` a sample, not normalised.
        slots: the set's elements before the global feature is added, `[B, K, D]`; None where there are none.
        attention: the weight of every local feature for every slot, `[T, B, H, K, N]`
            (iteration, sample, head, slot, row), zero on padding; None where there is none.
    """

    embedding: Tensor
    slots: Tensor | None = None
    attention: Tensor | None = None
