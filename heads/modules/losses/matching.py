"""Does a pair match? Two losses that ask it of every pair: PCME's soft contrastive loss and PCME++'s cross-entropy.

Sources: Chun et al., *Probabilistic Embeddings for Cross-Modal Retrieval* (PCME), section 3.2; Chun, *Improved
Probabilistic Image-Text Representations* (PCME++), section 3.2. Sums and means are those of their public code.
"""

from typing import Annotated

import torch
from torch import Tensor, nn
from torch.nn import functional

from ..aggregators.aggregated import Aggregated
from ..parameters import at_least
from .common import LOSSES, Loss

SCALE, SHIFT = 5.0, 5.0  # a and b of `MatchingBCE` at first, as in public code


@LOSSES.register("soft-contrastive", "samples of Gaussians, as PCME has them")
class SoftContrastive(Loss):
    """Twice the sum of -log p over positive and -log(1 - p) over negative pairs (PCME, both directions).

    It takes the log-odds of the match probability p: p itself vanishes in float32 for samples as far apart as PCME's
    are at first, and would have no gradient.
    """

    log_odds = True

    def forward(self, similarity: Tensor, positives: Tensor, *_: Aggregated) -> Tensor:
        """Return the loss of log-odds `similarity [I, C]` under `positives [I, C]`, a scalar."""
        ignored = similarity == -torch.inf
        x = similarity.masked_fill(ignored, 0)
        match, no_match = functional.logsigmoid(x), functional.logsigmoid(-x)
        return -2 * torch.where(positives, match, no_match).masked_fill(ignored, 0).sum()


@LOSSES.register("matching-bce", "Gaussians, as PCME++ has them")
class MatchingBCE(Loss):
    """The binary cross-entropy of matching, the mean over all pairs, once for each direction (PCME++).

    A pair's logit is a * similarity + b, where the similarity is minus a distance; a and b are learned.

    Args:
        pseudo_positives: the weight of the same loss where every pair that is at least as close as its row's (text to
            image: column's) closest positive counts as positive too.
    """

    def __init__(self, *, pseudo_positives: Annotated[float, at_least(0)] = 0.0) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.tensor(SCALE))
        self.shift = nn.Parameter(torch.tensor(SHIFT))
        self.pseudo_positives = pseudo_positives

    def forward(self, similarity: Tensor, positives: Tensor, *_: Aggregated) -> Tensor:
        """Return the loss of `similarity [I, C]` under `positives [I, C]`, a scalar."""
        counted = similarity > -torch.inf
        # Filled before they are scaled: 0 * inf would reach the gradient of the scale.
        logits = self.scale * similarity.masked_fill(~counted, 0) + self.shift
        loss = 2 * _mean_bce(logits, positives, counted)
        if self.pseudo_positives:
            image_to_text = _mean_bce(logits, _with_pseudo(similarity, positives, 1), counted)
            text_to_image = _mean_bce(logits, _with_pseudo(similarity, positives, 0), counted)
            loss = loss + self.pseudo_positives * (image_to_text + text_to_image)
        return loss


def _mean_bce(logits: Tensor, labels: Tensor, counted: Tensor) -> Tensor:
    terms = functional.binary_cross_entropy_with_logits(logits, labels.to(logits.dtype), reduction="none")
    return terms.masked_fill(~counted, 0).sum() / counted.sum().clamp(min=1)


def _with_pseudo(similarity: Tensor, positives: Tensor, axis: int) -> Tensor:
    """Return the positives and what is as close as the closest of them along `axis`."""
    closest = similarity.masked_fill(~positives, -torch.inf).amax(axis, keepdim=True)
    return positives | ((similarity >= closest) & positives.any(axis, keepdim=True))
