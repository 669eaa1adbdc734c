"""How uncertain a run with Gaussian embeddings is of each image and caption.

Source: *Uncertainty-based Cross-Modal Retrieval with Probabilistic Representations*, section 3.3 and Figures 4-7.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Generic, TypeVar

import torch
from torch import Tensor

from ...evaluation.scoring import Scores

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


def uncertainty(scores: Scores, images: Tensor | None, captions: Tensor | None) -> Uncertainty | None:
    """Return the distribution of the uncertainty in a split, by modality; None where embeddings have no Gaussians.

    Args:
        scores: of the split.
        images: the uncertainty of each image, ``[I]``.
        captions: that of each caption, ``[C]``.
    """
    if images is None or captions is None:
        return None
    owners = scores.caption_image.tolist()
    own: list[list[str]] = [[] for _ in scores.ids]
    first: dict[str, int] = {}  # caption with a text
    for row, (owner, text) in enumerate(zip(owners, scores.texts, strict=True)):
        own[owner].append(text)
        first.setdefault(text, row)

    def image(row: int, value: float) -> UncertainImage:
        return UncertainImage(scores.ids[row], scores.file_names[row], own[row], value)

    def caption(row: int, value: float) -> UncertainCaption:
        return UncertainCaption(int(scores.sentid[row]), scores.texts[row], scores.file_names[owners[row]], value)

    return Uncertainty(
        _distribution(images, list(range(len(images))), image), _distribution(captions, list(first.values()), caption)
    )


def _distribution(values: Tensor, rows: list[int], describe: Callable[[int, float], Sample]) -> Distribution[Sample]:
    """Describe one modality; only the samples in `rows` are shown."""
    values = values.cpu()
    ascending = sorted(rows, key=lambda row: values[row].item())
    lowest, highest = (
        [describe(row, values[row].item()) for row in some] for some in (ascending[:SHOWN], ascending[::-1][:SHOWN])
    )
    deciles = values.quantile(torch.linspace(0, 1, 11, dtype=values.dtype)).tolist()
    return Distribution(values.mean().item(), deciles, highest, lowest)
