"""How far the elements of an embedding set lie apart: the circular variance, in the forms of two papers.

Sources: *Improving Cross-Modal Retrieval with Set of Diverse Embeddings* (SetDiv, section 4.6, Table 3) and *Maximal
Matching Matters* (MaxMatch, section 4.4, Table 4), which squares the norm.
"""

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional


@dataclass(frozen=True)
class OfSets:
    """A value over the sets of images, over those of captions, and over both together."""

    image: float
    text: float
    both: float


@dataclass(frozen=True)
class CircularVariance:
    """The natural logarithm of the mean circular variance of embedding sets.

    With the norm n of the mean of a set's unit elements, the variance is 1 - n or 1 - n². Sets without any spread
    give about -36, where double precision ends.

    Attributes:
        log: of 1 - n (SetDiv).
        log_squared: of 1 - n² (MaxMatch).
    """

    log: OfSets
    log_squared: OfSets


def circular_variance(images: Tensor, captions: Tensor) -> CircularVariance:
    """Return the circular variance of sets ``[I, K1, D]`` and ``[C, K2, D]``, whose elements are normalised here."""
    norms = [_norms(images), _norms(captions)]
    norms.append(torch.cat(norms))
    return CircularVariance(
        OfSets(*(_log_mean(1 - norm) for norm in norms)), OfSets(*(_log_mean(1 - norm.square()) for norm in norms))
    )


def _norms(sets: Tensor) -> Tensor:
    """Return the norm of the mean of each set's unit elements, float64 ``[B]``."""
    means = [functional.normalize(part.double(), dim=-1).mean(1) for part in sets.split(1024)]
    return torch.cat([mean.norm(dim=-1) for mean in means])


def _log_mean(variance: Tensor) -> float:
    return variance.mean().clamp(min=torch.finfo(torch.float64).eps).log().item()
