"""The index, opened and searched."""

from pathlib import Path

import numpy as np

from ...modules.embedding import Embedding
from ..hits import Hit, best, hits_of
from .candidates import Candidates, Effort
from .exact import Compare, scores_of
from .folder import Facts, read_record, require_part
from .items import Items
from .vectors import Form, vectors


class Index:
    """An index, opened: all its files are read once to check them, then mapped into memory.

    Args:
        folder: where it is.
        expected: facts that something in the index must have.

    Attributes:
        effort: what a search takes.
        recall: of the exact top 10, measured when it was built, with this effort.
        parts: the facts of what was put in, with the number of `samples`, in the order of the rows.
        items: the gallery.

    Raises:
        RunError: there is none; or it is unfinished, damaged, or of something else; or FAISS is missing.
    """

    def __init__(self, folder: str | Path, expected: Facts | None = None) -> None:
        folder = Path(folder)
        record = read_record(folder)
        self.parts: list[Facts] = record["parts"]
        require_part(folder, self.parts, expected or {})
        self.effort, self.recall = Effort(**record["effort"]), record["recall"]
        self.items = Items(folder, record["items"])
        self._form: Form = record["form"]
        self._candidates = Candidates.open(folder / record["elements"], record["kind"])

    def __len__(self) -> int:
        return len(self.items)

    def search(
        self, query: Embedding, k: int, compare: Compare, effort: Effort | None = None
    ) -> tuple[np.ndarray, np.ndarray]:
        """Return the rows and scores of the k best samples among the candidates, or of all where there are fewer.

        Args:
            query: embedding of one sample.
            k: from 1.
            compare: takes Q queries and N samples to ``[Q, N]``.
            effort: in place of the index's own.

        Raises:
            RunError: a similarity is not finite.
        """
        rows = self.candidates(query, k, effort)
        return best(rows, scores_of(compare, query, self.items.some(rows))[0], k)

    def hits(self, query: Embedding, k: int, compare: Compare) -> list[Hit]:
        """Return what `search` finds as hits."""
        rows, scores = self.search(query, k, compare)
        ids, labels = ([texts[row] for row in rows] for texts in (self.items.ids, self.items.labels))
        return hits_of(self.parts[0]["modality"], ids, labels, scores, self.items.some(rows))

    def candidates(self, query: Embedding, k: int = 1, effort: Effort | None = None) -> np.ndarray:
        """Return the rows, sorted, that one query is compared with: at least k, where so many have any element."""
        looked_for = vectors(self._form, query, query=True)
        if not len(looked_for):
            return np.arange(min(k, len(self)))  # nothing to tell the samples apart by
        effort = effort or self.effort
        probes, depth = effort.probes, max(effort.candidates, k)
        while True:
            found = self._candidates.search(looked_for, Effort(probes, depth))
            rows = np.unique(self.items.owners(found[found >= 0]))
            everything = depth >= len(self._candidates) and probes >= self._candidates.most_probes
            if len(rows) >= min(k, len(self)) or everything:
                return rows
            probes, depth = 2 * probes, 2 * depth
