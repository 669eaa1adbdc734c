"""The index: opened, searched and added to."""

from collections.abc import Iterable
from collections.abc import Sequence as Several
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.torch import load_file
from torch import Tensor

from ....pipeline.cache.lease import locked
from ....pipeline.errors import RunError
from ...modules.embedding import Embedding, Gaussian, Sequence
from ..hits import Answer, answers_at
from .build import QUERIES, IndexReport, add_elements, batches_of, settle
from .candidates import Candidates, Effort
from .exact import Compare, best, scores_of, search_exactly
from .folder import Facts, read_record, require_part, short
from .items import Items, append
from .vectors import Form, vectors

PLACE = ("store", "split")  # facts in which what is added may differ


class Index:
    """An index, opened: its files are mapped into memory, not read.

    Attributes:
        folder: where it is.
        effort: what a search takes; may be replaced.
        recall: of the exact top 10, measured when it was built, with the recorded effort.
        parts: the facts of what was put in, with the number of `samples`, in the order of the rows.
        items: the gallery.
    """

    def __init__(self, folder: Path, record: dict[str, Any]) -> None:
        self.folder = folder
        self._load(record)

    def _load(self, record: dict[str, Any]) -> None:
        self.effort, self.recall = Effort(**record["effort"]), record["recall"]
        self.parts: list[Facts] = record["parts"]
        self.items = Items(self.folder, record["items"])
        self._form: Form = record["form"]
        self._candidates = Candidates.open(self.folder / record["elements"], record["kind"])

    @classmethod
    def open(cls, folder: str | Path, expected: Facts | None = None) -> "Index":
        """Open an index, after reading all its files once to check them.

        Args:
            folder: where it is.
            expected: facts that something in the index must have.

        Raises:
            RunError: it is none, unfinished, damaged, or an index of something else; or FAISS is missing.
        """
        folder = Path(folder)
        record = read_record(folder)
        require_part(folder, record["parts"], expected or {})
        return cls(folder, record)

    def __len__(self) -> int:
        return len(self.items)

    def holds(self, facts: Facts) -> bool:
        """Return whether samples with all these facts are in the index."""
        return any(part == {**part, **facts} for part in self.parts)

    def search(
        self, query: Embedding, k: int, compare: Compare, effort: Effort | None = None
    ) -> tuple[np.ndarray, np.ndarray]:
        """Return the k best samples among the candidates, or all samples where there are fewer.

        Args:
            query: embedding of one sample.
            k: from 1.
            compare: takes Q queries and N samples to ``[Q, N]``.
            effort: in place of the index's own.

        Returns:
            Rows, int64, and scores, float32, best first and equal ones by row.

        Raises:
            RunError: a similarity is not finite.
        """
        rows = self.candidates(query, k, effort)
        return best(rows, scores_of(compare, query, self.items.some(rows))[0], k)

    def answers(self, query: Embedding, k: int, compare: Compare, *, exact: bool = False) -> list[Answer]:
        """Return what `search`, or where `exact` a comparison with every sample finds, with ids and labels."""
        if exact:
            rows, scores = search_exactly(query, self.items, compare, k)[0]
        else:
            rows, scores = self.search(query, k, compare)
        items = self.items
        return answers_at(rows.tolist(), scores.tolist(), items.some(rows), items.ids, items.labels)

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

    def add(
        self,
        embeddings: Embedding | Iterable[Embedding],
        ids: Several[str],
        *,
        compare: Compare,
        facts: Facts,
        labels: Several[str] | None = None,
    ) -> IndexReport:
        """Add samples after those that are there, and choose the effort anew. Stopped, nothing has changed.

        Arguments and result are those of `build_index`.

        Raises:
            RunError: the samples are of another run or modality, are in the index already, or another process adds.
            ValueError: they are of another kind or width.
        """
        with locked(self.folder, RunError(f"another process is adding to {self.folder}; wait until it has ended")):
            record = read_record(self.folder)
            _require_addable(self.folder, record["parts"], facts)
            old, generation = record["elements"], int(record["elements"].split("-")[1].split(".")[0])
            items, files = append(
                self.folder,
                batches_of(embeddings),
                ids,
                ids if labels is None else labels,
                record["items"],
                record["files"],
            )
            gallery = Items(self.folder, items)
            candidates = Candidates.open(self.folder / old, record["kind"], mapped=False)
            add_elements(candidates, gallery, self._form, record["items"]["count"])
            part = {**facts, "samples": items["count"] - record["items"]["count"]}
            del files[old]
            record = {**record, "items": items, "files": files, "parts": [*record["parts"], part]}
            queries = _embedding(load_file(self.folder / QUERIES))
            fixed = Effort(**record["effort"]) if record["fixed_effort"] else None
            report = settle(self.folder, record, gallery, candidates, queries, compare, fixed, generation + 1)
            (self.folder / old).unlink()
            self._load(read_record(self.folder))
        return report


def _require_addable(folder: Path, parts: list[Facts], facts: Facts) -> None:
    model = {key: value for key, value in facts.items() if key not in PLACE}
    require_part(folder, parts, model)
    if any(part == {**part, **facts} for part in parts):
        place = ", ".join(f"{key} {short(facts[key])}" for key in PLACE if key in facts)
        raise RunError(f"{folder} has these samples already ({place}); add another split or store")


def _embedding(named: dict[str, Tensor]) -> Embedding:
    for kind in (Gaussian, Sequence):
        if set(kind._fields) == set(named):
            return kind(**named)
    return named["embedding"]
