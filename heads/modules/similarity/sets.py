"""Similarities of vectors and of sets that follow from the cosines of their elements alone.

Sources: VSE++ (cosine), PVSE (MIL), and *Improving Cross-Modal Retrieval with Set of Diverse Embeddings*
(SetDiv, section 3.3) for Chamfer and smooth-Chamfer.
"""

import torch
from torch import Tensor, nn

from ..checks import above
from .shared import check_vectors, element_cosines, unit


def cosine(images: Tensor, captions: Tensor) -> Tensor:
    """Return the cosine of every pair of `images [I, D]` and `captions [C, D]`, `[I, C]`."""
    check_vectors(images, captions)
    with torch.autocast(images.device.type, enabled=False):
        return unit(images) @ unit(captions).T


def mil(images: Tensor, captions: Tensor) -> Tensor:
    """Return the largest cosine between elements of `images [I, K1, D]` and `captions [C, K2, D]`, `[I, C]`."""
    return element_cosines(images, captions).amax((1, 2))


def chamfer(images: Tensor, captions: Tensor) -> Tensor:
    """Return the mean cosine of the elements of either set with their nearest in the other, both ways averaged.

    Args:
        images: `[I, K1, D]`.
        captions: `[C, K2, D]`.

    Returns:
        `[I, C]` (SetDiv section 3.3: eq. 7 with max in place of log-sum-exp).
    """
    cosines = element_cosines(images, captions)
    return (cosines.amax(2).mean(1) + cosines.amax(1).mean(1)) / 2


def smooth_chamfer(images: Tensor, captions: Tensor, alpha: float = 16.0) -> Tensor:
    """Return the smooth-Chamfer similarity (SetDiv eq. 6).

    Args:
        images: `[I, K1, D]`.
        captions: `[C, K2, D]`.
        alpha: scale of the cosines; the larger, the nearer to `chamfer`.

    Returns:
        `[I, C]`. Its range grows as log(K) / alpha beyond [-1, 1].
    """
    scaled = element_cosines(images, captions, alpha)
    if alpha > 32:
        return (scaled.logsumexp(2).mean(1) + scaled.logsumexp(1).mean(1)) / (2 * alpha)
    # Both directions share one exponential: cosines lie in [-1, 1], so that it neither over- nor underflows. Not in
    # place: the cosines are a view, of which autograd would copy the gradient once more.
    powers = scaled.exp()
    return (powers.sum(2).log().mean(1) + powers.sum(1).log().mean(1)) / (2 * alpha)


class Cosine(nn.Module):
    """`cosine` of embedding vectors."""

    embedding = "vector"

    def forward(self, images: Tensor, captions: Tensor) -> Tensor:
        """Compare `images [I, D]` with `captions [C, D]`: `[I, C]`."""
        return cosine(images, captions)


class Mil(nn.Module):
    """`mil` of embedding sets."""

    embedding = "set"

    def forward(self, images: Tensor, captions: Tensor) -> Tensor:
        """Compare `images [I, K1, D]` with `captions [C, K2, D]`: `[I, C]`."""
        return mil(images, captions)


class Chamfer(nn.Module):
    """`chamfer` of embedding sets."""

    embedding = "set"

    def forward(self, images: Tensor, captions: Tensor) -> Tensor:
        """Compare `images [I, K1, D]` with `captions [C, K2, D]`: `[I, C]`."""
        return chamfer(images, captions)


class SmoothChamfer(nn.Module):
    """`smooth_chamfer` of embedding sets, with the paper's alpha of 16."""

    embedding = "set"

    def __init__(self, alpha: float = 16.0) -> None:
        super().__init__()
        above("smooth-chamfer", 0, alpha=alpha)
        self.alpha = alpha

    def forward(self, images: Tensor, captions: Tensor) -> Tensor:
        """Compare `images [I, K1, D]` with `captions [C, K2, D]`: `[I, C]`."""
        return smooth_chamfer(images, captions, self.alpha)
