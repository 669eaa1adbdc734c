"""Embeddings that others computed: a matrix of images, one of captions, and what their rows belong to.

A folder of ``images``, ``captions`` and ``index``: two matrices as ``.npy``, or as ``.safetensors`` with a single
tensor, and the index as ``.csv`` with the header ``file_name,caption[,split]`` or as ``.jsonl`` with these keys. A line
of the index is a row of the captions. The images have a row a line as well, or a row for each image in the order in
which the index first names them.
"""

import csv
import posixpath
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
from safetensors import SafetensorError, safe_open

from ...documents import DocumentError, parse_json
from .source import SourceError, npy_header, sha256

_AT_ONCE = 1024  # rows compared
_SAME = 1e-2  # what one picture's embeddings in different batches of float16 stay below
_DTYPES = {"F16": "float16", "F32": "float32", "F64": "float64"}  # of safetensors
Line = tuple[str, str, str | None]  # file name, caption and split


@dataclass(frozen=True)
class Part:
    """A file with some rows of a matrix."""

    path: Path
    rows: int
    width: int
    stamp: tuple[int, int]  # size and time of modification, by which a task sees that it is still the same
    tensor: str = ""  # its name in a safetensors file

    @classmethod
    def of(cls, path: Path) -> "Part":
        """Look at a file's header.

        Raises:
            SourceError: it is no matrix of floats.
        """
        try:
            shape, dtype, tensor = _safetensors(path) if path.suffix == ".safetensors" else _npy(path)
        except (ValueError, SafetensorError, OSError) as error:
            raise SourceError(f"{path} cannot be read as a matrix ({error}); get the file anew") from error
        if len(shape) != 2 or 0 in shape or np.dtype(dtype).kind != "f":
            found = f"{dtype} {' x '.join(map(str, shape))}".strip()
            raise SourceError(f"{path} is {found}, not a matrix of float16 or float32, a row an embedding")
        return cls(path, shape[0], shape[1], _stamp(path), tensor)

    def read(self, rows: np.ndarray) -> np.ndarray:
        """Return these rows [n,C], from the disk.

        Raises:
            SourceError: the file was changed meanwhile.
        """
        try:
            if _stamp(self.path) != self.stamp:
                raise SourceError(f"{self.path} was changed while it was imported; import again")
            if not self.tensor:
                matrix: np.ndarray = np.load(self.path, mmap_mode="r", allow_pickle=False)
                return np.asarray(matrix[rows])
            with safe_open(self.path, "numpy") as file:
                tensor = file.get_slice(self.tensor)
                return np.concatenate([tensor[row : row + 1] for row in rows.tolist()])
        except OSError as error:
            raise SourceError(
                f"{self.path} cannot be read ({error.strerror}); every worker needs the source under the same path"
            ) from error


@dataclass(frozen=True)
class Matrix:
    """The rows of one file or several, one after the other."""

    parts: tuple[Part, ...]

    @classmethod
    def of(cls, paths: Sequence[Path]) -> "Matrix":
        """Look at the headers of files.

        Raises:
            SourceError: one is no matrix of floats, or wider than the first.
        """
        parts = tuple(map(Part.of, paths))
        for part in parts:
            if part.width != parts[0].width:
                raise SourceError(
                    f"{part.path} is {part.width} wide and {parts[0].path.name} {parts[0].width}; keep the embeddings"
                    " of one model in a folder"
                )
        return cls(parts)

    @cached_property
    def _first(self) -> np.ndarray:
        return np.cumsum([0, *(part.rows for part in self.parts)])

    @property
    def rows(self) -> int:
        """How many there are."""
        return int(self._first[-1])

    @property
    def width(self) -> int:
        """Of a row."""
        return self.parts[0].width

    def place(self, row: int) -> str:
        """Return where a row lies, for messages."""
        part = int(np.searchsorted(self._first, row, side="right")) - 1
        return f"row {row - self._first[part]} of {self.parts[part].path.name}"

    def read(self, rows: np.ndarray) -> np.ndarray:
        """Return these rows, float64 [n,C]; no more than they are read."""
        out = np.empty((len(rows), self.width))
        of_part = np.searchsorted(self._first, rows, side="right") - 1
        for number in np.unique(of_part).tolist():
            here = of_part == number
            out[here] = self.parts[number].read(rows[here] - self._first[number])
        return out


@dataclass(frozen=True)
class Embeddings:
    """A source that was looked through. Its images are counted in the order in which the index first names them."""

    images: Matrix
    captions: Matrix  # a row a line of the index
    names: list[str]  # file name of each image
    splits: list[str | None]  # of each image; None where the source does not say
    image_rows: np.ndarray  # row in `images` of each image, int64
    texts: list[str]  # of each caption
    owners: np.ndarray  # the image of each caption, int64
    digests: dict[str, dict[str, str]]  # SHA-256 by file, of ``images``, ``captions`` and ``index``

    @classmethod
    def of(cls, images: Matrix, captions: Matrix, lines: Iterable[Line], index: Sequence[Path]) -> "Embeddings":
        """Match matrices with the lines of an index, which lie in these files.

        Raises:
            SourceError: rows and lines do not fit, or two embeddings of one image differ.
        """
        numbers: dict[str, int] = {}
        first: list[int] = []
        texts, owners, splits = [], [], []
        for line, (name, text, split) in enumerate(lines):
            owner = numbers.setdefault(name, len(numbers))
            if owner == len(first):
                first.append(line)
                splits.append(split)
            elif splits[owner] != split:
                raise SourceError(f"{index[0]}: '{name}' is in split '{splits[owner]}' and in '{split}'; correct one")
            texts.append(text)
            owners.append(owner)
        where = index[0] if len(index) == 1 else index[0].parent
        if not texts:
            raise SourceError(f"{where} names no image; nothing can be imported")
        if captions.rows != len(texts):
            raise SourceError(
                f"{captions.parts[0].path} has {captions.rows:,} rows, and {where} {len(texts):,} captions; a caption"
                " has a row"
            )
        if images.rows not in (len(texts), len(first)):
            raise SourceError(
                f"{images.parts[0].path} has {images.rows:,} rows, and {where} {len(texts):,} captions of"
                f" {len(first):,} images; an image has a row, or a caption"
            )
        rows = np.array(first if images.rows == len(texts) else range(len(first)), dtype=np.int64)
        found = cls(images, captions, list(numbers), splits, rows, texts, np.array(owners, dtype=np.int64), {})
        if images.rows == len(texts):
            found._require_equal()
        for key, paths in (
            *(
                (key, [part.path for part in matrix.parts])
                for key, matrix in (("images", images), ("captions", captions))
            ),
            ("index", index),
        ):
            found.digests[key] = {path.name: sha256(path) for path in paths}
        return found

    def _require_equal(self) -> None:
        """Refuse rows of one image that differ: then its name is that of several."""
        again = np.flatnonzero(self.image_rows[self.owners] != np.arange(len(self.owners)))
        for start in range(0, len(again), _AT_ONCE):
            rows = again[start : start + _AT_ONCE]
            one, other = self.images.read(self.image_rows[self.owners[rows]]), self.images.read(rows)
            differing = ~np.isclose(one, other, rtol=_SAME, atol=_SAME, equal_nan=True).all(axis=1)
            if differing.any():
                row = int(rows[differing][0])
                owner = int(self.owners[row])
                raise SourceError(
                    f"{self.images.place(int(self.image_rows[owner]))} and {self.images.place(row)} are of"
                    f" '{self.names[owner]}' and differ; name each picture differently"
                )


def open_folder(folder: Path) -> Embeddings:
    """Look through a folder of ``images``, ``captions`` and ``index``.

    Raises:
        SourceError: one is missing or not of its form, or they do not fit each other.
    """
    images, captions = (_file(folder, name, (".npy", ".safetensors")) for name in ("images", "captions"))
    index = _file(folder, "index", (".csv", ".jsonl"))
    lines = within_folder(list(_lines(index)), index)
    return Embeddings.of(Matrix.of([images]), Matrix.of([captions]), lines, [index])


def within_folder(lines: list[Line], source: Path) -> Iterator[Line]:
    """Yield lines with file names below the folder that all of them have in common, where some lead out of any.

    Raises:
        SourceError: they have none in common.
    """
    tidy = {name: posixpath.normpath(name) for name, _, _ in lines}
    outside = [name for name in tidy.values() if name.startswith(("/", ".."))]
    if outside:
        try:
            common = posixpath.commonpath([posixpath.dirname(name) for name in tidy.values()])
        except ValueError as error:
            raise SourceError(
                f"{source}: '{outside[0]}' leads out of the folder of the other pictures; name all from one folder"
            ) from error
        tidy = {name: posixpath.relpath(path, common) for name, path in tidy.items()}
    for name, text, split in lines:
        yield tidy[name], text, split


def _file(folder: Path, name: str, suffixes: tuple[str, ...]) -> Path:
    found = [folder / f"{name}{suffix}" for suffix in suffixes if (folder / f"{name}{suffix}").is_file()]
    if len(found) != 1:
        what = f"holds no {' or '.join(name + suffix for suffix in suffixes)}" if not found else f"holds two {name}"
        raise SourceError(f"{folder} {what}; --from embeddings needs images, captions and index, one file each")
    return found[0]


def _lines(index: Path) -> Iterator[Line]:
    try:
        with index.open(encoding="utf-8-sig", newline="") as file:
            rows = (
                csv.DictReader(file, strict=True) if index.suffix == ".csv" else map(_parsed, filter(str.strip, file))
            )
            for number, row in enumerate(rows, 1):
                yield _line(row, f"{index}: entry {number}")
    except UnicodeDecodeError as error:
        raise SourceError(f"{index}: this is not UTF-8 ({error.reason}); save it as UTF-8") from error
    except csv.Error as error:
        raise SourceError(f"{index}: not valid CSV ({error}); correct it") from error


def _parsed(text: str) -> Any:
    try:
        return parse_json(text)
    except DocumentError:
        return None


def _line(row: Any, where: str) -> Line:
    if (
        not isinstance(row, dict)
        or {"file_name", "caption"} - row.keys()
        or row.keys() - {"file_name", "caption", "split"}
    ):
        raise SourceError(f"{where} does not have file_name, caption and at most split besides; correct it")
    name, text, split = row["file_name"], row["caption"], row.get("split")
    if not (isinstance(name, str) and name.strip() and "\0" not in name and isinstance(text, str)):
        raise SourceError(f"{where}: file_name or caption is missing or no text; give it")
    if "split" in row and not (isinstance(split, str) and split):
        raise SourceError(f"{where}: the split is empty or no text; give it")
    return name, text, split


def _npy(path: Path) -> tuple[tuple[int, ...], str, str]:
    with path.open("rb") as file:
        shape, _, dtype = npy_header(file, path.stat().st_size)
    return shape, str(dtype), ""


def _safetensors(path: Path) -> tuple[tuple[int, ...], str, str]:
    with safe_open(path, "numpy") as file:
        names = list(file.keys())
        if len(names) != 1:
            raise ValueError(f"it holds {len(names)} tensors, not one")
        tensor = file.get_slice(names[0])
        dtype = tensor.get_dtype()
        if dtype not in _DTYPES:
            raise SourceError(f"{path} holds {dtype}; save it as float16 or float32")
        return tuple(tensor.get_shape()), _DTYPES[dtype], names[0]


def _stamp(path: Path) -> tuple[int, int]:
    found = path.stat()
    return found.st_size, found.st_mtime_ns
