"""Embeddings that others computed: a matrix of images, one of captions, and what their rows belong to.

``embeddings`` is a folder of ``images.npy``, ``captions.npy`` and ``index.csv`` or ``index.jsonl``, whose columns or
keys are file_name, caption and at most split besides. A line of the index is a row of the captions. The images have a
row a line as well, or a row for each image in the order in which the index first names them.

``clip-retrieval`` is the folder that its inference writes: ``img_emb/img_emb_N.npy`` and ``text_emb/text_emb_N.npy``, a
row a pair, and ``metadata/metadata_N.parquet`` with the columns ``image_path``, ``caption`` and at most ``split``, N
from 0, with leading zeros; or all files in one folder. ``image_path`` is a file as it was found, or the key in a tar.
"""

import posixpath
import re
import sys
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from ...data.caption_files import caption_rows
from ...data.rows import RowReader
from ...errors import require_pyarrow
from ...wording import reason, some_of
from .source import Imported, ImportOptions, SourceError, Table, Unreadable, map_floats, require_fitting, sha256

_AT_ONCE = 1 << 14  # rows that are read
_SAME = 1e-2  # what one picture's embeddings in different batches of float16 stay below
_KINDS = {"img_emb": ".npy", "text_emb": ".npy", "metadata": ".parquet"}  # of clip-retrieval
_COLUMNS = ("image_path", "caption")
Line = tuple[str | None, str | None, str | None]  # file name, caption and split; without the first two it is left out
_NOTHING: Line = (None, None, None)


class Matrix(Table):
    """A vector a row, of one file or several; SourceError if one is no matrix of floats, or of another width."""

    compared = False  # entries of one key with each other

    def __init__(self, paths: Sequence[Path]) -> None:
        shapes = [map_floats(path, 2).shape for path in paths]
        self.paths, self.lengths, self.channels = paths, [rows for rows, _ in shapes], shapes[0][1]
        for path, (_, width) in zip(paths, shapes, strict=True):
            if width != self.channels:
                raise SourceError(
                    f"{path} is {width} wide and {paths[0].name} {self.channels}; keep the embeddings of one model in a"
                    " folder"
                )
        self._first = np.cumsum([0, *self.lengths])
        self._rows: np.ndarray | None = None
        self._dtype = np.result_type(np.float32, *(map_floats(path, 2).dtype for path in paths))

    def __len__(self) -> int:
        return int(self._first[-1]) if self._rows is None else len(self._rows)

    def select(self, rows: list[int]) -> None:
        """Leave out all other rows."""
        self._rows = np.array(rows, dtype=np.int64)

    def where(self, row: int) -> str:
        """Return where a row lies, for messages."""
        row = row if self._rows is None else int(self._rows[row])
        part = int(np.searchsorted(self._first, row, side="right")) - 1
        return f"row {row - self._first[part]} of {self.paths[part].name}"

    def read(self, rows: np.ndarray) -> np.ndarray:
        """Return these rows, float32 or float64 [n,C]."""
        rows = rows if self._rows is None else self._rows[rows]
        out = np.empty((len(rows), self.channels), dtype=self._dtype)
        of_part = np.searchsorted(self._first, rows, side="right") - 1
        for number in np.unique(of_part).tolist():
            here = of_part == number
            out[here] = map_floats(self.paths[number], 2)[rows[here] - self._first[number]]
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


def open_folder(folder: Path, options: ImportOptions) -> Imported:
    """Look through a folder of ``images``, ``captions`` and ``index``; SourceError if one is missing or of no use.

    To skip failures leaves out lines without an image and a caption, with their rows.
    """
    index = [path for name in ("index.csv", "index.jsonl") if (path := folder / name).is_file()]
    images, captions = folder / "images.npy", folder / "captions.npy"
    if len(index) != 1 or not images.is_file() or not captions.is_file():
        raise SourceError(f"--from embeddings needs images.npy, captions.npy and index.csv or index.jsonl in {folder}")
    return _source(Matrix([images]), Matrix([captions]), _index_lines(index[0], options.on_error == "skip"), index)


def _index_lines(index: Path, skip: bool) -> Iterator[Line]:
    reader, gone = RowReader(index, skip=skip), 0
    for where, row in caption_rows(index, reader):
        yield from [_NOTHING] * (len(reader.left_out) - gone)  # before this row
        gone = len(reader.left_out)
        if not isinstance(row.file_name, str) or not row.file_name.strip() or len(row.captions) != 1:
            raise SourceError(f"{where}: file_name is missing, or there is not one caption; correct it")
        yield _normal(row.file_name), row.captions[0][0], row.split
    yield from [_NOTHING] * (len(reader.left_out) - gone)
    reader.note_unread()
    if reader.lists():
        raise SourceError(f"{index}: the captions are lists, and an embedding is of one; give each its line")


def _normal(name: str) -> str:
    return name if re.match(r"[A-Za-z][A-Za-z0-9+.-]*://", name) else posixpath.normpath(name)


def open_clip_retrieval(folder: Path, options: ImportOptions) -> Imported:
    """Look through clip-retrieval's folder; failures as in `open_folder`.

    SourceError if files are missing or not of their form, or do not fit each other; or pyarrow is not installed.
    """
    skip, parts = options.on_error == "skip", {kind: _parts(folder, kind) for kind in _KINDS}
    numbers = sorted(set().union(*parts.values()))
    if not numbers:
        raise SourceError(f"{folder} holds no img_emb_*.npy of clip-retrieval's inference; check --source")
    if lacking := [f"{kind}_{number}" for kind in _KINDS for number in numbers if number not in parts[kind]]:
        raise SourceError(f"{folder} lacks {', '.join(some_of(lacking))}; complete the folder, of images and texts")
    images, captions = (Matrix([parts[kind][number] for number in numbers]) for kind in ("img_emb", "text_emb"))
    index = [parts["metadata"][number] for number in numbers]
    return _source(images, captions, _metadata_lines(images, captions, index, skip), index)


def _parts(folder: Path, kind: str) -> dict[int, Path]:
    paths = [path for place in (folder / kind, folder) for path in sorted(place.glob(f"{kind}_*{_KINDS[kind]}"))]
    numbers: dict[int, Path] = {}
    for path in paths:
        found = re.fullmatch(rf"{kind}_(\d+)", path.stem)
        if found and numbers.setdefault(int(found[1]), path) != path:
            raise SourceError(f"{path} and {numbers[int(found[1])]} are both part {int(found[1])}; remove one")
    return numbers


def _metadata_lines(images: Matrix, captions: Matrix, index: Sequence[Path], skip: bool) -> Iterator[Line]:
    """Yield image and caption of each row of the metadata, whose parts have as many rows as those of the matrices."""
    pa = require_pyarrow(SourceError, "clip-retrieval's metadata needs")
    for path, *rows in zip(index, images.lengths, captions.lengths, strict=True):
        try:
            with pa.parquet.ParquetFile(path) as file:
                columns = _columns(path, file, rows)
                for batch in file.iter_batches(columns=columns):
                    for values in zip(*(batch.column(column).to_pylist() for column in columns), strict=True):
                        yield _line(path, columns, values, skip)
        except (OSError, pa.ArrowException) as error:
            raise SourceError(f"{path} cannot be read as Parquet ({reason(error)}); copy it again") from error


def _columns(path: Path, file: Any, rows: list[int]) -> list[str]:
    """Return the columns of a part that are read; `rows` are those of the images' and the captions' part."""
    names = file.schema_arrow.names
    if missing := [name for name in _COLUMNS if name not in names]:
        raise SourceError(f"{path} has no column '{missing[0]}', but {', '.join(names)}; infer images and texts")
    if {*rows} != {file.metadata.num_rows}:
        raise SourceError(
            f"{path} has {file.metadata.num_rows:,} rows, and the parts of that number {rows[0]:,} images and"
            f" {rows[1]:,} captions; they do not belong together"
        )
    split = [name for name in names if name.strip().lower() == "split"]
    if len(split) > 1:
        raise SourceError(f"{path} has the columns {' and '.join(split)}; leave one")
    return [*_COLUMNS, *split]


def _line(path: Path, columns: list[str], values: tuple[Any, ...], skip: bool) -> Line:
    name, text, *split = values
    if split and not isinstance(split[0], str):
        raise SourceError(f"{path}: '{columns[-1]}' is no text in a row ({name!r}, {split[0]!r}); correct it")
    if name and isinstance(name, str) and isinstance(text, str):
        return _normal(name), text, split[0] if split else None
    if skip:
        return _NOTHING
    raise SourceError(
        f"{path}: image_path or caption is no text in a row ({name!r}, {text!r}); leave it out with --on-error skip"
    )


def _source(images: Matrix, captions: Matrix, lines: Iterable[Line], index: Sequence[Path]) -> Imported:
    """Match matrices with the lines of an index, which lie in these files; SourceError where they do not fit."""
    where = index[0] if len(index) == 1 else index[0].parent
    every: list[str | None] = []
    kept: list[int] = []
    texts: list[str] = []
    splits: list[str | None] = []
    for row, (name, text, split) in enumerate(lines):
        every.append(name)
        if name is not None and text is not None:
            kept.append(row)
            texts.append(text)
            splits.append(split and sys.intern(split))
    once = list(dict.fromkeys(filter(None, every)))
    a_line = _has_row_a_line(images, captions, len(every), len(once), where)
    gone = [captions.where(row) for row in sorted({*range(len(every))}.difference(kept))]
    if gone:
        for matrix in (images, captions) if a_line else (captions,):
            matrix.select(kept)
    below = dict(zip(once, _within_folder(once, where), strict=True))
    names = [below[name] for name in map(every.__getitem__, kept) if name is not None]
    images.keys, captions.keys, captions.splits = names if a_line else list(below.values()), texts, splits
    if a_line and len(below) < len(names):
        _require_equal(images, names)
        images.compared = True
    _give_captions(images, names, texts, str(where))
    for matrix in (images, captions):
        matrix.identity = {"files": {path.name: sha256(path) for path in sorted([*matrix.paths, *index])}}
    return Imported(images, captions, names, [f"{place} has no image and caption" for place in gone])


def _has_row_a_line(images: Matrix, captions: Matrix, lines: int, names: int, where: Path) -> bool:
    """Return whether images have a row a line, and not one a name."""
    if not names or len(captions) != lines or len(images) not in (lines, names):
        raise SourceError(
            f"{images.paths[0]} has {len(images):,} rows, {captions.paths[0]} {len(captions):,}, and {where}"
            f" {lines:,} captions of {names:,} images; an image has a row, or each caption its image's"
        )
    return len(images) == lines


def _give_captions(images: Matrix, names: Sequence[str], texts: Sequence[str], where: str) -> None:
    of_each: dict[str, list[str]] = {}
    for name, text in zip(names, texts, strict=True):
        of_each.setdefault(name, []).append(text)
    images.captions = [(where, of_each[name]) for name in images.keys]


def _require_equal(images: Matrix, names: list[str]) -> None:
    """Refuse rows of one image that differ: then its name is that of several."""
    numbers: dict[str, int] = {}
    first = np.array([numbers.setdefault(name, row) for row, name in enumerate(names)])
    again = np.flatnonzero(first != np.arange(len(names)))
    for start in range(0, len(again), _AT_ONCE):
        rows = again[start : start + _AT_ONCE]
        one, other = images.read(first[rows]), images.read(rows)
        differing = ~np.isclose(one, other, rtol=_SAME, atol=_SAME, equal_nan=True).all(axis=1)
        if differing.any():
            row = int(rows[differing][0])
            raise SourceError(
                f"{images.where(int(first[row]))} and {images.where(row)} are of '{names[row]}' and differ; name each"
                " picture differently"
            )


def _within_folder(names: list[str], where: Path) -> list[str]:
    """Return file names below the folder that all have in common, where some lead out of any."""
    outside = next((name for name in names if name.startswith(("/", ".."))), None)
    if outside is None:
        return names
    folders = [posixpath.dirname(name) for name in names]
    same_start = len({folder.startswith("/") for folder in folders}) == 1
    common = posixpath.commonpath(folders) if same_start else ""
    below = [name[len(common) :].lstrip("/") if common else name for name in names]
    if any(name.startswith(("/", "../")) for name in below):
        raise SourceError(
            f"{where}: '{outside}' leads out of the folder of the other pictures; name all from one folder"
        )
    return below
