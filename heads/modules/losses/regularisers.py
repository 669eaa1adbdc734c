"""Losses on the embeddings alone, beside one that matches pairs: they keep apart what would collapse, or sides alike.

Sources: *Improving Cross-Modal Retrieval with Set of Diverse Embeddings* (SetDiv), section 3.4, and PVSE for
`Diversity` and `MMD`; *Maximal Matching Matters* (MaxMatch, ACL 2025), eq. 7 and 8 and its listings 4 and 5, for
`GlobalDiscriminative` and `IntraSetDivergence`; *Probabilistic Embeddings for Cross-Modal Retrieval* (PCME) and
*Improved Probabilistic Image-Text Representations* (PCME++), each section 3.2, for `InformationBottleneck` and
`Uniformity`. Means and sums are those of their public code.
"""

import math
from abc import ABC, abstractmethod
from typing import Literal

import torch
from torch import Tensor

from ..aggregators.aggregated import Aggregated
from ..embedding import Gaussian
from ..similarity.shared import precise, unit
from .common import LOSSES, Loss

Form = Literal["exponential", "gram"]
Bottleneck = Literal["pcme", "pcmepp"]

SCALE = 0.5  # MaxMatch's s, in the exponential of the cosines


class SideLoss(Loss, ABC):
    """Base of losses that look at each side by itself: the sum of the image side's term and the text side's."""

    def forward(self, similarity: Tensor, positives: Tensor, images: Aggregated, captions: Aggregated) -> Tensor:
        """Return the loss of both sides, a scalar; ValueError where a side does not give what it needs."""
        return self.of("image", images) + self.of("text", captions)

    @abstractmethod
    def of(self, side: str, aggregated: Aggregated) -> Tensor:
        """Return the term of one side, ``image`` or ``text``."""


@LOSSES.register("diversity", "beside triplet, for sets: elements differ")
class Diversity(SideLoss):
    """The diversity loss of the image slots plus that of the caption slots; zero for sets of one.

    Args:
        form: `exponential` (SetDiv): the mean of exp(-2 |x - x'|^2) over samples and pairs of their unit slots, where
            the paper prints a sum; `gram` (PVSE): the mean over samples of |G - 1| / K^2, G the Gram matrix of the unit
            slots, with the Frobenius norm.
    """

    def __init__(self, *, form: Form = "exponential") -> None:
        super().__init__()
        self.form = form

    def of(self, side: str, aggregated: Aggregated) -> Tensor:
        """Return the loss of a side's slots `[B, K, D]`; ValueError where there are none."""
        slots = self.needed(aggregated.slots, "slots", side, "element-slots")
        with torch.autocast(slots.device.type, enabled=False):
            if self.form == "exponential":
                return mean_exponential_within(slots, 4, 1)  # of unit vectors, |x - x'|^2 = 2 - 2 cos
            # The Gram matrix holds each pair twice.
            gram = 2**0.5 * torch.linalg.vector_norm(cosines_within(slots).triu(1), dim=(1, 2))
            return gram.mean() / slots.shape[1] ** 2


class SetRegulariser(SideLoss):
    """A loss of the elements of both sides' sets.

    Args:
        margin: the paper's delta, what is subtracted from the cosines first.
    """

    def __init__(self, *, margin: float = 0.6) -> None:
        super().__init__()
        self.margin = margin

    def elements_of(self, side: str, aggregated: Aggregated) -> Tensor:
        """Return a side's elements `[B, K, D]`; ValueError where it has none."""
        return self.needed(set_of(aggregated), "embedding sets", side, "element-slots")


@LOSSES.register("global-discriminative", "for sets: elements keep away from the global feature")
class GlobalDiscriminative(SetRegulariser):
    """The mean of exp(s (cos(element, global feature) - margin)) over samples and elements (MaxMatch eq. 7).

    The mean of both sides. Parameters as for `SetRegulariser`; the margin is the paper's delta 2.
    """

    def of(self, side: str, aggregated: Aggregated) -> Tensor:
        """Return half of a side's loss; ValueError where there is no set, or no global feature."""
        elements = self.elements_of(side, aggregated)
        global_ = self.needed(aggregated.global_, "the global feature", side, "element-slots")
        cosines = (unit(elements) * unit(global_)[:, None]).sum(2)
        return (SCALE * (cosines - self.margin)).exp().mean() / 2


@LOSSES.register("intra-set-divergence", "for sets: elements keep away from each other")
class IntraSetDivergence(SetRegulariser):
    """The mean of exp(s (cos(x, x') - margin)) over samples and pairs of their elements (MaxMatch eq. 8).

    The sum of both sides; zero for sets of one. Parameters as for `SetRegulariser`; the margin is the paper's delta 3.
    """

    def of(self, side: str, aggregated: Aggregated) -> Tensor:
        """Return a side's loss; ValueError where there is no set."""
        elements = self.elements_of(side, aggregated)
        with torch.autocast(elements.device.type, enabled=False):
            return mean_exponential_within(elements, SCALE, self.margin)


@LOSSES.register("information-bottleneck", "for Gaussians: variances neither vanish nor explode")
class InformationBottleneck(SideLoss):
    """KL(N(mean, variance) || N(0, 1)) of the image side plus that of the caption side.

    It takes the Gaussian that an embedding is, or that a set was drawn from.

    Args:
        form: `pcmepp`: the mean of the divergence over samples and dimensions. `pcme`: their sum, as in PCME's code,
            with the mean of the drawn samples for that of the Gaussian, and log sigma in the place of log sigma^2.
    """

    def __init__(self, *, form: Bottleneck = "pcmepp") -> None:
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

    Zero where there is no pair (PCME).
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


@LOSSES.register("mmd", "beside triplet: both modalities have one distribution")
class MMD(Loss):
    """The squared maximum mean discrepancy between all image and all caption elements, normalised (SetDiv, PVSE).

    mean k(x, x') - 2 mean k(x, y) + mean k(y, y'), pairs of an element with itself included; a vector is a set of one.
    The kernel k is exp(-|x - y| / 2).
    """

    def forward(self, similarity: Tensor, positives: Tensor, images: Aggregated, captions: Aggregated) -> Tensor:
        """Return the discrepancy, a scalar; ValueError unless both sides are vectors or sets.

        Elements that coincide have distance 0 and gradient 0.
        """
        sides = self.vectors_or_sets("image", images), self.vectors_or_sets("text", captions)
        with torch.autocast(sides[0].device.type, enabled=False):
            flat = [side.flatten(0, -2) for side in sides]
            x = unit(torch.cat(flat))
            squared = torch.addmm(x.new_full((), 2), x, x.T, alpha=-2)
            # Elements as near as the rounding error of the product count as coinciding: the root's slope is infinite at
            # 0, and what was filled in gets no gradient whatever that slope.
            distance = squared.masked_fill(squared < 16 * torch.finfo(squared.dtype).eps, 0).sqrt()
            share = torch.cat([x.new_full((len(t),), sign / len(t)) for t, sign in zip(flat, (1, -1), strict=True)])
            return share @ (-0.5 * distance).exp() @ share


def set_of(aggregated: Aggregated) -> Tensor | None:
    """Return an embedding set `[B, K, D]`; None where it is anything else."""
    embedding = aggregated.embedding
    return embedding if isinstance(embedding, Tensor) and embedding.ndim == 3 else None


def cosines_within(elements: Tensor) -> Tensor:
    """Return the cosines of all elements within each set `[B, K, D]`, `[B, K, K]`."""
    rows = unit(elements)
    return torch.bmm(rows, rows.transpose(1, 2))


def mean_exponential_within(elements: Tensor, scale: float, margin: float) -> Tensor:
    """Return the mean of exp(scale (cosine - margin)) over all pairs k < k' within sets; zero for sets of one."""
    pairs = len(elements) * math.comb(elements.shape[1], 2)
    powers = (scale * cosines_within(elements)).exp().triu(1)
    return powers.sum() * (math.exp(-scale * margin) / max(pairs, 1))
