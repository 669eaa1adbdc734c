"""The triplet loss.

Sources: hardest negatives from VSE++ and SetDiv eq. 9, VSE-infinity eq. 1; all negatives first from VSE-infinity's
appendix (training details). Distance-weighted ones: Wu et al., *Sampling Matters in Deep Embedding Learning* (ICCV
2017), section 4, as HREM's public code draws them.
"""

from collections.abc import Callable
from functools import partial
from typing import Annotated, ClassVar, Literal

import torch
from torch import Tensor

from ..aggregators.aggregated import Aggregated
from ..padding import softmax
from ..parts import at_least, between
from .blocks import Pairs, pairs_of
from .common import LOSSES, Loss

Negatives = Literal["hardest", "all", "semi-hard", "distance-weighted"]
Reduction = Literal["mean", "sum"]

NEAREST, SPHERE = 0.5, 512  # smallest distance of a negative, and the dimensions that their density is of (HREM's code)


@LOSSES.register("triplet", "the usual one; it wants batches of 100 or more")
class Triplet(Loss):
    """The triplet loss, image to text plus text to image, with all negatives at first if asked (VSE-infinity).

    Every (image, own caption) pair is an anchor in both directions; whatever is not positive is negative, unless its
    similarity is -inf.

    Args:
        margin: by how much a positive must be closer than a negative.
        negatives: `hardest`: the closest one of each anchor (SetDiv eq. 9). `all`: every one. `semi-hard`:
            every one, each term clipped at the margin: only negatives farther than the positive have a gradient.
            `distance-weighted`: one for each pair, drawn so that all distances are equally likely; for cosines.
        reduction: `mean` over the terms of each direction (`semi-hard`: those above zero), or their `sum`.
        warmup_epochs: during this many first epochs all negatives count (VSE-infinity).
        farthest: at this Euclidean distance and beyond no negative is drawn.

    Attributes:
        epoch: how much is trained already, in epochs and fractions of one, from 0; `begin` sets it.
    """

    used_with: ClassVar = {"farthest": ("negatives", ("distance-weighted",))}
    uses_pairs = True

    def __init__(
        self,
        *,
        margin: float = 0.2,
        negatives: Negatives = "hardest",
        reduction: Reduction = "mean",
        warmup_epochs: Annotated[int, at_least(0)] = 0,
        farthest: Annotated[float, between(NEAREST, 2)] = 1.7,
    ) -> None:
        super().__init__()
        self.margin, self.negatives, self.reduction = margin, negatives, reduction
        self.warmup_epochs, self.farthest = warmup_epochs, farthest
        self.epoch: float = 0
        if negatives == "distance-weighted":
            self.alone = "negatives that are drawn"

    def begin(self, now: float) -> bool:
        """Note that `now` epochs are trained; return whether the warm-up is over."""
        self.epoch = now
        return now >= self.warmup_epochs

    def at_rest(self, pairs: int | None) -> float | None:
        """Return the hinges of all pairs, each the margin, in both directions, which PVSE's and DivE's code watch, too.

        While all negatives count, a head that begins to learn is near that value.
        """
        if self.negatives != "hardest" or self.epoch < self.warmup_epochs or not self.margin:
            return None
        if self.reduction == "mean":
            return 2 * self.margin
        return None if pairs is None else 2 * self.margin * pairs

    def forward(self, similarity: Tensor, positives: Tensor, *_: Aggregated, pairs: Pairs | None = None) -> Tensor:
        """Return the loss of `similarity [I, C]` under `positives [I, C]`, any number a row or column; a scalar.

        `pairs` are the positives, where they are listed already.
        """
        negatives = self.negatives if self.epoch >= self.warmup_epochs else "all"
        ways: dict[str, Callable[..., Tensor]]
        ways = {"hardest": _hardest, "all": _every, "semi-hard": partial(_every, semi_hard=True)}
        ways["distance-weighted"] = partial(_drawn, farthest=self.farthest)
        one_way = ways[negatives]
        image_to_text = one_way(similarity, positives, pairs, self.margin, self.reduction)
        turned = None if pairs is None else Pairs(pairs.columns, pairs.rows)
        return image_to_text + one_way(similarity.T, positives.T, turned, self.margin, self.reduction)


def _hardest(similarity: Tensor, positives: Tensor, _: Pairs | None, margin: float, reduction: str) -> Tensor:
    """One direction: anchors are rows."""
    # A row without a negative gets -inf, which the hinge turns into zero.
    hardest = similarity.masked_fill(positives, -torch.inf).amax(1, keepdim=True)
    terms = (margin + hardest - similarity).relu().masked_fill(~positives, 0)
    return terms.sum() / (positives.sum().clamp(min=1) if reduction == "mean" else 1)


def _every(
    similarity: Tensor, positives: Tensor, pairs: Pairs | None, margin: float, reduction: str, semi_hard: bool = False
) -> Tensor:
    """One direction: each positive pair with each negative of its row."""
    row, column = pairs or pairs_of(positives)
    valid = (~positives & (similarity > -torch.inf))[row]
    terms = margin + similarity[row] - similarity[row, column][:, None]
    terms = terms.clamp(0, margin if semi_hard else None).masked_fill(~valid, 0)
    counted = terms > 0 if semi_hard else valid
    return terms.sum() / (counted.sum().clamp(min=1) if reduction == "mean" else 1)


def _drawn(
    similarity: Tensor, positives: Tensor, pairs: Pairs | None, margin: float, reduction: str, farthest: float
) -> Tensor:
    """One direction: each positive pair with a negative of its row, the likelier the rarer its distance is."""
    row, column = pairs or pairs_of(positives)
    distance = (2 - 2 * similarity.detach()).clamp(min=NEAREST**2).sqrt()
    valid = ~positives & (distance < farthest)
    rarity = (2 - SPHERE) * distance.log() + (3 - SPHERE) / 2 * torch.log1p(-distance.square() / 4)
    weights, valid = softmax(rarity, valid, 1)[row], valid.any(1)[row]
    drawn = (weights / torch.empty_like(weights).exponential_()).argmax(1)  # as torch.multinomial, which asks a GPU
    terms = (margin + similarity[row, drawn] - similarity[row, column]).relu().masked_fill(~valid, 0)
    return terms.sum() / (valid.sum().clamp(min=1) if reduction == "mean" else 1)
