"""What every aggregator is, and what it returns."""

from typing import ClassVar, NamedTuple

from torch import Tensor

from ..embedding import Embedding, Gaussian, Sequence
from ..parts import Part, Registry


class Aggregated(NamedTuple):
    """The embeddings of B samples, and what losses and figures may want to know of how they were made.

    Attributes:
        embedding: for each sample a vector `[B, D]`, a set of K elements `[B, K, D]`, a Gaussian or a sequence; not
            normalised.
        slots: the set's elements before the global feature is added, `[B, K, D]`; None where there are none.
        attention: the weight of every local feature for every slot, `[T, B, H, K, N]`
            (iteration, sample, head, slot, row), zero on padding; None where there is none.
        gaussian: what the set's elements were drawn from; None where they were not.
        rows: the local rows that the embedding was made of, where the aggregator changed them; else None.
        global_: the sample's global feature `[B, D]`, which the model adds; None where nobody asked for it.
        token: word ids `[B, N]` of captions; None where there are none.
        local: the local rows that the aggregator read, which the model adds; None where it reads none.
    """

    embedding: Embedding
    slots: Tensor | None = None
    attention: Tensor | None = None
    gaussian: Gaussian | None = None
    rows: Sequence | None = None
    global_: Tensor | None = None
    token: Sequence | None = None
    local: Sequence | None = None


class Aggregator(Part):
    """Base of aggregators, which are called as `aggregator(local [B, N, C], length [B], global_ [B, D])`.

    Args:
        local_dim: width C of the local rows.
        dim: width D of the global feature and of the embedding.

    Attributes:
        uses_local: whether it reads the local rows.
        uses_global: whether it reads the global feature.
        uses_place: whether it also takes `place` and `grid`, see `positions.grid_positions`.
        uses_twin: whether it also takes `twin`, what a second adapter with weights of its own makes of the features.
        embedding: what it gives: `"vector"`, `"set"`, `"gaussian"` or `"sequence"`.
        draws: whether the elements of a set are samples of `Aggregated.gaussian`.
    """

    uses_local: bool = True
    uses_global: bool = False
    uses_place: bool = False
    uses_twin: bool = False
    embedding: ClassVar[str] = "vector"
    draws: ClassVar[bool] = False

    def __init__(self, local_dim: int, dim: int) -> None:
        super().__init__()

    def coefficients(self, length: Tensor, number: int) -> Tensor | None:
        """Return the weights of `number` sorted rows for samples of these lengths, where they follow from these alone.

        `[B, number]`, or `[B, number, D]` where each dimension has its own.
        """
        return None


AGGREGATORS: Registry[Aggregator] = Registry("aggregator", Aggregator, "xret.nn")
