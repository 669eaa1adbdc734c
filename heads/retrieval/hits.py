"""The answers of a search: which are the best, and what is told of each."""

from collections.abc import Iterable
from collections.abc import Sequence as Several
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple, Protocol

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
        deviation: of its Gaussian, see `Gaussian.deviation`; None for other embeddings. JSON calls it `uncertainty`.
    """

    rank: int
    id: str
    score: float
    file_name: str | None = None
    caption: str | None = None
    deviation: float | None = None

    def to_dict(self) -> dict[str, Any]:
        """Return what is known, ready for JSON."""
        known = {key: value for key, value in vars(self).items() if value is not None}
        return {"uncertainty" if key == "deviation" else key: value for key, value in known.items()}


class Answer(NamedTuple):
    """A hit before it is ranked among those of other shards.

    Attributes:
        row: in the gallery, or of several shards in all of them.
        score: the similarity.
        id: of the sample.
        label: its image's file name, or its caption.
        deviation: of a Gaussian; None for other embeddings.
    """

    row: int
    score: float
    id: str
    label: str
    deviation: float | None = None


class Texts(Protocol):
    """Texts by row: a list, or the file of an index."""

    def __getitem__(self, row: int, /) -> str:
        """Return the text of a row."""
        ...


def answers_at(rows: Several[int], scores: Several[float], items: Embedding, ids: Texts, labels: Texts) -> list[Answer]:
    """Return answers in the order of their `rows`, each with a score; `items` are the embeddings of these rows."""
    spread = deviation(items)
    spreads = [None] * len(rows) if spread is None else spread.tolist()
    return [
        Answer(row, score, ids[row], labels[row], own) for row, score, own in zip(rows, scores, spreads, strict=True)
    ]


def hits_of(modality: Modality, answers: Iterable[Answer]) -> list[Hit]:
    """Return answers, best first, as hits of a modality."""
    images = modality == "images"
    return [
        Hit(
            rank,
            found.id,
            found.score,
            file_name=found.label if images else None,
            caption=None if images else found.label,
            deviation=found.deviation,
        )
        for rank, found in enumerate(answers, 1)
    ]


def best_rows(scores: Tensor, k: int) -> Tensor:
    """Return the rows of the k largest `scores` [N], best first and equal ones in their order, int64 [min(k, N)]."""
    least = scores.topk(min(k, len(scores))).values[-1]
    rows = (scores >= least).nonzero()[:, 0]
    return rows[scores[rows].argsort(descending=True, stable=True)[:k]]


def deviation(embedding: Embedding) -> Tensor | None:
    """Return the deviation of B Gaussians, `[B]`, see `Gaussian.deviation`; None for other embeddings."""
    return embedding.deviation() if isinstance(embedding, Gaussian) else None
