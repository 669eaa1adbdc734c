"""A run as MTEB and MIEB see a model, so that their retrieval tasks between texts and images can evaluate it.

It is a `SearchProtocol` of mteb 2, so that every kind of embedding is compared by the run's own similarity; an
`EncoderProtocol` knows vectors only.
"""

from collections.abc import Mapping, Sequence
from operator import itemgetter
from pathlib import Path
from typing import Any

import numpy as np

from ...pipeline.errors import QueryError, require_packages
from ..evaluation.scoring import Modality
from ..modules.embedding import Embedding, concatenate, each
from .gallery import best
from .retriever import Retriever

_BATCH = 256  # rows of a corpus that are decoded, and queries that are scored, together
_ANSWERS: dict[str, Modality] = {"t2i": "images", "i2t": "captions"}  # by the category of a task


class MtebModel:
    """A retriever that answers MTEB's tasks of the categories ``t2i`` and ``i2t``; its own gallery is not used.

    If it corrects hubness, it does so for a corpus, too.

    Results are filed under `name`, ``organization/name``; None: ``xret/`` and the run's folder. RunError where mteb is
    not installed.
    """

    def __init__(self, retriever: Retriever, name: str | None = None) -> None:
        self.retriever = retriever
        self.mteb_model_meta = _meta(retriever, name or f"xret/{Path(retriever.name).resolve().name}")
        self._ids: list[str] = []
        self._items: Embedding | None = None

    def index(self, corpus: Any, *, task_metadata: Any, **_: Any) -> None:
        """Embed a corpus: a `datasets.Dataset` with `id`, and `image` or `text`, and perhaps `title`.

        QueryError where the task is not one between texts and images.
        """
        self._ids = list(corpus["id"])
        self._items = self._encode(corpus, images=_answers(task_metadata) == "images")

    def search(
        self,
        queries: Any,
        *,
        task_metadata: Any,
        top_k: int,
        top_ranked: Mapping[str, Sequence[str]] | None = None,
        **_: Any,
    ) -> dict[str, dict[str, float]]:
        """Return for each query the scores of its `top_k` best documents of the corpus, by their ids.

        `queries` is a `datasets.Dataset` with `id`, and `text` or `image`; `top_ranked` has the only documents that are
        looked at for each query.
        """
        assert self._items is not None, "mteb gives the corpus first"
        answers, ids, retriever = _answers(task_metadata), list(queries["id"]), self.retriever
        compare, row_of = retriever.comparison(answers), {name: row for row, name in enumerate(self._ids)}
        bias = retriever.bias_of(answers, self._items).cpu().numpy()
        embedded, results = self._encode(queries, images=answers == "captions"), {}
        for first in range(0, len(ids), _BATCH):
            some = slice(first, first + _BATCH)
            compared = compare(each(itemgetter(some), embedded), self._items).cpu().numpy() + bias
            for query, scores in zip(ids[some], compared, strict=True):
                names = self._ids if top_ranked is None else top_ranked[query]
                rows = np.array([row_of[name] for name in names], np.int64)
                rows, scores = best(rows, scores[rows], top_k)
                results[query] = {self._ids[row]: float(score) for row, score in zip(rows, scores, strict=True)}
        return results

    def _encode(self, rows: Any, images: bool) -> Embedding:
        parts = []
        for first in range(0, len(rows), _BATCH):
            some = rows[first : first + _BATCH]
            if images:
                parts.append(self.retriever.encode_images(some["image"]))
            else:
                titles = some.get("title") or [""] * len(some["text"])
                texts = [f"{title or ''} {text}".strip() for title, text in zip(titles, some["text"], strict=True)]
                parts.append(self.retriever.encode_text(texts, warn=False))
        return concatenate(parts)


def _answers(task_metadata: Any) -> Modality:
    if task_metadata.category not in _ANSWERS:
        raise QueryError(
            f"{task_metadata.name} is of the category {task_metadata.category}, and a run of xret compares texts with"
            " images; take tasks of t2i and i2t"
        )
    return _ANSWERS[task_metadata.category]


def _meta(retriever: Retriever, name: str) -> Any:
    require_packages("this model needs", {"mteb": "mteb"}, "mteb")
    from mteb.models import ModelMeta

    run, model, more = retriever.run, retriever.model, dict[str, Any]()
    if run is not None:
        if model.compare.embedding != "joint":
            branches: Any = getattr(
                model.image, "branches", [model.image]
            )  # of an average, whose vectors lie side by side
            both = zip(run.members or [run], (branch.residual for branch in branches), strict=True)
            more["embed_dim"] = sum(
                head.recipe.model.dim if residual is None else residual.layer.out_features for head, residual in both
            )
        more["n_parameters"] = sum(weight.numel() for weight in model.parameters())
    facts = {"name": name, "modalities": ["text", "image"], "framework": ["PyTorch"], "revision": retriever.digest[:40]}
    return ModelMeta.create_empty(facts | more)
