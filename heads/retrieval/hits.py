"""The answers of a search: which are the best, and what is told of each."""

from dataclasses import dataclass
from typing import Any, Literal

from torch import Tensor

from ..modules.embedding import Embedding, Gaussian

Modality = Literal["images", "captions"]


@dataclass(frozen=True)
class Hit:
    """One result of a search.

    Attributes:
        rank: from 1.
        id: of the image, or the caption's number.
        score: the run's similarity; larger is closer.
        file_name: of an image, below the image folder; None for a caption.
        caption: the text; None for an image.
        uncertainty: of its Gaussian, see `uncertainty`; None for other embeddings.
    """

    rank: int
    id: str
    score: float
    file_name: str | None = None
    caption: str | None = None
    uncertainty: float | None = None

    def to_dict(self) -> dict[str, Any]:
        """Return what is known, ready for JSON."""
        return {key: value for key, value in vars(self).items() if value is not None}


def hit_of(answers: Modality, rank: int, id_: str, label: str, score: float, uncertain: float | None) -> Hit:
    """Return a hit; its label is an image's file name or a caption's text."""
    if answers == "images":
        return Hit(rank, id_, score, file_name=label, uncertainty=uncertain)
    return Hit(rank, id_, score, caption=label, uncertainty=uncertain)


def best_rows(scores: Tensor, k: int) -> Tensor:
    """Return the rows of the k largest `scores` [N], best first and equal ones in their order, int64 [min(k, N)]."""
    least = scores.topk(min(k, len(scores))).values[-1]
    rows = (scores >= least).nonzero()[:, 0]
    return rows[scores[rows].argsort(descending=True, stable=True)[:k]]


def uncertainty(embedding: Embedding) -> Tensor | None:
    """Return how uncertain B Gaussians are, [B]: the geometric mean of their standard deviations.

    PCME (Chun et al., CVPR 2021) measures a sample's uncertainty so. None for embeddings that are no Gaussians.
    """
    if not isinstance(embedding, Gaussian):
        return None
    return embedding.log_variance.mean(1).div(2).exp()
