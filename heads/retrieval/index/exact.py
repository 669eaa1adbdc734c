"""Exact search, one block of the gallery after the other."""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor, nn

from ....pipeline.device import within_memory
from ....pipeline.errors import RunError
from ...modules.embedding import Embedding, each
from ...modules.similarity import in_blocks
from ..hits import Modality, best
from .items import Items

# Takes Q queries and N items to their similarities [Q, N], whichever of them are the images.
Compare = Callable[[Embedding, Embedding], Tensor]
CELLS = 1 << 22  # pairs of elements compared in one go: 16 MiB a temporary, which stays at hand
VALUES = 1 << 22  # numbers of the gallery read in one go


@dataclass(frozen=True)
class RunCompare:
    """Compares queries with the samples of one modality by a run's similarity. It can travel to a Dask worker.

    Attributes:
        similarity: of I images and C captions, ``[I, C]``.
        answers: what is searched, ``images`` or ``captions``.
        device: where it is computed.
    """

    similarity: nn.Module
    answers: Modality
    device: str = "cpu"

    def __call__(self, queries: Embedding, items: Embedding) -> Tensor:
        """Return the similarities ``[Q, N]`` of Q queries and N items."""
        queries, items = (each(lambda t: t.to(self.device), some) for some in (queries, items))
        with within_memory(torch.device(self.device)):
            if self.answers == "captions":
                return in_blocks(self.similarity, queries, items)
            return in_blocks(self.similarity, items, queries).T


@torch.no_grad()
def scores_of(compare: Compare, queries: Embedding, items: Embedding) -> np.ndarray:
    """Return the similarities of Q queries and N items, float32 ``[Q, N]``.

    Raises:
        RunError: one is not finite.
    """
    scores = compare(queries, items).float().cpu().numpy()
    if not np.isfinite(scores).all():
        raise RunError("the model gives similarities that are not finite: its weights are damaged, train it again")
    return scores


def search_exactly(queries: Embedding, items: Items, compare: Compare, k: int) -> list[tuple[np.ndarray, np.ndarray]]:
    """Compare Q queries with every item; return for each query the rows and scores of its k best answers."""
    count = len(queries if isinstance(queries, Tensor) else queries[0])
    found = [(np.empty(0, np.int64), np.empty(0, np.float32)) for _ in range(count)]
    step = max(1, min(CELLS // (max(1, count) * items.size**2), VALUES // (items.size * items.width)))
    for first, block in items.blocks(step):
        scores = scores_of(compare, queries, block)
        rows = np.arange(first, first + scores.shape[1])
        for query, (old_rows, old_scores) in enumerate(found):
            new_rows, new_scores = best(rows, scores[query], k)
            both = np.concatenate([old_rows, new_rows]), np.concatenate([old_scores, new_scores])
            found[query] = best(*both, k)
    return found
