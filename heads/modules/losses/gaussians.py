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
from .common import LOSSES, Loss, SideLoss, set_of

Form = Literal["pcme", "pcmepp"]


@LOSSES.register("information-bottleneck", "for Gaussians: variances neither vanish nor explode")
class InformationBottleneck(SideLoss):
    """KL(N(mean, variance) || N(0, 1)) of the image side plus that of the caption side.

    It takes the Gaussian that an embedding is, or that a set was drawn from.

    Args:
        form: `pcmepp`: the mean of the divergence over samples and dimensions. `pcme`: their sum, as in PCME's code,
            with the mean of the drawn samples for that of the Gaussian, and log sigma in the place of log sigma^2.
    """

    def __init__(self, *, form: Form = "pcmepp") -> None:
        super().__init__()
        self.form = form

    def of(self, side: str, aggregated: Aggregated) -> Tensor:
        """Return a side's loss; ValueError where there is no Gaussian, or no samples but they are wanted."""
        embedding = aggregated.embedding
        gaussian = embedding if isinstance(embedding, Gaussian) else aggregated.gaussian
        mean, spread = self.needed(gaussian, "a Gaussian", side, "gaussian, pcme or pcmepp")
        if self.form == "pcme":
            samples = self.needed(set_of(aggregated), "samples", side, "pcme, or form 'pcmepp'")
            mean, spread = samples.to(precise(samples)).mean(1), spread / 2
        mean, spread = mean.to(precise(mean)), spread.to(precise(spread))
        terms = (mean.square() + spread.exp() - 1 - spread) / 2
        return terms.mean() if self.form == "pcmepp" else terms.sum()


@LOSSES.register("uniformity", "for vectors and sets: they spread over the sphere")
class Uniformity(Loss):
    """log mean exp(-2 |z - z'|^2) over all pairs of elements of all images and captions, which are taken as they are.

    Zero where there is no pair.
    """

    def forward(self, similarity: Tensor, positives: Tensor, images: Aggregated, captions: Aggregated) -> Tensor:
        """Return the loss of both embeddings, a scalar; ValueError unless they are vectors or sets."""
        both = self.vectors_or_sets("image", images), self.vectors_or_sets("text", captions)
        z = torch.cat([embeddings.flatten(0, -2).to(precise(embeddings)) for embeddings in both])
        if len(z) < 2:
            return 0 * z.sum()
        with torch.autocast(z.device.type, enabled=False):
            norms = -2 * z.square().sum(1)
            exponents = torch.addmm(norms[:, None] + norms, z, z.T, alpha=4).fill_diagonal_(-torch.inf)
            return exponents.flatten().logsumexp(0) - math.log(len(z) * (len(z) - 1))
