"""Match probability: how likely two elements match, averaged over all pairs of elements of two sets.

Sources: PCME (Chun et al., *Probabilistic Embeddings for Cross-Modal Retrieval*, CVPR 2021), where the elements are
samples of a Gaussian and are compared by distance; SetDiv section 3.3 (s_MP), where they are compared by cosine. SetDiv
prints a sum over the pairs; its published code takes the mean, as is done here. There the scale begins
at 1, which keeps the probability of cosines between 0.27 and 0.73, and hardly changes; here it begins at 5.
"""

import math
from typing import Literal

import torch
from torch import Tensor, nn
from torch.nn import functional

from .shared import SIMILARITIES, Similarity, check, element_cosines, precise, squared_distances

Link = Literal["symmetric", "logistic"]


def match_probability(images: Tensor, captions: Tensor, scale: Tensor | float, shift: Tensor | float) -> Tensor:
    """Return the mean of sigmoid(scale * cosine + shift) over all pairs of elements (SetDiv, s_MP).

    Args:
        images: `[I, K1, D]`.
        captions: `[C, K2, D]`.
        scale: above 0; a scalar.
        shift: a scalar.

    Returns:
        `[I, C]`, between 0 and 1.
    """
    return element_cosines(images, captions, scale).add_(shift).sigmoid_().mean((1, 2))


def monte_carlo_log_odds(
    images: Tensor, captions: Tensor, scale: Tensor | float, shift: Tensor | float, link: Link = "symmetric"
) -> Tensor:
    """Return the log-odds log(p / (1 - p)) of the match probability p of every pair, estimated from samples (PCME).

    Finite and exact where p itself is rounded to 0 or 1, so that -log p = softplus(-x) and -log(1 - p) = softplus(x)
    train, and pairs that are far apart are still ranked.

    Args:
        images: samples `[I, K1, D]`, taken as they are, not normalised.
        captions: `[C, K2, D]`.
        scale: above 0; a scalar.
        shift: a scalar.
        link: from a logit l = shift - scale * distance to a probability, whose mean over all pairs of samples is p:
            `symmetric` is the published code's exp(l) / (exp(l) + exp(-l)), `logistic` the paper's 1 / (1 + exp(-l)).

    Returns:
        `[I, C]`.
    """
    check("set", images, captions)
    squares = squared_distances(images.flatten(0, 1), captions.transpose(0, 1).flatten(0, 1))
    # 1e-6 under the root, as the published code has it: the gradient of two equal samples is finite.
    distances = (squares + 1e-6).sqrt().to(precise(images))
    logits = (shift - scale * distances).view(*images.shape[:2], captions.shape[1], len(captions))
    if link == "symmetric":
        logits = 2 * logits
    return functional.logsigmoid(logits).logsumexp((1, 2)) - functional.logsigmoid(-logits).logsumexp((1, 2))


class _Learned(Similarity):
    """A learned scale, kept positive by learning its logarithm, and a learned shift."""

    embedding = "set"

    def __init__(self, scale: float, shift: float) -> None:
        super().__init__()
        self.log_scale = nn.Parameter(torch.tensor(math.log(scale)))
        self.shift = nn.Parameter(torch.tensor(float(shift)))

    @property
    def scale(self) -> Tensor:
        """The scale, a scalar above 0."""
        return self.log_scale.exp()


@SIMILARITIES.register("match-probability", "sets of which every pair counts by its distance")
class MatchProbability(_Learned):
    """`match_probability` of embedding sets."""

    score = "the probability that an element of one matches an element of the other, on average, from 0 to 1"
    of_cosines = True

    def __init__(self) -> None:
        super().__init__(scale=5.0, shift=0.0)

    def forward(self, images: Tensor, captions: Tensor) -> Tensor:
        """Compare `images [I, K1, D]` with `captions [C, K2, D]`: `[I, C]`."""
        return match_probability(images, captions, self.scale, self.shift)


@SIMILARITIES.register("monte-carlo-match", "samples of Gaussians")
class MonteCarloMatch(_Learned):
    """`monte_carlo_log_odds` of sets of samples: the probability itself would round to 0 or 1.

    Args:
        link: see `monte_carlo_log_odds`.
    """

    log_odds = True
    score = "the log-odds that both match: above 0 rather yes than no"

    def __init__(self, link: Link = "symmetric") -> None:
        super().__init__(scale=15.0, shift=15.0)
        self.link = link

    def forward(self, images: Tensor, captions: Tensor) -> Tensor:
        """Compare `images [I, K1, D]` with `captions [C, K2, D]`: `[I, C]`."""
        return monte_carlo_log_odds(images, captions, self.scale, self.shift, self.link)
