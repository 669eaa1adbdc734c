"""Search in large galleries: FAISS proposes candidates, and the run's own similarity ranks them exactly.

Every sample becomes one vector or, of sets and sequences, one for each element. FAISS finds the elements nearest to
those of a query; their samples are compared with the query, from embeddings that are mapped from the disk.

    index.json             what was indexed, and how
    images/, captions/     elements.faiss, and the embeddings by the names of `tensors_of`, float32; of sequences the
                           rows one after another, and the lengths, int64; and, where hubness is corrected, the
                           `bias` that is added to the score of each sample, float32. Embeddings that were made smaller,
                           see `smaller`, may be int8, and `rotation.npy` turns queries as they were turned
"""

import json
import math
from collections.abc import Callable, Iterable, Iterator
from operator import itemgetter
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional
from torch.nn.utils.rnn import pad_sequence

from ...pipeline.errors import RunError, require_packages
from ..evaluation.scoring import Modality
from ..modules.embedding import Embedding, Sequence, each, embedding_of, kind_of, shape_of, tensors_of
from ..modules.padding import valid_rows
from ..modules.similarity import Similarity
from .gallery import best
from .smaller import made_smaller

# Takes Q queries and N items to their similarities [Q, N], whichever of them are the images.
Compare = Callable[[Embedding, Embedding], Tensor]

RECORD = "index.json"
K = 10  # the recall is that of the exact top 10
DEPTH, MOST_EFFORT = 16, 1024  # elements fetched for an element of the query at effort 1; the largest effort tried
WIDTH = 128  # principal components by which candidates are looked up: their order is the similarity's in the end
PER_LIST = 39  # elements that FAISS wants to train a list from
SMALL = 10_000  # elements that are looked through one after another
CELLS, VALUES = 1 << 22, 1 << 22  # pairs of elements compared, and numbers read, in one go: 16 MiB


class Items:
    """N embeddings of one modality, mapped from a folder: of `elements`, `size` in a sample (of sequences the mean)."""

    def __init__(self, folder: Path, facts: dict[str, Any]) -> None:
        shapes, dtype = facts["shapes"].items(), facts["dtype"]
        self._arrays = {name: np.memmap(folder / name, dtype, "c").reshape(-1, *shape) for name, shape in shapes}
        first = next(iter(self._arrays.values()))
        self._starts, self._count, self.size = None, len(first), first.shape[1] if first.ndim == 3 else 1
        self.bias = np.fromfile(folder / "bias", np.float32) if (folder / "bias").exists() else None
        self.elements = self._count * self.size
        if facts["kind"] == "sequence":
            self._starts = np.concatenate([[0], np.cumsum(np.fromfile(folder / "length", np.int64))])
            self._count, self.elements = len(self._starts) - 1, len(first)
            self.size = max(1, round(self.elements / self._count))
        self.numbers = self.size * sum(array.shape[-1] for array in self._arrays.values())  # of a sample

    def __len__(self) -> int:
        return self._count

    @staticmethod
    def write(folder: Path, batches: Iterable[Embedding]) -> dict[str, Any]:
        """Write embeddings batch by batch into a new folder; return the facts that `Items` needs."""
        folder.mkdir(parents=True, exist_ok=True)
        facts: dict[str, Any] = {}
        for batch in batches:
            tensors = tensors_of(each(lambda t: t.detach().cpu(), batch))
            if isinstance(batch, Sequence):
                length = tensors["length"]
                tensors = {"rows": tensors["rows"][valid_rows(tensors["rows"], length)]}
                with (folder / "length").open("ab") as file:
                    file.write(length.numpy().astype(np.int64).tobytes())
            bytes_ = all(tensor.dtype == torch.int8 for tensor in tensors.values())
            for name, tensor in tensors.items():
                with (folder / name).open("ab") as file:
                    file.write((tensor if bytes_ else tensor.float()).contiguous().numpy().data)
            facts = {"kind": kind_of(batch), "shapes": {name: list(t.shape[1:]) for name, t in tensors.items()}}
            facts["dtype"] = "int8" if bytes_ else "float32"
        return facts

    def owners(self, elements: np.ndarray) -> np.ndarray:
        """Return the samples that these elements, by their numbers, belong to."""
        if self._starts is not None:
            return np.searchsorted(self._starts, elements, side="right") - 1
        return elements // self.size

    def __getitem__(self, rows: np.ndarray | slice) -> Embedding:
        """Return the embeddings in some rows."""
        if self._starts is not None:
            numbers = np.arange(self._count)[rows]
            parts = [torch.from_numpy(self._arrays["rows"][self._starts[r] : self._starts[r + 1]]) for r in numbers]
            return Sequence(pad_sequence(parts, batch_first=True), torch.tensor([len(part) for part in parts]))
        return embedding_of({name: torch.from_numpy(array[rows]).float() for name, array in self._arrays.items()})

    def arrays(self) -> Iterator[dict[str, np.ndarray]]:
        """Yield what the files hold, in blocks; sequences are padded to the longest of all."""
        longest = 0 if self._starts is None else int(np.diff(self._starts).max())
        for first, block in self.blocks():
            rows = slice(first, first + shape_of(block)[0])
            arrays = {name: array[rows] for name, array in self._arrays.items()}
            if isinstance(block, Sequence):
                padded = functional.pad(block.rows, (0, 0, 0, longest - block.rows.shape[1]))
                arrays = {"rows": padded.numpy(), "length": block.length.numpy()}
            yield arrays if self.bias is None else {**arrays, "bias": self.bias[rows]}

    def biased(self, scores: np.ndarray, rows: np.ndarray | slice) -> np.ndarray:
        """Return the scores of the samples in some rows with their biases, if there are any."""
        return scores if self.bias is None else scores + self.bias[rows]

    def vectors(self, similarity: Similarity, embedding: Embedding, rows: np.ndarray | slice) -> np.ndarray:
        """Return `vectors` of the samples in some rows, float32 [T, W].

        With biases b another coordinate makes a squared distance larger by 2 (max b - b), and a cosine, which is 1 less
        half of it, smaller by max b - b.
        """
        found = vectors(similarity, embedding)
        if self.bias is None:
            return found
        own = np.sqrt(2 * (self.bias.max() - self.bias))[rows]
        if isinstance(embedding, Sequence):
            own = np.repeat(own, embedding.length.numpy())
        return beside(found, np.repeat(own, len(found) // len(own)))

    def blocks(self, queries: int = 1) -> Iterator[tuple[int, Embedding]]:
        """Yield all embeddings with their first rows, in blocks for the comparison with some queries."""
        step = max(1, min(CELLS // (queries * self.size**2), VALUES // self.numbers))
        return ((first, self[first : first + step]) for first in range(0, len(self), step))


def vectors(similarity: Similarity, embedding: Embedding, *, query: bool = False) -> np.ndarray:
    """Return the vectors that stand for samples in FAISS, float32 [T, W]: all elements of the first, and so on.

    They are the similarity's `points`. W is filled up to a multiple of 8.
    """
    rows = similarity.points(embedding, query=query)
    return functional.pad(rows.detach().cpu().float(), (0, -rows.shape[1] % 8)).numpy()


def beside(rows: np.ndarray, more: np.ndarray) -> np.ndarray:
    """Return `rows` [T, W] with `more` [T] as another coordinate, filled up to a multiple of 8."""
    return np.concatenate([rows, more[:, None], np.zeros((len(rows), 7))], axis=1, dtype=np.float32)


@torch.no_grad()
def search_exactly(queries: Embedding, items: Items, compare: Compare, k: int) -> list[tuple[np.ndarray, np.ndarray]]:
    """Compare Q queries with every item; return the rows and scores of each query's k best answers."""
    count = shape_of(queries)[0]
    found = [(np.empty(0, np.int64), np.empty(0, np.float32))] * count
    for first, block in items.blocks(count):
        for query, scores in enumerate(compare(queries, block).float().cpu().numpy()):
            rows = np.arange(first, first + len(scores))
            (old, old_scores), (new, new_scores) = found[query], best(rows, items.biased(scores, rows), k)
            found[query] = best(np.concatenate([old, new]), np.concatenate([old_scores, new_scores]), k)
    return found


class Index:
    """One modality of an index, opened for searching; `facts` are those that `build` returned."""

    def __init__(self, folder: Path, facts: dict[str, Any], similarity: Similarity) -> None:
        faiss, self._similarity, self._factory = load_faiss(), similarity, facts["factory"]
        try:
            self.items, turn = Items(folder, facts), folder / "rotation.npy"
            self._turn = torch.from_numpy(np.load(turn)) if turn.exists() else None
            mapped = faiss.IO_FLAG_MMAP if "IVF" in self._factory else faiss.IO_FLAG_MMAP_IFC
            self._faiss = faiss.read_index(str(folder / "elements.faiss"), mapped)
        except (OSError, ValueError, KeyError, RuntimeError) as error:
            raise RunError(f"{folder} is damaged; build the index again with `xret index RUN --out …`") from error
        self.set_effort(facts["effort"], facts.get("depth"))  # indexes from before have no depth

    def set_effort(self, effort: int, depth: int | None = None) -> None:
        """Choose how many lists to look through (or efSearch / 16), and elements to fetch; None: 16 for each list."""
        self._depth, parameters = depth or DEPTH * effort, load_faiss().ParameterSpace()
        if "IVF" in self._factory:
            parameters.set_index_parameter(self._faiss, "nprobe", effort)
        elif "HNSW" in self._factory:
            parameters.set_index_parameter(self._faiss, "efSearch", DEPTH * effort)

    def candidates(self, query: Embedding, k: int = 1) -> np.ndarray:
        """Return the rows, sorted, that one query is compared with."""
        depth = min(max(math.ceil(self._depth * k / K), self._depth, k * self.items.size), self.items.elements)
        looked_for = vectors(self._similarity, query, query=True)
        if self.items.bias is not None:
            looked_for = beside(looked_for, np.zeros(len(looked_for)))
        found = self._faiss.search(looked_for, depth)[1] if len(looked_for) else np.empty(0, np.int64)
        return np.unique(self.items.owners(found[found >= 0]))

    @torch.no_grad()
    def search(self, query: Embedding, k: int, compare: Compare) -> tuple[np.ndarray, np.ndarray]:
        """Return the rows and scores of one query's k best candidates; too few of them, and all samples are ranked."""
        query = query if self._turn is None else made_smaller(query, self._turn)
        rows = self.candidates(query, k)
        if len(rows) < min(k, len(self.items)):
            return search_exactly(query, self.items, compare, k)[0]
        scores = compare(query, self.items[rows])[0].float().cpu().numpy()
        return best(rows, self.items.biased(scores, rows), k)


def build(
    folder: Path,
    facts: dict[str, Any],
    queries: Embedding,
    compare: Compare,
    similarity: Similarity,
    *,
    factory: str | None = None,
    recall: float = 0.99,
) -> dict[str, Any]:
    """Build FAISS's index over what `Items.write` put into `folder`, and add to the `facts` that it returned.

    The smallest effort, and with it the fewest elements to fetch, are chosen that find the wanted `recall` of the exact
    top 10 of `queries`, embeddings of the other modality. The `factory` is for `faiss.index_factory`; None: inverted
    lists of `WIDTH` principal components of the elements, a byte each, or flat if there are few. RunError where FAISS
    is missing, or cannot build this.
    """
    faiss, items, rng = load_faiss(), Items(folder, facts), np.random.default_rng(0)
    lists = max(1, min(round(4 * math.sqrt(items.elements)), items.elements // PER_LIST))
    share = min(1.0, max(PER_LIST * lists, 1 << 16) / items.elements)
    drawn = np.sort(rng.permutation(len(items))[: math.ceil(share * len(items))])
    parts = np.array_split(drawn, -(-len(drawn) * items.numbers // VALUES))  # a sample of gigabytes is held but once
    sample = np.concatenate([items.vectors(similarity, items[some], some) for some in parts])
    narrowed = f"PCA{WIDTH}," if sample.shape[1] > WIDTH else ""
    factory = factory or ("Flat" if items.elements < SMALL else f"{narrowed}IVF{lists},SQ8")
    try:
        index = faiss.index_factory(sample.shape[1], factory)
        index.train(sample)
        for first, block in items.blocks():
            rows = slice(first, first + shape_of(block)[0])
            index.add(items.vectors(similarity, block, rows))
    except RuntimeError as error:
        reason = str(error).rpartition(": ")[2]
        raise RunError(f"FAISS cannot build '{factory}' of {items.elements:,} elements: {reason}") from error
    with (folder / "elements.faiss").open("wb") as file:  # FAISS's own writer does not raise where the disk is full
        faiss.write_index(index, faiss.PyCallbackIOWriter(file.write, 1 << 20))
    size = sum(file.stat().st_size for file in folder.iterdir())
    facts |= {"factory": factory, "effort": 1, "samples": len(items), "elements": items.elements, "bytes": size}
    facts |= _find_effort(Index(folder, facts, similarity), queries, compare, recall)
    return facts


def _find_effort(index: Index, queries: Embedding, compare: Compare, recall: float) -> dict[str, Any]:
    exact, single = search_exactly(queries, index.items, compare, K), one_by_one(queries)

    def try_out(effort: int, depth: int) -> float:
        index.set_effort(effort, depth)
        return share_found((index.candidates(query, K) for query in single), exact)

    efforts = [1 << power for power in range(MOST_EFFORT.bit_length())]
    for effort in efforts:
        depth, reached = DEPTH * effort, try_out(effort, DEPTH * effort)
        if reached >= recall or depth >= index.items.elements:
            break
    for less in (DEPTH * fewer for fewer in efforts if fewer < effort):
        if (enough := try_out(effort, less)) >= min(recall, reached):
            depth, reached = less, enough
            break
    return {"effort": effort, "depth": depth, "recall": reached}


def one_by_one(queries: Embedding) -> list[Embedding]:
    """Return Q embeddings as Q batches of one."""
    return [each(itemgetter(slice(row, row + 1)), queries) for row in range(shape_of(queries)[0])]


def share_found(found: Iterable[np.ndarray], exact: Iterable[tuple[np.ndarray, np.ndarray]]) -> float:
    """Return how much of what `search_exactly` gave is in the rows that were found, a mean over the queries."""
    pairs = zip(found, exact, strict=True)
    return float(np.mean([len(np.intersect1d(some, rows)) / len(rows) for some, (rows, _) in pairs]))


def open_index(folder: Path, modality: Modality, facts: dict[str, Any], similarity: Similarity) -> Index:
    """Open an index for searching; RunError where there is none, or its record has other `facts`."""
    try:
        # Indexes from before do not say of which pictures they are.
        record: dict[str, Any] = {"pictures": facts["pictures"], **json.loads((folder / RECORD).read_text())}
    except (OSError, ValueError) as error:
        raise RunError(f"{folder} is not an index; make one with `xret index RUN --out …`") from error
    differing = [name for name, value in facts.items() if record.get(name) != value]
    if "split" in differing and record.get("store") == facts["store"]:
        split = record.get("split")
        choice = f"choose it with --split {split}" if split else "leave --split out"
        raise RunError(f"{folder} is an index of {f'split {split!r}' if split else 'all pictures'}; {choice}")
    if differing:
        raise RunError(
            f"{folder} is an index of something else ({' and '.join(differing)} differ); name what it was built from,"
            " or build another with `xret index RUN --out …`"
        )
    return Index(folder / modality, record[modality], similarity)


def load_faiss() -> Any:
    """Return the module faiss; RunError where it is not installed."""
    require_packages("an index needs", {"FAISS": "faiss"}, "index")
    import faiss

    return faiss
