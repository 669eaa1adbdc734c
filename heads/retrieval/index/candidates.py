"""Candidates by FAISS: the elements of a gallery that are nearest to those of a query.

Sources: inverted files and product quantisation (Jegou, Douze, Schmid, *Product Quantization for Nearest Neighbor
Search*, TPAMI 2011); HNSW (Malkov and Yashunin, TPAMI 2018). Elements are kept as bytes (`ivf`, `hnsw`: one a
dimension; `pq`: one for several), as they only choose who is compared exactly; `flat` keeps them as they are.
"""

import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, get_args

import numpy as np

from ....pipeline.errors import RunError

Kind = Literal["ivf", "flat", "hnsw", "pq"]
KINDS: tuple[Kind, ...] = get_args(Kind)
PER_LIST = 39  # elements that a list is trained from; with fewer FAISS calls the centroids unreliable
CHUNK = 1 << 20  # bytes written in one go
NEIGHBOURS = 32  # of a node of HNSW


@dataclass(frozen=True)
class Effort:
    """How hard to look for candidates.

    Attributes:
        probes: lists that are looked through for an element of the query (`ivf`, `pq`; FAISS's nprobe), or nodes that
            are kept in sight (`hnsw`; efSearch). It means nothing for `flat`.
        candidates: elements that are fetched for an element of the query.
    """

    probes: int
    candidates: int


def load_faiss() -> Any:
    """Return the module faiss; RunError where it is not installed."""
    try:
        import faiss
    except ImportError as error:
        raise RunError("an index needs FAISS, which is not installed: pip install 'xret[index]'") from error
    return faiss


def lists_for(elements: int) -> int:
    """Return how many lists an inverted file of so many elements has: 4 times the root, if they can be trained."""
    return max(1, min(round(4 * math.sqrt(elements)), elements // PER_LIST))


class Candidates:
    """A FAISS index of T elements.

    Args:
        faiss_index: trained, of this `kind`.
        kind: `ivf`, `flat`, `hnsw` or `pq`.
    """

    def __init__(self, faiss_index: Any, kind: Kind) -> None:
        self._index, self.kind = faiss_index, kind

    @classmethod
    def train(cls, kind: Kind, sample: np.ndarray, elements: int, *, inner_product: bool, seed: int) -> "Candidates":
        """Make an empty index.

        Args:
            kind: one of `KINDS`.
            sample: vectors to learn from, float32 ``[S, W]``, W a multiple of 8; `training_size` says how many.
            elements: how many there will be.
            inner_product: near is what has a large inner product; else, a small Euclidean distance.
            seed: of the clustering.
        """
        faiss = load_faiss()
        metric = faiss.METRIC_INNER_PRODUCT if inner_product else faiss.METRIC_L2
        width, lists = sample.shape[1], lists_for(elements)
        index = faiss.index_factory(width, _recipe(kind, width, lists), metric)
        if kind in ("ivf", "pq"):
            index.cp.seed = seed
            index.cp.min_points_per_centroid = 1  # no warnings on standard error
            index.cp.max_points_per_centroid = PER_LIST
        if kind == "pq":
            index.pq.cp.seed = seed
            index.pq.cp.min_points_per_centroid = 1
            sample = np.resize(sample, (max(len(sample), 1 << index.pq.nbits), width))  # repeated where too few
        with _threads(faiss, kind):
            index.train(sample)
        return cls(index, kind)

    @classmethod
    def open(cls, path: Path, kind: Kind, *, mapped: bool = True) -> "Candidates":
        """Open the file of an index: `mapped`, to search, or in memory, to add to it."""
        faiss = load_faiss()
        way = faiss.IO_FLAG_MMAP if kind in ("ivf", "pq") else faiss.IO_FLAG_MMAP_IFC
        return cls(faiss.read_index(str(path), way if mapped else 0), kind)

    def __len__(self) -> int:
        return int(self._index.ntotal)

    @property
    def lists(self) -> int:
        """How many inverted lists there are; 1 where there are none."""
        return self._index.nlist if self.kind in ("ivf", "pq") else 1

    @property
    def most_probes(self) -> int:
        """The probes with which nothing that could be found is missed."""
        return len(self) if self.kind == "hnsw" else self.lists

    def add(self, vectors: np.ndarray) -> None:
        """Append vectors, float32 ``[T, W]``."""
        with _threads(load_faiss(), self.kind):
            self._index.add(vectors)

    def write(self, path: Path) -> None:
        """Write the file that `open` opens; OSError if that fails."""
        faiss = load_faiss()
        # FAISS's own writer only prints a line if the disk is full when it closes the file.
        with path.open("wb") as file:
            faiss.write_index(self._index, faiss.PyCallbackIOWriter(file.write, CHUNK))

    def search(self, vectors: np.ndarray, effort: Effort) -> np.ndarray:
        """Return for each of Q vectors the numbers of the nearest elements, best first, int64 ``[Q, candidates]``.

        Where fewer were found, -1 follows them. Safe to call from several threads.
        """
        faiss = load_faiss()
        parameters = None
        if self.kind in ("ivf", "pq"):
            made = faiss.SearchParametersIVF if self.kind == "ivf" else faiss.IVFPQSearchParameters
            parameters = made(nprobe=min(effort.probes, self.lists))
        elif self.kind == "hnsw":
            parameters = faiss.SearchParametersHNSW(efSearch=effort.probes)
        numbers: np.ndarray
        _, numbers = self._index.search(vectors, min(effort.candidates, len(self)), params=parameters)
        return numbers

    def work(self, effort: Effort) -> float:
        """Return roughly how many elements are looked at for an element of the query, the candidates included."""
        scanned = {
            "flat": len(self),
            "hnsw": NEIGHBOURS * max(effort.probes, effort.candidates),
        }.get(self.kind, self.lists + effort.probes * len(self) / self.lists)
        return scanned + 4 * effort.candidates  # four bytes a dimension, and from anywhere


def training_size(elements: int) -> int:
    """Return how many of so many elements `Candidates.train` learns from."""
    return min(elements, max(PER_LIST * lists_for(elements), 1 << 14))


def _recipe(kind: Kind, width: int, lists: int) -> str:
    """Return the words by which FAISS makes an index."""
    if kind == "pq":
        pieces = max(pieces for pieces in range(1, min(64, width // 4) + 1) if width % pieces == 0)
        return f"IVF{lists},PQ{pieces}np"  # np: no codes to filter by Hamming distance, whose training is slow
    return {"ivf": f"IVF{lists},SQ8", "flat": "Flat", "hnsw": f"HNSW{NEIGHBOURS},SQ8"}[kind]


@contextmanager
def _threads(faiss: Any, kind: Kind) -> Iterator[None]:
    """Give HNSW a single thread: with several its graph depends on which comes first."""
    before = faiss.omp_get_max_threads()
    if kind == "hnsw":
        faiss.omp_set_num_threads(1)
    try:
        yield
    finally:
        faiss.omp_set_num_threads(before)
