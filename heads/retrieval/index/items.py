"""The gallery of an index on disk: every embedding as it is, memory-mapped, with its id and its label."""

from collections.abc import Iterable, Iterator
from collections.abc import Sequence as Several
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.nn.utils.rnn import pad_sequence

from ...modules.embedding import Embedding, Gaussian, Sequence, kind_of, tensors_of
from ...modules.padding import valid_rows
from .folder import Facts, GrowingFile


class Items:
    """N embeddings, mapped from the files of an index.

    Args:
        folder: of the index.
        record: what `append` gave.

    Attributes:
        ids, labels: of the samples, by row; labels are file names of images, or captions.
    """

    def __init__(self, folder: Path, record: dict[str, Any]) -> None:
        self._kind: str = record["kind"]
        self._count: int = record["count"]
        self._arrays = {name: _mapped(folder / f"{name}.bin", shape) for name, shape in record["shapes"].items()}
        self.ids, self.labels = _Texts(folder, "id", self._count), _Texts(folder, "label", self._count)
        # Where the elements of each sample of a sequence begin; of other kinds it follows from the shape.
        self._starts = None
        if self._kind == "sequence":
            length = np.fromfile(folder / "length.bin", np.int64, self._count)
            self._starts = np.concatenate([[0], np.cumsum(length)])

    def __len__(self) -> int:
        return self._count

    @property
    def elements(self) -> int:
        """How many elements all samples have together."""
        if self._starts is not None:
            return int(self._starts[-1])
        return self._count * self.size

    @property
    def size(self) -> int:
        """How many elements a sample has, on average and at least one."""
        if self._starts is not None:
            return max(1, round(self.elements / max(1, self._count)))
        return self._arrays["embedding"].shape[1] if self._kind == "set" else 1

    @property
    def width(self) -> int:
        """How many numbers an element has."""
        return sum(array.shape[-1] for array in self._arrays.values())

    def owners(self, elements: np.ndarray) -> np.ndarray:
        """Return the samples that `elements` (numbers of elements, int64) belong to."""
        if self._starts is not None:
            return np.searchsorted(self._starts, elements, side="right") - 1
        return elements // self.size

    def some(self, rows: np.ndarray | slice) -> Embedding:
        """Return the embeddings in these rows, read from the disk or the system's cache."""
        if self._starts is not None:
            rows = np.arange(self._count)[rows]
            parts = [torch.from_numpy(self._arrays["rows"][self._starts[r] : self._starts[r + 1]].copy()) for r in rows]
            length = torch.tensor([len(part) for part in parts])
            return Sequence(pad_sequence(parts, batch_first=True), length)
        found = [torch.from_numpy(np.array(array[rows])) for array in self._arrays.values()]
        return Gaussian(*found) if self._kind == "gaussian" else found[0]

    def blocks(self, size: int, first: int = 0) -> Iterator[tuple[int, Embedding]]:
        """Yield all embeddings from row `first` on, `size` at a time, each block with its first row."""
        for begin in range(first, self._count, size):
            yield begin, self.some(slice(begin, begin + size))


def append(
    folder: Path,
    batches: Iterable[Embedding],
    ids: Several[str],
    labels: Several[str],
    facts: Facts,
    record: dict[str, Any] | None = None,
) -> dict[str, Any]:
    """Write embeddings, batch by batch, after those that are there.

    Args:
        folder: of the index.
        batches: embeddings of one kind.
        ids: of all of them.
        labels: of all of them, file names or captions.
        facts: what they depend on, of a `store` and a `split`; an index is only opened for the same.
        record: of the index; None where there is nothing yet.

    Returns:
        What of the record changes: `items`, by which `Items` reads them, `files` and `parts`.

    Raises:
        ValueError: the embeddings are of another kind or shape than those there, or not as many as ids and labels.
    """
    record = record or {"items": {"kind": "", "count": 0, "shapes": {}}, "files": {}, "parts": []}
    kind, before, shapes = (record["items"][key] for key in ("kind", "count", "shapes"))
    entries: dict[str, dict[str, int]] = record["files"]
    files: dict[str, GrowingFile] = {}

    def write(name: str, values: np.ndarray) -> None:
        if name not in files:
            files[name] = GrowingFile(folder / f"{name}.bin", entries.get(f"{name}.bin"))
        files[name].write(values)

    count = 0
    try:
        for batch in batches:
            arrays, length = _arrays(batch)
            grown = {name: [shapes.get(name, [0])[0] + len(a), *a.shape[1:]] for name, a in arrays.items()}
            if kind and (kind_of(batch) != kind or any(grown[name][1:] != shapes[name][1:] for name in shapes)):
                raise ValueError(f"{kind_of(batch)} embeddings {grown} do not fit {kind} embeddings {shapes}")
            kind, shapes, count = kind_of(batch), grown, count + len(length)
            for name, values in arrays.items():
                write(name, values)
            if kind == "sequence":
                write("length", length)
        if not count == len(ids) == len(labels):
            raise ValueError(f"there are {count:,} embeddings, {len(ids):,} ids and {len(labels):,} labels")
        for name, texts in (("id", ids), ("label", labels)):
            encoded = [text.encode() for text in texts]
            begin = entries.get(f"{name}.bin", {"bytes": 0})["bytes"]
            write(f"{name}-end", begin + np.cumsum([len(text) for text in encoded], dtype=np.int64))
            write(name, np.frombuffer(b"".join(encoded), np.uint8))
    finally:
        closed = {f"{name}.bin": file.close() for name, file in files.items()}
    return {
        "items": {"kind": kind, "count": before + count, "shapes": shapes},
        "files": {**entries, **closed},
        "parts": [*record["parts"], {**facts, "samples": count}],
    }


class _Texts:
    """N texts as UTF-8 bytes with their ends."""

    def __init__(self, folder: Path, name: str, count: int) -> None:
        self._end = _mapped(folder / f"{name}-end.bin", [count], np.int64)
        self._text = _mapped(folder / f"{name}.bin", [int(self._end[-1]) if count else 0], np.uint8)

    def __getitem__(self, row: int) -> str:
        begin = self._end[row - 1] if row else 0
        return self._text[begin : self._end[row]].tobytes().decode()


def _mapped(path: Path, shape: list[int], dtype: Any = np.float32) -> np.ndarray:
    if not np.prod(shape):
        return np.empty(shape, dtype)  # an empty file cannot be mapped
    return np.memmap(path, dtype, "r", shape=tuple(shape))


def _arrays(embedding: Embedding) -> tuple[dict[str, np.ndarray], np.ndarray]:
    """Return what is written of a batch, and how many rows each sample has."""
    if isinstance(embedding, Sequence):
        return {"rows": _numpy(embedding.rows[valid_rows(*embedding)])}, embedding.length.cpu().numpy().astype(np.int64)
    arrays = {name: _numpy(tensor) for name, tensor in tensors_of(embedding).items()}
    return arrays, np.ones(len(next(iter(arrays.values()))), np.int64)


def _numpy(tensor: torch.Tensor) -> np.ndarray:
    return tensor.detach().float().cpu().numpy()
