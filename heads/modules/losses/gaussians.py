"""Regularisers of probabilistic embeddings: the information bottleneck and uniformity.

Sources: Chun et al., *Probabilistic Embeddings for Cross-Modal Retrieval* (PCME), section 3.2, and its public code;
Chun, *Improved Probabilistic Image-Text Representations* (PCME++), section 3.2.
"""

import math
from typing import Literal

import torch
from torch import Tensor, nn

from ..aggregators.aggregated import Aggregated
from ..checks import one_of
from ..embedding import Gaussian
from ..similarity.shared import precise
from .common import both, tensor_embedding

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


class InformationBottleneck(nn.Module):
    """`information_bottleneck` of the image side plus that of the caption side.

    It takes the Gaussian that an embedding is, or that a set was drawn from.

    Args:
        reduction: see `information_bottleneck`.
        mean: of the `gaussian`, or that of the drawn `samples`, as PCME's code has it.
        spread: `variance` is the divergence; `deviation` puts log sigma where log sigma^2 belongs, as PCME's code.
    """

    def __init__(self, *, reduction: Reduction = "mean", mean: Mean = "gaussian", spread: Spread = "variance") -> None:
        super().__init__()
        one_of("information-bottleneck", Reduction, reduction=reduction)
        one_of("information-bottleneck", Mean, mean=mean)
        one_of("information-bottleneck", Spread, spread=spread)
        self.reduction = reduction
        self.mean = mean
        self.spread = spread

    def forward(self, similarity: Tensor, positives: Tensor, images: Aggregated, captions: Aggregated) -> Tensor:
        """Return the loss of both sides; ValueError where there is no Gaussian, or no samples but they are wanted."""
        return both(self._of, images, captions)

    def _of(self, side: str, aggregated: Aggregated) -> Tensor:
        embedding = aggregated.embedding
        gaussian = embedding if isinstance(embedding, Gaussian) else aggregated.gaussian
        if gaussian is None:
            raise ValueError(
                f"the information-bottleneck loss needs a Gaussian, but the {side} aggregator has none: "
                "choose gaussian, pcme or pcmepp, or leave the loss out"
            )
        mean, spread = gaussian
        if self.mean == "samples":
            if not isinstance(embedding, Tensor) or embedding.ndim != 3:
                raise ValueError(
                    f"information-bottleneck: mean is 'samples', but the {side} aggregator draws none: "
                    "choose pcme, or mean 'gaussian'"
                )
            mean = embedding.mean(1)
        if self.spread == "deviation":
            spread = spread / 2
        return information_bottleneck(mean, spread, self.reduction)


class Uniformity(nn.Module):
    """`uniformity` of all elements of all images and captions together."""

    def forward(self, similarity: Tensor, positives: Tensor, images: Aggregated, captions: Aggregated) -> Tensor:
        """Return the loss of both embeddings; ValueError unless they are vectors or sets."""
        sides = tensor_embedding("uniformity", "image", images), tensor_embedding("uniformity", "text", captions)
        return uniformity(torch.cat([side.flatten(0, -2) for side in sides]))
