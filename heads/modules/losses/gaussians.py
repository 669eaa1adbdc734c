"""Regularisers of probabilistic embeddings: the information bottleneck and uniformity.

Sources: Chun et al., *Probabilistic Embeddings for Cross-Modal Retrieval* (PCME), section 3.2, and its public code;
Chun, *Improved Probabilistic Image-Text Representations* (PCME++), section 3.2.
"""

import math
from typing import Literal

import torch
from torch import Tensor

from ..aggregators.aggregated import Aggregated
from ..embedding import Gaussian
from ..similarity.shared import precise
from .common import Loss, SideLoss, set_of

Reduction = Literal["mean", "sum"]
Mean = Literal["gaussian", "samples"]
Spread = Literal["variance", "deviation"]


def information_bottleneck(mean: Tensor, log_variance: Tensor, reduction: Reduction = "mean") -> Tensor:
    """Return KL(N(mean, variance) || N(0, 1)), the mean or sum over samples and dimensions.

    Args:
        mean: `[B, D]`.
        log_variance: `[B, D]`.
        reduction: `mean` (PCME++) or `sum` (PCME).

    Returns:
        A scalar.
    """
    mean, log_variance = (x.to(precise(x)) for x in (mean, log_variance))
    terms = (mean.square() + log_variance.exp() - 1 - log_variance) / 2
    return terms.mean() if reduction == "mean" else terms.sum()


def uniformity(vectors: Tensor) -> Tensor:
    """Return log mean exp(-2 |z - z'|^2) over all pairs of `vectors [M, D]`, which are taken as they are.

    Returns:
        A scalar; zero where there is no pair.
    """
    if len(vectors) < 2:
        return 0 * vectors.sum()
    with torch.autocast(vectors.device.type, enabled=False):
        z = vectors.to(precise(vectors))
        norms = z.square().sum(1)
        exponents = 4 * z @ z.T - 2 * (norms[:, None] + norms)
        itself = torch.eye(len(z), dtype=torch.bool, device=z.device)
        pairs = len(z) * (len(z) - 1)
        return exponents.masked_fill(itself, -torch.inf).flatten().logsumexp(0) - math.log(pairs)


class InformationBottleneck(SideLoss):
    """`information_bottleneck` of the image side plus that of the caption side.

    It takes the Gaussian that an embedding is, or that a set was drawn from.

    Args:
        reduction: see `information_bottleneck`.
        mean: of the `gaussian`, or that of the drawn `samples`, as PCME's code has it.
        spread: `variance` is the divergence; `deviation` puts log sigma where log sigma^2 belongs, as PCME's code.
    """

    def __init__(self, *, reduction: Reduction = "mean", mean: Mean = "gaussian", spread: Spread = "variance") -> None:
        super().__init__()
        self.reduction = reduction
        self.mean = mean
        self.spread = spread

    def of(self, side: str, aggregated: Aggregated) -> Tensor:
        """Return a side's loss; ValueError where there is no Gaussian, or no samples but they are wanted."""
        embedding = aggregated.embedding
        gaussian = embedding if isinstance(embedding, Gaussian) else aggregated.gaussian
        mean, spread = self.needed(gaussian, "a Gaussian", side, "gaussian, pcme or pcmepp")
        if self.mean == "samples":
            mean = self.needed(set_of(aggregated), "samples", side, "pcme, or mean 'gaussian'").mean(1)
        if self.spread == "deviation":
            spread = spread / 2
        return information_bottleneck(mean, spread, self.reduction)


class Uniformity(Loss):
    """`uniformity` of all elements of all images and captions together."""

    def forward(self, similarity: Tensor, positives: Tensor, images: Aggregated, captions: Aggregated) -> Tensor:
        """Return the loss of both embeddings; ValueError unless they are vectors or sets."""
        both = self.vectors_or_sets("image", images), self.vectors_or_sets("text", captions)
        return uniformity(torch.cat([embeddings.flatten(0, -2) for embeddings in both]))
