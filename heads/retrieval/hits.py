"""The answers of a search: which are best, and what is known of each."""

from collections.abc import Sequence as Several
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
from torch import Tensor

from ...pipeline.errors import RunError
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
        uncertainty: of its Gaussian, see `Gaussian.log_determinant`; None for other embeddings.
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


def hits_of(
    modality: Modality, ids: Several[str], labels: Several[str], scores: np.ndarray, items: Embedding
) -> list[Hit]:
    """Return N samples, best first, as hits; `labels` are file names or captions, `items` the embeddings."""
    field, spread = "file_name" if modality == "images" else "caption", uncertainty(items)
    spreads = [None] * len(ids) if spread is None else spread.tolist()
    rows = enumerate(zip(ids, scores.tolist(), labels, spreads, strict=True), 1)
    return [Hit(rank, id_, score, uncertainty=one, **{field: label}) for rank, (id_, score, label, one) in rows]


def best(rows: np.ndarray, scores: np.ndarray, k: int) -> tuple[np.ndarray, np.ndarray]:
    """Return the k highest of `scores` [N] and their `rows` [N], best first, ties by row; all where N < k.

    Raises:
        RunError: a score is not finite.
    """
    if not np.isfinite(scores).all():
        raise RunError("the model gives similarities that are not finite: its weights are damaged, train it again")
    if len(scores) > k:
        kept = scores >= np.partition(scores, -k)[-k]
        rows, scores = rows[kept], scores[kept]
    order = np.lexsort((rows, -scores))[:k]
    return rows[order], scores[order]


def uncertainty(embedding: Embedding) -> Tensor | None:
    """Return the uncertainty of B Gaussians, [B], see `Gaussian.log_determinant`; None for other embeddings."""
    return embedding.log_determinant() if isinstance(embedding, Gaussian) else None
