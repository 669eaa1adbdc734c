"""What several losses need."""

import math
from abc import ABC, abstractmethod
from collections.abc import Hashable
from typing import ClassVar, TypeVar

import torch
from torch import Tensor

from ..aggregators.aggregated import Aggregated
from ..parameters import Part
from ..registry import Registry
from ..similarity.shared import unit

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


class SideLoss(Loss, ABC):
    """Base of losses that look at each side by itself: the sum of the image side's term and the text side's."""

    def forward(self, similarity: Tensor, positives: Tensor, images: Aggregated, captions: Aggregated) -> Tensor:
        """Return the loss of both sides, a scalar; ValueError where a side does not give what it needs."""
        return self.of("image", images) + self.of("text", captions)

    @abstractmethod
    def of(self, side: str, aggregated: Aggregated) -> Tensor:
        """Return the term of one side, ``image`` or ``text``."""


def set_of(aggregated: Aggregated) -> Tensor | None:
    """Return an embedding set `[B, K, D]`; None where it is anything else."""
    embedding = aggregated.embedding
    return embedding if isinstance(embedding, Tensor) and embedding.ndim == 3 else None


def cosines_within(elements: Tensor) -> Tensor:
    """Return the cosines of all elements within each set `[B, K, D]`, `[B, K, K]`."""
    rows = unit(elements)
    return torch.bmm(rows, rows.transpose(1, 2))


def mean_exponential_within(elements: Tensor, scale: float, margin: float) -> Tensor:
    """Return the mean of exp(scale (cosine - margin)) over all pairs k < k' within sets; zero for sets of one."""
    pairs = len(elements) * math.comb(elements.shape[1], 2)
    powers = (scale * cosines_within(elements)).exp().triu(1)
    return powers.sum() * (math.exp(-scale * margin) / max(pairs, 1))
