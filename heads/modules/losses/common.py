"""What every loss is."""

from collections.abc import Hashable
from typing import ClassVar, TypeVar

from torch import Tensor

from ..aggregators.aggregated import Aggregated
from ..parts import Part, Registry

T = TypeVar("T")


class Loss(Part):
    """Base of losses, which are called as `loss(similarity [I, C], positives [I, C], images, captions)`.

    Attributes:
        asks_lengths: whether it needs lengths on the host, so that no CUDA graph can hold it.
        log_odds: whether it takes log-odds for similarities.
        uses_pairs: whether it also takes `pairs`, the positives as a list where that is known; else None.
        uses_teacher: whether it also takes `taught`, the similarities of a teacher `[I, C]`, where there is one.
        uses_local: whether it reads `Aggregated.local`.
        alone: what keeps heads with it from being trained several at once, a noun; empty: nothing does.
    """

    asks_lengths: ClassVar[bool] = False
    log_odds: ClassVar[bool] = False
    uses_pairs: ClassVar[bool] = False
    uses_teacher: ClassVar[bool] = False
    uses_local: ClassVar[bool] = False
    alone: str = ""

    def begin(self, now: float) -> Hashable:
        """Note before a batch that `now` epochs are trained; return what its operations follow from beside shapes."""
        return None

    def at_rest(self, pairs: int | None) -> float | None:
        """Return what the loss is where all similarities are equal; None if a head that learns may stay there, too.

        A training that sits there is warned of. `pairs` is the number of positives, None where it is not known.
        """
        return None

    def needed(self, value: T | None, what: str, side: str, choose: str) -> T:
        """Return `value`; ValueError where it is None, because the `side` aggregator does not give it."""
        if value is None:
            raise ValueError(
                f"{type(self).__name__} needs {what}, which the {side} side does not give: "
                f"choose {choose}, or leave the loss out"
            )
        return value

    def vectors_or_sets(self, side: str, aggregated: Aggregated) -> Tensor:
        """Return an embedding `[B, D]` or `[B, K, D]`; ValueError where it is a Gaussian or a sequence."""
        embedding = aggregated.embedding if isinstance(aggregated.embedding, Tensor) else None
        return self.needed(embedding, "vectors or sets", side, "another aggregator")


LOSSES: Registry[Loss] = Registry("loss", Loss, "xret.losses")
