"""Embeddings that others computed: vectors of images and of captions, and what their rows belong to.

The files of a folder say what it is:

- ``images.npy``, ``captions.npy`` and ``index.csv``, ``.jsonl`` or ``.parquet``: a line of the index is a row of the
  captions. The images have a row a line as well, or a row for each image in the order in which the index first names
  them.
- The same in parts, as clip-retrieval writes and embedding-reader reads them: folders ``img_emb``, ``text_emb`` and
  ``metadata``, or ``images``, ``captions`` and ``index``, of ``.npy`` or ``.parquet``; or all files in one folder, as
  ``img_emb_0.npy``. Parts with one number or name belong together. Parquet files of captions may be the index, too.
- Parquet files, a row a pair, that hold the vectors of both, or beside each a ``.npz`` of its name that does, as
  DataComp publishes them.

Vectors are arrays of a ``.npz``, or columns of lists of floats.
"""

import posixpath
import re
from collections.abc import Iterable, Iterator, Sequence
from itertools import chain, count
from pathlib import Path

import numpy as np

from ...data.caption_files import caption_rows
from ...data.image_columns import ImageSample
from ...data.manifest import Columns
from ...data.rows import IMAGES, SPLIT_NAMES, RowReader
from ...data.texts import Column, Texts, distinct
from .embedding_files import SIDES, Part, arrow, files_in_parts, files_in_tables, reading_file, vectors_in
from .source import Imported, ImportOptions, SourceError, Table, Unreadable, require_fitting, sha256

_AT_ONCE = 1 << 12  # rows that are read
_SAME = 1e-2  # of the largest number: what one picture's embeddings in different batches of float16 stay below
_IMAGES = (*IMAGES, "image_path", "key", "uid", "url")  # columns of a Parquet index, the first that is there


class Matrix(Table):
    """A vector a row, of the parts of one file or several; SourceError if they are of several widths."""

    compared = False  # entries of one key with each other
    pairs: tuple[str, Sequence[str], Sequence[str]]  # of images: where names and captions stand, and these

    def __init__(self, parts: Sequence[Part]) -> None:
        self.parts, self.channels = parts, parts[0].shape[1]
        for part in parts:
            if part.shape[1] != self.channels:
                raise SourceError(
                    f"{part.path} is {part.shape[1]} wide and {parts[0].path.name} {self.channels}; keep the embeddings"
                    " of one model in a folder"
                )
        self._first = np.cumsum([0, *(part.shape[0] for part in parts)])
        self._rows: np.ndarray | None = None
        self._dtype = np.result_type(np.float32, *(part.dtype for part in parts))
        self._loaded: tuple[int, np.ndarray] = (-1, np.empty(0))  # the number of a part, and its vectors

    def __len__(self) -> int:
        return int(self._first[-1]) if self._rows is None else len(self._rows)

    def captions(self) -> Iterator[tuple[str, Sequence[str]]]:
        """Yield where the captions of each image stand, and these."""
        where, names, texts = self.pairs
        of_each: dict[str, list[str]] = {}
        for name, text in zip(names, texts, strict=True):
            of_each.setdefault(name, []).append(text)
        return ((where, of_each[name]) for name in self.keys)

    def select(self, rows: np.ndarray) -> None:
        """Leave out all other rows."""
        self._rows = rows

    def where(self, row: int) -> str:
        """Return where a row lies, for messages."""
        row = row if self._rows is None else int(self._rows[row])
        number = int(np.searchsorted(self._first, row, side="right")) - 1
        part = self.parts[number]
        return f"row {part.first + row - self._first[number]} of {part.path.name}"

    def read(self, rows: np.ndarray) -> np.ndarray:
        """Return these rows, float32 or float64 [n,C]."""
        rows = rows if self._rows is None else self._rows[rows]
        out = np.empty((len(rows), self.channels), dtype=self._dtype)
        of_part = np.searchsorted(self._first, rows, side="right") - 1
        for number in np.unique(of_part).tolist():
            here, loaded = of_part == number, self._loaded
            values = loaded[1] if loaded[0] == number else self.parts[number].load()
            out[here] = values[rows[here] - self._first[number]]
            if not isinstance(values, np.memmap):  # a mapping that is let go frees what was read through it
                self._loaded = number, values
        return out

    def pick(self, entries: Sequence[int]) -> int:
        """Return which entry of one sample counts; of images all are equal where several are."""
        return entries[0] if self.compared else super().pick(entries)

    def arrays(self, entry: int) -> list[np.ndarray]:
        """Return the vector of an entry, [1,C]."""
        values = self.read(np.array([entry]))
        if not np.isfinite(values).all():
            raise Unreadable(f"{self.where(entry)} holds NaN or infinity")
        return [values]

    def put(self, arrays: dict[str, np.ndarray], at: np.ndarray, entries: np.ndarray) -> dict[int, str]:
        """Read many rows at once."""
        faults: dict[int, str] = {}
        for first in range(0, len(at), _AT_ONCE):
            places, rows = at[first : first + _AT_ONCE], entries[first : first + _AT_ONCE]
            values = self.read(rows)
            finite, filled = np.isfinite(values).all(axis=1), values.any(axis=1)
            good = finite & filled
            require_fitting(values[good], arrays["global"].dtype)
            arrays["global"][places[good]] = values[good]
            for lost, fault in ((~finite, "holds NaN or infinity"), (~filled, "is all 0, as what was never written")):
                lost_rows = zip(places[lost].tolist(), rows[lost].tolist(), strict=True)
                faults |= {place: f"{self.where(row)} {fault}" for place, row in lost_rows}
        return faults


def open_embeddings(place: Path, options: ImportOptions) -> Imported:
    """Look through a folder of embeddings, or a file; see the module.

    To skip failures leaves out rows without an image and a caption. SourceError if files are missing or not of their
    form, or do not fit each other; or pyarrow is needed and not installed.
    """
    if unknown := options.arrays.keys() - {"image", "text"}:
        raise SourceError(f"--arrays: '{min(unknown)}' is unknown; embeddings have the arrays image and text")
    paths = files_in_parts(place) or files_in_tables(place)
    apart = paths["image"] != paths["text"]
    images, captions = ([vectors_in(path, side, apart, options.arrays) for path in paths[side]] for side in SIDES)
    index = paths["index"]
    if len(images) == len(captions) == len(index) > 1:
        _require_rows(index, images, captions)
    vectors = {part.array for part in chain(*images, *captions)}
    if not apart and len(vectors) < 2:
        raise SourceError(
            f"{place}: '{min(vectors)}' cannot be the vectors of images and of captions; name both with --arrays"
        )
    if options.arrays and vectors == {""}:
        raise SourceError(f"--arrays names arrays of .npz and .parquet, and {place} has .npy; leave it out")
    matrices = Matrix([*chain(*images)]), Matrix([*chain(*captions)])
    where = index[0] if len(index) == 1 else place
    lines = _lines(where, index, _splits(place, index), vectors, options.on_error == "skip")
    source = _source(*matrices, lines, where)
    _identify(place, matrices, index)
    return source


def _require_rows(index: Sequence[Path], images: Sequence[list[Part]], captions: Sequence[list[Part]]) -> None:
    """Refuse parts of which the index, the images and the captions have not as many rows."""
    for path, *sides in zip(index, images, captions, strict=True):
        if path.suffix == ".parquet":
            with reading_file(path):
                lines = arrow().parquet.read_metadata(path).num_rows
            rows = [sum(part.shape[0] for part in parts) for parts in sides]
            if {*rows} != {lines}:
                raise SourceError(
                    f"{path} has {lines:,} rows, and beside it are {rows[0]:,} images and {rows[1]:,} captions; they do"
                    " not belong together"
                )


def _splits(place: Path, index: Sequence[Path]) -> list[str | None]:
    """Return the split of each file of the index by the names of it and its folders; none unless these differ.

    They are as in ``test/0.parquet``, ``split=test/0.parquet`` or ``test-0.parquet``.
    """
    splits = []
    for path in index:
        words = (re.split(r"[^a-z]", part.removeprefix("split="))[0] for part in path.relative_to(place).parts)
        splits.append(next((SPLIT_NAMES[word] for word in words if word in SPLIT_NAMES), None))
    return splits if len({*splits}) > 1 else [None] * len(index)


def _lines(
    where: Path, index: Sequence[Path], splits: Sequence[str | None], vectors: set[str], skip: bool
) -> Iterator[ImageSample | None]:
    """Yield the image of each row of the index, with one caption; None of a row that is left out.

    A row that has no split is of that of its file.
    """
    columns, gone = None, 0
    if index[0].suffix == ".parquet":
        with reading_file(index[0]):
            spelt = {name.lower(): name for name in arrow().parquet.read_schema(index[0]).names}
        columns = Columns(image=next((spelt[name] for name in _IMAGES if name in spelt), None))
    reader = RowReader(where, columns, skip=skip)
    for path, split in zip(index, splits, strict=True):
        rows = _table_rows(path, reader, vectors) if path.suffix == ".parquet" else caption_rows(path, reader)
        for line, row in rows:
            if row is not None and len(reader.left_out) > gone:
                row = None  # a caption of its list is left out
            elif row is not None and not (
                isinstance(row.file_name, str) and row.file_name.strip() and len(row.captions) == 1
            ):
                reader.leave_out(f"{line}: the file name is missing, or there is not one caption; correct it")
                row = None
            if row is not None:
                row.split = row.split or split
            yield row
            gone = len(reader.left_out)
    reader.note_unread()
    if reader.lists():
        raise SourceError(f"{where}: the captions are lists, and an embedding is of one; give each its line")


def _table_rows(path: Path, reader: RowReader, vectors: set[str]) -> Iterator[tuple[str, ImageSample | None]]:
    """Yield of a Parquet file what `caption_rows` does."""
    with reading_file(path), arrow().parquet.ParquetFile(path) as file:
        found = reader.find(tuple(name for name in file.schema_arrow.names if name not in vectors), str(path))
        wanted, number = [found.image, *found.captions, *([found.split] if found.split else [])], count()
        for batch in file.iter_batches(columns=wanted):
            for row in batch.to_pylist():
                where = f"{path}: row {next(number):,}"
                if type(name := row[found.image]) is int:  # ids, as HDF5 files have them
                    row[found.image] = str(name)
                yield where, reader.image(row, where, folder=None)


def _normal(name: str) -> str:
    return name if re.match(r"[A-Za-z][A-Za-z0-9+.-]*://", name) else posixpath.normpath(name)


def _source(images: Matrix, captions: Matrix, lines: Iterable[ImageSample | None], where: Path) -> Imported:
    """Match matrices with the lines of an index, which lie there; SourceError where they do not fit."""
    names, texts, splits, numbers, count = Texts(), Texts(), Texts(), Column("q"), 0
    for count, entry in enumerate(lines, 1):
        if entry is not None:
            numbers.append(count - 1)
            names.append(_normal(entry.file_name))
            texts.append(entry.captions[0][0])
            splits.append(entry.split or "")
    first, of_each = distinct(names)
    kept = numbers.read()
    a_line = _has_row_a_line(images, captions, count, len(first), where)
    gone = [captions.where(row) for row in np.setdiff1d(np.arange(count), kept).tolist()] if len(kept) < count else []
    if gone and not a_line:
        raise SourceError(
            f"{where}: {gone[0]} has no image and caption, so that nothing says in which order the lines first name the"
            f" {len(images):,} images of {images.parts[0].path.name}; correct it, or give the images a row a line"
        )
    if gone:
        for matrix in (images, captions) if a_line else (captions,):
            matrix.select(kept)
    if above := _folder_of_all(names, where):
        names = Texts(name[len(above) :].lstrip("/") for name in names)
    images.keys = names if a_line else Texts(names[row] for row in first.tolist())
    images.pairs, captions.keys, captions.splits = (str(where), names, texts), texts, splits
    if a_line and len(first) < len(names):
        _require_equal(images, first[of_each])
        images.compared = True
    return Imported(images, captions, names, [f"{row} has no image and caption" for row in gone])


def _identify(place: Path, matrices: Sequence[Matrix], index: Sequence[Path]) -> None:
    """Give matrices their identities: the SHA-256 of their files, and what is read of them."""
    folder = place if place.is_dir() else place.parent
    digests: dict[Path, str] = {}
    for matrix in matrices:
        paths = sorted({*index, *(part.path for part in matrix.parts)})
        digests |= {path: sha256(path) for path in paths if path not in digests}
        matrix.identity = {"files": {path.relative_to(folder).as_posix(): digests[path] for path in paths}}
        if arrays := sorted({part.array for part in matrix.parts} - {""}):
            matrix.identity["arrays"] = arrays


def _has_row_a_line(images: Matrix, captions: Matrix, lines: int, names: int, where: Path) -> bool:
    """Return whether images have a row a line, and not one a name."""
    if not names or len(captions) != lines or len(images) not in (lines, names):
        raise SourceError(
            f"{images.parts[0].path} has {len(images):,} rows, {captions.parts[0].path} {len(captions):,}, and {where}"
            f" {lines:,} captions of {names:,} images; an image has a row, or each caption its image's"
        )
    return len(images) == lines


def _require_equal(images: Matrix, first: np.ndarray) -> None:
    """Refuse rows of one image, whose `first` row stands at each, that differ: then its name is that of several."""
    again = np.flatnonzero(first != np.arange(len(first)))
    for start in range(0, len(again), _AT_ONCE):
        rows = again[start : start + _AT_ONCE]
        one, other = images.read(first[rows]), images.read(rows)
        size = np.abs(np.nan_to_num(one, posinf=0, neginf=0)).max(axis=1, keepdims=True)
        differing = ~np.isclose(one, other, rtol=_SAME, atol=_SAME * size, equal_nan=True).all(axis=1)
        if differing.any():
            row = int(rows[differing][0])
            raise SourceError(
                f"{images.where(int(first[row]))} and {images.where(row)} are of '{images.keys[row]}' and differ; name"
                " each picture differently"
            )


def _folder_of_all(names: Sequence[str], where: Path) -> str:
    """Return the folder that all file names have in common, where some lead out of any; else nothing."""
    outside = next((name for name in names if name.startswith(("/", ".."))), None)
    if outside is None:
        return ""
    folders = {posixpath.dirname(name) for name in names}
    same_start = len({folder.startswith("/") for folder in folders}) == 1
    common = posixpath.commonpath(folders) if same_start else ""
    if not common or any(name[len(common) :].lstrip("/").startswith("../") for name in names):
        raise SourceError(
            f"{where}: '{outside}' leads out of the folder of the other pictures; name all from one folder"
        )
    return common
