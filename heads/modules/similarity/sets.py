"""Similarities of vectors and of sets that follow from the cosines of their elements alone.

Sources: VSE++ (cosine), PVSE (MIL), and *Improving Cross-Modal Retrieval with Set of Diverse Embeddings*
(SetDiv, section 3.3) for Chamfer and smooth-Chamfer.
"""

from collections.abc import Callable
from typing import Literal

import torch
from torch import Tensor

from ..parameters import Positive
from .shared import SIMILARITIES, Similarity, check, element_cosines, unit

# Whose elements look for their nearest in the other set: those of either, and both means are averaged; or of one alone.
Direction = Literal["both", "image", "caption"]


@SIMILARITIES.register("cosine", "vectors")
class Cosine(Similarity):
    """The cosine of embedding vectors."""

    embedding = "vector"
    score = "the cosine of both embeddings, from -1 to 1"
    of_cosines = dot_product = True

    def forward(self, images: Tensor, captions: Tensor) -> Tensor:
        """Compare `images [I, D]` with `captions [C, D]`: `[I, C]`."""
        check("vector", images, captions)
        with torch.autocast(images.device.type, enabled=False):
            return unit(images) @ unit(captions).T


@SIMILARITIES.register("mil", "sets of which the best pair counts")
class MIL(Similarity):
    """The largest cosine between elements of two sets."""

    embedding = "set"
    score = "the largest cosine of an element of one with an element of the other, from -1 to 1"
    of_cosines = True

    def forward(self, images: Tensor, captions: Tensor) -> Tensor:
        """Compare `images [I, K1, D]` with `captions [C, K2, D]`: `[I, C]`."""
        return element_cosines(images, captions).amax((1, 2))


@SIMILARITIES.register("chamfer", "sets of which each element finds its nearest")
class Chamfer(Similarity):
    """The mean cosine of the elements of either set with their nearest in the other, both ways averaged.

    SetDiv section 3.3: eq. 7 with max in place of log-sum-exp.

    Args:
        direction: `"image"` or `"caption"`: of the elements of these sets alone, where the other set has more to say.
    """

    embedding = "set"
    score = "the mean cosine of each element with its nearest in the other set, from -1 to 1"
    of_cosines = True

    def __init__(self, direction: Direction = "both") -> None:
        super().__init__()
        self.direction = direction

    def forward(self, images: Tensor, captions: Tensor) -> Tensor:
        """Compare `images [I, K1, D]` with `captions [C, K2, D]`: `[I, C]`."""
        cosines = element_cosines(images, captions)
        return _directed(self.direction, lambda: cosines.amax(2).mean(1), lambda: cosines.amax(1).mean(1))


@SIMILARITIES.register("smooth-chamfer", "chamfer with gradients for all pairs: sets do not collapse")
class SmoothChamfer(Similarity):
    """The smooth-Chamfer similarity of embedding sets (SetDiv eq. 6).

    Args:
        alpha: scale of the cosines, 16 in the paper; the larger, the nearer to `Chamfer`.
        direction: as of `Chamfer`.
    """

    embedding = "set"
    score = "the smoothed mean cosine of each element with its nearest in the other set, from -1 to 1 + ln(K) / alpha"
    of_cosines = True

    def __init__(self, alpha: Positive = 16.0, direction: Direction = "both") -> None:
        super().__init__()
        self.alpha, self.direction = alpha, direction

    def forward(self, images: Tensor, captions: Tensor) -> Tensor:
        """Compare `images [I, K1, D]` with `captions [C, K2, D]`.

        Returns:
            `[I, C]`, from -1 to 1 + log(K) / alpha, K that of the larger set.
        """
        scaled = element_cosines(images, captions, self.alpha)
        if self.alpha > 32:
            way = _directed(self.direction, lambda: scaled.logsumexp(2).mean(1), lambda: scaled.logsumexp(1).mean(1))
            return way / self.alpha
        # Both directions share one exponential: cosines lie in [-1, 1], so that it neither over- nor underflows. Not
        # in place: the cosines are a view, of which autograd would copy the gradient once more.
        powers = scaled.exp()
        way = _directed(self.direction, lambda: powers.sum(2).log().mean(1), lambda: powers.sum(1).log().mean(1))
        return way / self.alpha


def _directed(direction: Direction, of_images: Callable[[], Tensor], of_captions: Callable[[], Tensor]) -> Tensor:
    if direction == "both":
        return (of_images() + of_captions()) / 2
    return of_images() if direction == "image" else of_captions()
