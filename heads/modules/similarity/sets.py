"""Similarities of vectors and of sets.

Sources: VSE++ (cosine), PVSE (MIL), and *Improving Cross-Modal Retrieval with Set of Diverse Embeddings* (SetDiv,
section 3.3) for Chamfer, smooth-Chamfer and match probability by cosine (s_MP), of which SetDiv prints a sum over the
pairs; its published code takes the mean, as is done here. There the scale begins at 1, which keeps the probability of
cosines between 0.27 and 0.73, and hardly changes; here it begins at 5. PCME (Chun et al., *Probabilistic Embeddings for
Cross-Modal Retrieval*, CVPR 2021) has the probability by distance, of samples of Gaussians.
"""

import math
from collections.abc import Callable
from typing import Literal

import torch
from torch import Tensor, nn
from torch.nn import functional

from ..parts import Positive
from .shared import SIMILARITIES, Similarity, check, element_cosines, precise, squared_distances, unit

# Whose elements look for their nearest in the other set: those of either, and both means are averaged; or of one alone.
Direction = Literal["both", "image", "caption"]
Link = Literal["symmetric", "logistic"]


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
        """Compare `images [I, K1, D]` with `captions [C, K2, D]`: `[I, C]`, K in `score` is that of the larger set."""
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


def match_probability(images: Tensor, captions: Tensor, scale: Tensor | float, shift: Tensor | float) -> Tensor:
    """Return the mean of sigmoid(scale * cosine + shift) over all pairs of elements (SetDiv, s_MP), `[I, C]`.

    Of `images [I, K1, D]` and `captions [C, K2, D]`, with a `scale` above 0.
    """
    return element_cosines(images, captions, scale).add_(shift).sigmoid_().mean((1, 2))


def monte_carlo_log_odds(
    images: Tensor, captions: Tensor, scale: Tensor | float, shift: Tensor | float, link: Link = "symmetric"
) -> Tensor:
    """Return the log-odds log(p / (1 - p)) of the match probability p of every pair, from samples (PCME), `[I, C]`.

    Finite and exact where p itself is rounded to 0 or 1, so that -log p = softplus(-x) and -log(1 - p) = softplus(x)
    train, and pairs that are far apart are still ranked.

    Args:
        images: samples `[I, K1, D]`, taken as they are, not normalised.
        captions: `[C, K2, D]`.
        scale, shift: scalars, the first above 0.
        link: from a logit l = shift - scale * distance to a probability, whose mean over all pairs of samples is p:
            `symmetric` is the published code's exp(l) / (exp(l) + exp(-l)), `logistic` the paper's 1 / (1 + exp(-l)).
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
