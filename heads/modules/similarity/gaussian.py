"""Similarities of diagonal Gaussians, each a few matrix products.

Sources: *Uncertainty-based Cross-Modal Retrieval with Probabilistic Representations* (eq. 4-8) for KL, min-KL and
2-Wasserstein; PCME++ (Chun, *Improved Probabilistic Image-Text Representations*, ICLR 2024) for the closed-form
sampled distance.

All is computed in float64 and given in float32 (in float64 for float64 Gaussians): the products add up terms that
are far larger than the differences between near-by Gaussians.
"""

from typing import Literal

import torch
from torch import Tensor, nn
from torch.nn import functional

from ..checks import one_of
from ..embedding import Gaussian
from .shared import check_gaussians, precise, squared_distances

Direction = Literal["image-caption", "caption-image"]
Form = Literal["closed", "printed"]


def negative_kl(images: Gaussian, captions: Gaussian, direction: Direction = "image-caption") -> Tensor:
    """Return the negative Kullback-Leibler divergence of every pair (eq. 4-5).

    Args:
        images: I Gaussians of D dimensions.
        captions: C Gaussians.
        direction: `image-caption` is -KL(image || caption), the paper's; `caption-image` -KL(caption || image).

    Returns:
        `[I, C]`, at most 0.
    """
    check_gaussians(images, captions)
    if direction == "caption-image":
        return _negative_kl(captions, images).T.to(precise(images.mean))
    return _negative_kl(images, captions).to(precise(images.mean))


def negative_min_kl(images: Gaussian, captions: Gaussian) -> Tensor:
    """Return the negative of the smaller of both divergences, `[I, C]` (eq. 6); arguments as for `negative_kl`."""
    check_gaussians(images, captions)
    return torch.maximum(_negative_kl(images, captions), _negative_kl(captions, images).T).to(precise(images.mean))


def negative_wasserstein(
    images: Gaussian, captions: Gaussian, *, form: Form = "closed", squared: bool = False
) -> Tensor:
    """Return the negative 2-Wasserstein distance of every pair (eq. 7).

    Args:
        images: I Gaussians of D dimensions.
        captions: C Gaussians.
        form: `closed` is what eq. 7 comes to for diagonal Gaussians, sqrt(|m1 - m2|^2 + |s1 - s2|^2) with standard
            deviations s; `printed` has variances in their place, as the paper prints it (eq. 8).
        squared: leave the root out.

    Returns:
        `[I, C]`, at most 0. Where two Gaussians coincide the gradient is 0.
    """
    check_gaussians(images, captions)
    exponent = 0.5 if form == "closed" else 1.0
    points = [torch.cat([g.mean.double(), (exponent * g.log_variance.double()).exp()], 1) for g in (images, captions)]
    with torch.autocast(images.mean.device.type, enabled=False):
        distances = squared_distances(*points)
    if not squared:
        apart = distances > 0
        distances = torch.where(apart, distances, 1).sqrt() * apart
    return -distances.to(precise(images.mean))


def negative_sampled_distance(images: Gaussian, captions: Gaussian) -> Tensor:
    """Return the negative expected squared distance of samples of both, |m1 - m2|^2 + sum(s1^2 + s2^2) (PCME++).

    Args:
        images: I Gaussians of D dimensions; their means are normalised here, as the paper's are.
        captions: C Gaussians, likewise.

    Returns:
        `[I, C]`, at most 0.
    """
    check_gaussians(images, captions)
    means = [functional.normalize(g.mean.double(), dim=1) for g in (images, captions)]
    spread = [g.log_variance.double().exp().sum(1) for g in (images, captions)]
    with torch.autocast(images.mean.device.type, enabled=False):
        distances = squared_distances(*means) + spread[0][:, None] + spread[1]
    return -distances.to(precise(images.mean))


class Kl(nn.Module):
    """`negative_kl` of Gaussians."""

    embedding = "gaussian"

    def __init__(self, direction: Direction = "image-caption") -> None:
        super().__init__()
        one_of("kl", Direction, direction=direction)
        self.direction: Direction = direction

    def forward(self, images: Gaussian, captions: Gaussian) -> Tensor:
        """Compare I with C Gaussians: `[I, C]`."""
        return negative_kl(images, captions, self.direction)


class MinKl(nn.Module):
    """`negative_min_kl` of Gaussians."""

    embedding = "gaussian"

    def forward(self, images: Gaussian, captions: Gaussian) -> Tensor:
        """Compare I with C Gaussians: `[I, C]`."""
        return negative_min_kl(images, captions)


class Wasserstein(nn.Module):
    """`negative_wasserstein` of Gaussians."""

    embedding = "gaussian"

    def __init__(self, form: Form = "closed", squared: bool = False) -> None:
        super().__init__()
        one_of("wasserstein", Form, form=form)
        self.form: Form = form
        self.squared = squared

    def forward(self, images: Gaussian, captions: Gaussian) -> Tensor:
        """Compare I with C Gaussians: `[I, C]`."""
        return negative_wasserstein(images, captions, form=self.form, squared=self.squared)


class SampledDistance(nn.Module):
    """`negative_sampled_distance` of Gaussians."""

    embedding = "gaussian"

    def forward(self, images: Gaussian, captions: Gaussian) -> Tensor:
        """Compare I with C Gaussians: `[I, C]`."""
        return negative_sampled_distance(images, captions)


def _negative_kl(first: Gaussian, second: Gaussian) -> Tensor:
    """Return -KL(first || second), float64 `[N, M]`: one product, with x^2 and x of `first` side by side."""
    with torch.autocast(first.mean.device.type, enabled=False):
        mean, log_variance = first.mean.double(), first.log_variance.double()
        other, other_log = second.mean.double(), second.log_variance.double()
        precision = (-other_log).exp()
        rows = torch.cat([log_variance.exp() + mean.square(), mean], 1)
        columns = torch.cat([precision, -2 * other * precision], 1)
        constant = (other.square() * precision + other_log).sum(1) - (log_variance + 1).sum(1)[:, None]
        return torch.addmm(constant, rows, columns.T, beta=-0.5, alpha=-0.5).clamp(max=0)
