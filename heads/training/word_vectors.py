"""Word vectors that others trained: the text files of GloVe, fastText and word2vec, read for a vocabulary."""

import gzip
import re
import zlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import BinaryIO

import numpy as np

from ...pipeline.errors import VectorsError
from ...pipeline.progress import Progress
from ...pipeline.wording import reason

_LINES = 10_000  # between two reports of progress


@dataclass(frozen=True)
class WordVectors:
    """The vectors of a vocabulary."""

    vectors: np.ndarray  # float32 [V,dim], one row per word of the vocabulary; zeros where the file has none
    found: np.ndarray  # bool [V], whether the file has one
    missing: tuple[str, ...]  # the words without one, in the order of the vocabulary


def read_word_vectors(path: str | Path, vocabulary: Sequence[str]) -> WordVectors:
    """Read the vectors of a vocabulary from a text file, line by line; no others are kept.

    A line is a word and its numbers with a space between each; GloVe's words may have spaces inside. A first line of
    two whole numbers, as fastText and word2vec write it, is how many vectors there are and how wide. A file whose name
    ends in ``.gz`` is decompressed. A word gets the vector of the first line with this very word, else of the first
    whose word in lower case is it. VectorsError: the file cannot be read, a line is not a word with its numbers, lines
    are missing at the end, or the file has no word of the vocabulary.
    """
    path = Path(path)
    try:
        with path.open("rb") as file, Progress(f"read {path.name}", path.stat().st_size, "bytes") as progress:
            return _read(_lines(file, path.suffix == ".gz", progress), path, vocabulary)
    except (OSError, EOFError, zlib.error) as error:
        raise VectorsError(
            f"the word vectors {path} cannot be read ({reason(error)}); check the path or the file"
        ) from error


def _lines(file: BinaryIO, compressed: bool, progress: Progress) -> Iterator[bytes]:
    """Yield the lines. Only a line feed ends one: some words are line ends of other kinds."""
    at = 0
    for number, line in enumerate(gzip.GzipFile(fileobj=file) if compressed else file):
        if number % _LINES == 0:
            progress.update(file.tell() - at)
            at = file.tell()
        yield line.rstrip(b" \r\n")
    progress.update(file.tell() - at)


def _begun(lines: Iterator[bytes], path: Path) -> tuple[int | None, int, Iterator[bytes]]:
    """Return how many vectors a header promises, if there is one, how wide they are, and the lines that have them."""
    first = next(lines, b"")
    header = re.fullmatch(rb"(\d{1,12}) (\d{1,6})", first)
    promised, dim = (int(header[1]), int(header[2])) if header else (None, first.count(b" "))
    begin = next(lines, b"") if header else first
    if dim == 0 or (promised and begin.count(b" ") < dim):  # before memory is made for as many numbers
        raise VectorsError(f"{path} does not begin with a word and its numbers; use a text file of word vectors")
    return promised, dim, chain([begin] if begin else [], lines)


def _read(lines: Iterator[bytes], path: Path, vocabulary: Sequence[str]) -> WordVectors:
    promised, dim, lines = _begun(lines, path)
    rows = {word: row for row, word in enumerate(vocabulary)}
    vectors = np.zeros((len(rows), dim), dtype=np.float32)
    rank = np.zeros(len(rows), dtype=np.int8)  # of the line a word has: 2 with this very word, 1 in lower case, 0 none
    count = 0
    for count, line in enumerate(lines, 1):
        where = f"{path}: line {count + (promised is not None)}"
        name, *numbers = line.rsplit(b" ", dim)
        if len(numbers) < dim:
            raise VectorsError(f"{where} is not a word with {dim} numbers; use a text file of word vectors")
        word = name.decode(errors="replace")  # what is not UTF-8 is no word of a vocabulary
        better, row = (2, rows[word]) if word in rows else (1, rows.get(word.lower()))
        if row is not None and better > rank[row]:
            vectors[row], rank[row] = _vector(numbers, where), better
    if count < (promised or 0):
        raise VectorsError(f"{path}: its first line promises {promised} vectors and it has {count}; get the file again")
    if not rank.any():
        raise VectorsError(f"{path} has no word of the vocabulary; use vectors of the captions' language")
    return WordVectors(vectors, rank > 0, tuple(word for word, row in rows.items() if not rank[row]))


def _vector(numbers: list[bytes], where: str) -> np.ndarray:
    try:
        vector = np.array([float(number) for number in numbers])
    except ValueError as error:
        raise VectorsError(f"{where} has something other than numbers after its word; get the file again") from error
    if not np.abs(vector).max() <= np.finfo(np.float32).max:  # also false for NaN
        raise VectorsError(f"{where} has a number that is not finite; get the file again")
    return vector
