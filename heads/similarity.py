"""Similarities between image and caption embeddings. Larger is closer, always.

Sources: VSE++ (cosine), PVSE (MIL), and *Improving Cross-Modal Retrieval with Set of Diverse Embeddings*
(SetDiv, section 3.3) for Chamfer and smooth-Chamfer.

Embeddings come as they are and are normalised here. Every similarity is computed in float32 at least, also
inside autocast. Memory grows as K1 x K2 x I x C: score a whole gallery in blocks.
"""

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional


def cosine(images: Tensor, captions: Tensor) -> Tensor:
    """Return the cosine of every pair of `images [I, D]` and `captions [C, D]`, `[I, C]`."""
    _check(images, captions, 2, "vectors [samples, width]")
    with torch.autocast(images.device.type, enabled=False):
        return _unit(images) @ _unit(captions).T


def mil(images: Tensor, captions: Tensor) -> Tensor:
    """Return the largest cosine between elements of `images [I, K1, D]` and `captions [C, K2, D]`, `[I, C]`."""
    return _element_cosines(images, captions).amax((0, 2))


def chamfer(images: Tensor, captions: Tensor) -> Tensor:
    """Return the mean cosine of the elements of either set with their nearest in the other, both ways averaged.

    Args:
        images: `[I, K1, D]`.
        captions: `[C, K2, D]`.

    Returns:
        `[I, C]` (SetDiv section 3.3: eq. 7 with max in place of log-sum-exp).
    """
    cosines = _element_cosines(images, captions)
    return (cosines.amax(2).mean(0) + cosines.amax(0).mean(1)) / 2


def smooth_chamfer(images: Tensor, captions: Tensor, alpha: float = 16.0) -> Tensor:
    """Return the smooth-Chamfer similarity (SetDiv eq. 6).

    Args:
        images: `[I, K1, D]`.
        captions: `[C, K2, D]`.
        alpha: scale of the cosines; the larger, the nearer to `chamfer`.

    Returns:
        `[I, C]`. Its range grows as log(K) / alpha beyond [-1, 1].
    """
    cosines = _element_cosines(images, captions)
    if alpha > 32:
        cosines = alpha * cosines
        return (cosines.logsumexp(2).mean(0) + cosines.logsumexp(0).mean(1)) / (2 * alpha)
    # Both directions share one exponential: cosines lie in [-1, 1], so that it neither over- nor underflows.
    powers = (alpha * cosines - alpha).exp()
    return 1 + (powers.sum(2).log().mean(0) + powers.sum(0).log().mean(1)) / (2 * alpha)


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
        if alpha <= 0:
            raise ValueError(f"smooth-chamfer: alpha is {alpha}, but must be above 0")
        self.alpha = alpha

    def forward(self, images: Tensor, captions: Tensor) -> Tensor:
        """Compare `images [I, K1, D]` with `captions [C, K2, D]`: `[I, C]`."""
        return smooth_chamfer(images, captions, self.alpha)


SIMILARITIES: dict[str, type[Any]] = {
    "cosine": Cosine,
    "mil": Mil,
    "chamfer": Chamfer,
    "smooth-chamfer": SmoothChamfer,
}


def _element_cosines(images: Tensor, captions: Tensor) -> Tensor:
    """Return the cosines of all elements, `[K1, I, K2, C]`.

    Slot-major: one matrix product whose reductions over K1 and K2 then run over contiguous rows of captions.
    """
    _check(images, captions, 3, "sets [samples, elements, width]")
    with torch.autocast(images.device.type, enabled=False):
        rows, columns = _unit(images).transpose(0, 1), _unit(captions).transpose(0, 1)
        return (rows.flatten(0, 1) @ columns.flatten(0, 1).T).view(*rows.shape[:2], *columns.shape[:2])


def _unit(x: Tensor) -> Tensor:
    return functional.normalize(x.to(torch.promote_types(x.dtype, torch.float32)), dim=-1)


def _check(images: Tensor, captions: Tensor, dimensions: int, expected: str) -> None:
    if images.ndim != dimensions or captions.ndim != dimensions or images.shape[-1] != captions.shape[-1]:
        raise ValueError(
            f"this similarity compares embedding {expected} of one width, "
            f"not {list(images.shape)} with {list(captions.shape)}"
        )
