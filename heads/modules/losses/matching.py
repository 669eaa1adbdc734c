"""Does a pair match? Two losses that ask it of every pair: PCME's soft contrastive loss and PCME++'s cross-entropy.

Sources: Chun et al., *Probabilistic Embeddings for Cross-Modal Retrieval* (PCME), section 3.2; Chun, *Improved
Probabilistic Image-Text Representations* (PCME++), section 3.2. Sums and means are those of their public code.
"""

from typing import Annotated

import torch
from torch import Tensor, nn
from torch.nn import functional

from ..aggregators.aggregated import Aggregated
from ..parameters import Positive, at_least
from .common import Loss


def soft_contrastive(similarity: Tensor, positives: Tensor) -> Tensor:
    """Return twice the sum of -log p over positive and -log(1 - p) over negative pairs (PCME, both directions).

    Args:
        similarity: the log-odds of the match probability p of every pair, `[I, C]`; -inf: the pair takes no part. p
            itself vanishes in float32 for samples as far apart as PCME's are at first, and would have no gradient.
        positives: `[I, C]`, True where caption and image belong together.

    Returns:
        A scalar.
    """
    ignored = similarity == -torch.inf
    x = similarity.masked_fill(ignored, 0)
    match, no_match = functional.logsigmoid(x), functional.logsigmoid(-x)
    return -2 * torch.where(positives, match, no_match).masked_fill(ignored, 0).sum()


def matching_bce(
    similarity: Tensor,
    positives: Tensor,
    scale: float | Tensor = 5.0,
    shift: float | Tensor = 5.0,
    *,
    pseudo_positives: float = 0.0,
) -> Tensor:
    """Return the binary cross-entropy of matching, its mean over all pairs counted once a direction (PCME++).

    Args:
        similarity: minus the distance of every pair, `[I, C]`; -inf: the pair takes no part.
        positives: `[I, C]`, True where caption and image belong together.
        scale: a; a pair's logit is a * similarity + b.
        shift: b.
        pseudo_positives: the weight of the same loss where every pair that is at least as close as its row's (text to
            image: column's) closest positive counts as positive too.

    Returns:
        A scalar.
    """
    counted = similarity > -torch.inf
    # Filled before they are scaled: 0 * inf would reach the gradient of the scale.
    logits = scale * similarity.masked_fill(~counted, 0) + shift
    loss = 2 * _mean_bce(logits, positives, counted)
    if pseudo_positives:
        image_to_text = _mean_bce(logits, _with_pseudo(similarity, positives, 1), counted)
        text_to_image = _mean_bce(logits, _with_pseudo(similarity, positives, 0), counted)
        loss = loss + pseudo_positives * (image_to_text + text_to_image)
    return loss


class SoftContrastive(Loss):
    """`soft_contrastive` of a similarity that gives log-odds."""

    log_odds = True

    def forward(self, similarity: Tensor, positives: Tensor, *_: Aggregated) -> Tensor:
        """Return the loss of `similarity [I, C]` under `positives [I, C]`."""
        return soft_contrastive(similarity, positives)


class MatchingBce(Loss):
    """`matching_bce` with learned scale and shift.

    Args:
        scale: a at first.
        shift: b at first.
        pseudo_positives: see `matching_bce`.
    """

    def __init__(
        self,
        *,
        scale: Positive = 5.0,
        shift: float = 5.0,
        pseudo_positives: Annotated[float, at_least(0)] = 0.0,
    ) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.tensor(float(scale)))
        self.shift = nn.Parameter(torch.tensor(float(shift)))
        self.pseudo_positives = pseudo_positives

    def forward(self, similarity: Tensor, positives: Tensor, *_: Aggregated) -> Tensor:
        """Return the loss of `similarity [I, C]` under `positives [I, C]`."""
        return matching_bce(similarity, positives, self.scale, self.shift, pseudo_positives=self.pseudo_positives)


def _mean_bce(logits: Tensor, labels: Tensor, counted: Tensor) -> Tensor:
    terms = functional.binary_cross_entropy_with_logits(logits, labels.to(logits.dtype), reduction="none")
    return terms.masked_fill(~counted, 0).sum() / counted.sum().clamp(min=1)


def _with_pseudo(similarity: Tensor, positives: Tensor, axis: int) -> Tensor:
    """Return the positives and what is as close as the closest of them along `axis`."""
    closest = similarity.masked_fill(~positives, -torch.inf).amax(axis, keepdim=True)
    return positives | ((similarity >= closest) & positives.any(axis, keepdim=True))
