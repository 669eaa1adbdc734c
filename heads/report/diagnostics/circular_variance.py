"""How far the elements of an embedding set lie apart: the circular variance of two papers (`log_circular_variance`)."""

from dataclasses import dataclass

from torch import Tensor

from ...evaluation.metrics import log_circular_variance


@dataclass(frozen=True)
class OfSets:
    """A value over the sets of images, over those of captions, and over both together."""

    image: float
    text: float
    both: float


@dataclass(frozen=True)
class CircularVariance:
    """The natural logarithm of the mean circular variance of embedding sets.

    Attributes:
        log: as SetDiv defines it, of 1 - n.
        log_squared: as MaxMatch defines it, of 1 - n².
    """

    log: OfSets
    log_squared: OfSets


def circular_variance(images: Tensor, captions: Tensor) -> CircularVariance:
    """Return the circular variance of sets ``[I, K1, D]`` and ``[C, K2, D]``."""

    def of_sets(power: int) -> OfSets:
        some = ((images,), (captions,), (images, captions))
        return OfSets(*(log_circular_variance(*sets, power=power) for sets in some))

    return CircularVariance(of_sets(1), of_sets(2))
