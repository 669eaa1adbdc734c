"""How uncertain a run with Gaussian embeddings is of each image and caption.

Source: *Uncertainty-based Cross-Modal Retrieval with Probabilistic Representations*, section 3.3 and Figures 4-7.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Generic, TypeVar

import torch
from torch import Tensor

from ..embedded import Embedded

SHOWN = 10  # samples at either end


@dataclass(frozen=True)
class UncertainImage:
    """An image at one end, with the texts of its captions."""

    id: str
    file_name: str
    captions: list[str]
    uncertainty: float


@dataclass(frozen=True)
class UncertainCaption:
    """A caption at one end, with the file of its image."""

    sentid: int
    caption: str
    file_name: str
    uncertainty: float


Sample = TypeVar("Sample")


@dataclass(frozen=True)
class Distribution(Generic[Sample]):
    """The uncertainty of one modality.

    Attributes:
        mean: over all samples.
        deciles: 11 floats, from the least to the largest.
        highest: at most 10 samples, the most extreme first; of captions that say the same only one.
        lowest: likewise.
    """

    mean: float
    deciles: list[float]
    highest: list[Sample]
    lowest: list[Sample]


@dataclass(frozen=True)
class Uncertainty:
    """The uncertainty of both modalities: the log-determinant of the covariance, the sum of its log-variances."""

    image: Distribution[UncertainImage]
    text: Distribution[UncertainCaption]


def uncertainty(embedded: Embedded) -> Uncertainty | None:
    """Return the distribution of the uncertainty in a split, by modality; None where embeddings have no Gaussians."""
    images, captions = embedded.image.uncertainty, embedded.text.uncertainty
    if images is None or captions is None:
        return None
    owners = embedded.caption_image.tolist()
    own: list[list[str]] = [[] for _ in embedded.ids]
    first: dict[str, int] = {}  # caption with a text
    for row, (owner, text) in enumerate(zip(owners, embedded.texts, strict=True)):
        own[owner].append(text)
        first.setdefault(text, row)

    def image(row: int, value: float) -> UncertainImage:
        return UncertainImage(embedded.ids[row], embedded.file_names[row], own[row], value)

    def caption(row: int, value: float) -> UncertainCaption:
        return UncertainCaption(embedded.sentids[row], embedded.texts[row], embedded.file_names[owners[row]], value)

    return Uncertainty(
        _distribution(images, list(range(len(images))), image), _distribution(captions, list(first.values()), caption)
    )


def _distribution(values: Tensor, rows: list[int], describe: Callable[[int, float], Sample]) -> Distribution[Sample]:
    """Describe one modality; only the samples in `rows` are shown."""
    values = values.cpu()
    ascending = sorted(rows, key=lambda row: values[row].item())

    def shown(some: list[int]) -> list[Sample]:
        return [describe(row, values[row].item()) for row in some]

    return Distribution(
        values.mean().item(),
        values.quantile(torch.linspace(0, 1, 11, dtype=values.dtype)).tolist(),
        shown(ascending[::-1][:SHOWN]),
        shown(ascending[:SHOWN]),
    )
