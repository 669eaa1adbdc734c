"""Similarities of diagonal Gaussians, each a few matrix products.

Sources: *Uncertainty-based Cross-Modal Retrieval with Probabilistic Representations* (eq. 4-8) for KL, min-KL and
2-Wasserstein; PCME++ (Chun, *Improved Probabilistic Image-Text Representations*, ICLR 2024) for the closed-form
sampled distance.

Everything is computed in float64 and returned in float32 (in float64 for float64 Gaussians): the products add up
terms that are far larger than the differences between neighbouring Gaussians.
"""

from typing import Literal

import torch
from torch import Tensor

from ..embedding import Embedding, Gaussian
from .shared import SIMILARITIES, Similarity, check, precise, squared_distances, unit

Direction = Literal["image-caption", "caption-image"]
Form = Literal["closed", "printed"]


@SIMILARITIES.register("kl", "Gaussians, in one direction")
class KL(Similarity):
    """The negative Kullback-Leibler divergence of Gaussians, at most 0 (eq. 4-5).

    Args:
        direction: `image-caption` is -KL(image || caption), the paper's; `caption-image` -KL(caption || image).
    """

    embedding = "gaussian"
    score = "the negative Kullback-Leibler divergence of both Gaussians, at most 0"

    def __init__(self, direction: Direction = "image-caption") -> None:
        super().__init__()
        self.direction = direction

    def forward(self, images: Gaussian, captions: Gaussian) -> Tensor:
        """Compare I with C Gaussians of D dimensions: `[I, C]`."""
        check("gaussian", images, captions)
        if self.direction == "caption-image":
            return _negative_kl(captions, images).T.to(precise(images.mean))
        return _negative_kl(images, captions).to(precise(images.mean))


@SIMILARITIES.register("min-kl", "Gaussians, in the better direction")
class MinKL(Similarity):
    """The negative of the smaller of both Kullback-Leibler divergences, at most 0 (eq. 6)."""

    embedding = "gaussian"
    score = "the negative of the smaller Kullback-Leibler divergence of both Gaussians, at most 0"

    def forward(self, images: Gaussian, captions: Gaussian) -> Tensor:
        """Compare I with C Gaussians of D dimensions: `[I, C]`."""
        check("gaussian", images, captions)
        return torch.maximum(_negative_kl(images, captions), _negative_kl(captions, images).T).to(precise(images.mean))


@SIMILARITIES.register("wasserstein", "Gaussians, whose variances count like their means")
class Wasserstein(Similarity):
    """The negative 2-Wasserstein distance of Gaussians, at most 0 (eq. 7).

    Where two Gaussians coincide the gradient is 0.

    Args:
        form: `closed` is what eq. 7 comes to for diagonal Gaussians, sqrt(|m1 - m2|^2 + |s1 - s2|^2) with standard
            deviations s; `printed` has variances in their place, as the paper prints it (eq. 8).
    """

    embedding = "gaussian"
    score = "the negative 2-Wasserstein distance of both Gaussians, at most 0"

    def __init__(self, form: Form = "closed") -> None:
        super().__init__()
        self.form = form

    def forward(self, images: Gaussian, captions: Gaussian) -> Tensor:
        """Compare I with C Gaussians of D dimensions: `[I, C]`."""
        check("gaussian", images, captions)
        distances = squared_distances(self.points(images, query=True), self.points(captions, query=False))
        apart = distances > 0
        return -(torch.where(apart, distances, 1).sqrt() * apart).to(precise(images.mean))

    def points(self, embedding: Embedding, *, query: bool) -> Tensor:
        """Return mean and deviations (`printed`: variances) side by side, float64 `[B, 2 D]`."""
        mean, log_variance = embedding
        exponent = 0.5 if self.form == "closed" else 1.0
        return torch.cat([mean.double(), (exponent * log_variance.double()).exp()], 1)


@SIMILARITIES.register("sampled-distance", "Gaussians, in closed form: the fastest with uncertainty")
class SampledDistance(Similarity):
    """The negative expected squared distance of samples of both, |m1 - m2|^2 + sum(s1^2 + s2^2) (PCME++).

    The means are normalised here, as the paper's are. At most 0.
    """

    embedding = "gaussian"
    score = "the negative expected squared distance of samples of both Gaussians, at most 0"
    of_cosines = True

    def forward(self, images: Gaussian, captions: Gaussian) -> Tensor:
        """Compare I with C Gaussians of D dimensions: `[I, C]`."""
        check("gaussian", images, captions)
        means = [unit(g.mean.double()) for g in (images, captions)]
        spread = [g.log_variance.double().exp().sum(1) for g in (images, captions)]
        distances = squared_distances(*means) + spread[0][:, None] + spread[1]
        return -distances.to(precise(images.mean))

    def points(self, embedding: Embedding, *, query: bool) -> Tensor:
        """Return unit means beside the root of the summed variances, `[B, D + 1]`, which is 0 for a `query`."""
        mean, log_variance = embedding
        root = log_variance.exp().sum(1, keepdim=True).sqrt()
        return torch.cat([unit(mean), 0 * root if query else root], 1)


def _negative_kl(first: Gaussian, second: Gaussian) -> Tensor:
    """Return -KL(first || second), float64 `[N, M]`: one product, with x^2 and x of `first` side by side."""
    mean, log_variance = first.mean.double(), first.log_variance.double()
    other, other_log = second.mean.double(), second.log_variance.double()
    precision = (-other_log).exp()
    rows = torch.cat([log_variance.exp() + mean.square(), mean], 1)
    columns = torch.cat([precision, -2 * other * precision], 1)
    constant = (other.square() * precision + other_log).sum(1) - (log_variance + 1).sum(1)[:, None]
    return torch.addmm(constant, rows, columns.T, beta=-0.5, alpha=-0.5).clamp(max=0)
