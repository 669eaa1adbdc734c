"""Embeddings that others computed: a matrix of images, one of captions, and what their rows belong to.

``embeddings`` is a folder of ``images``, ``captions`` and ``index``: two matrices as ``.npy``, or as ``.safetensors``
with a single tensor, and the index as ``.csv`` with the header ``file_name,caption[,split]`` or as ``.jsonl`` with
these keys. A line of the index is a row of the captions. The images have a row a line as well, or a row for each image
in the order in which the index first names them.

``clip-retrieval`` is the folder that its inference writes: ``img_emb/img_emb_N.npy`` and ``text_emb/text_emb_N.npy``, a
row a pair, and ``metadata/metadata_N.parquet`` with the columns ``image_path`` and ``caption``, N from 0, with leading
zeros; or all files in one folder. ``image_path`` is a file as it was found, or the key in a tar.
"""

import csv
import json
import posixpath
import re
import sys
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from safetensors import SafetensorError, safe_open

from ...documents import DocumentError, parse_json
from ...errors import require_pyarrow
from .source import SourceError, sha256, shown

_AT_ONCE = 1024  # rows compared
_SAME = 1e-2  # what one picture's embeddings in different batches of float16 stay below
_KINDS = {"img_emb": ".npy", "text_emb": ".npy", "metadata": ".parquet"}  # of clip-retrieval
_DTYPES = {"F16": "float16", "F32": "float32", "F64": "float64"}  # of safetensors
_COLUMNS = ("image_path", "caption")
Line = tuple[str, str, str | None]  # file name, caption and split


class Matrix:
    """The rows of one file or several, one after the other.

    Args:
        paths: of the files, in their order.

    Raises:
        SourceError: one is no matrix of floats, or wider than the first.
    """

    def __init__(self, paths: Sequence[Path]) -> None:
        self.paths, self.parts, self._stamps = list(paths), [_matrix(path) for path in paths], list(map(_stamp, paths))
        self.width: int = self.parts[0].shape[1]
        for path, part in zip(paths, self.parts, strict=True):
            if part.shape[1] != self.width:
                raise SourceError(
                    f"{path} is {part.shape[1]} wide and {paths[0].name} {self.width}; keep the embeddings of one model"
                    " in a folder"
                )
        self._first = np.cumsum([0, *map(len, self.parts)])
        self.rows = int(self._first[-1])

    def place(self, row: int) -> str:
        """Return where a row lies, for messages."""
        part = int(np.searchsorted(self._first, row, side="right")) - 1
        return f"row {row - self._first[part]} of {self.paths[part].name}"

    def read(self, rows: np.ndarray) -> np.ndarray:
        """Return these rows, float32 [n,C]; SourceError if a file was changed since it was opened."""
        out = np.empty((len(rows), self.width), dtype=np.float32)
        of_part = np.searchsorted(self._first, rows, side="right") - 1
        for number in np.unique(of_part).tolist():
            if _stamp(self.paths[number]) != self._stamps[number]:
                raise SourceError(f"{self.paths[number]} was changed while it was imported; import again")
            here = of_part == number
            out[here] = self.parts[number][rows[here] - self._first[number]]
        return out


def _matrix(path: Path) -> np.ndarray:
    """Map a file into memory."""
    try:
        matrix = _tensor(path) if path.suffix == ".safetensors" else np.load(path, mmap_mode="r", allow_pickle=False)
    except (ValueError, KeyError, TypeError, EOFError, SafetensorError, OSError) as error:
        raise SourceError(f"{path} cannot be read as a matrix ({error}); get the file anew") from error
    if matrix.ndim != 2 or 0 in matrix.shape or matrix.dtype.kind != "f":
        raise SourceError(f"{path} is {shown(matrix)}, not a matrix of float16 or float32, a row an embedding")
    return matrix


def _tensor(path: Path) -> np.ndarray:
    """Map the only tensor of a safetensors file into memory."""
    with safe_open(path, "numpy") as checked:  # raises of a damaged header
        (name, *others) = checked.keys()
    if others:
        raise ValueError(f"it holds {1 + len(others)} tensors, not one")
    with path.open("rb") as file:
        length = int.from_bytes(file.read(8), "little")
        facts = json.loads(file.read(length))[name]
    if facts["dtype"] not in _DTYPES:
        raise ValueError(f"it holds {facts['dtype']}; save it as float16 or float32")
    return np.memmap(path, _DTYPES[facts["dtype"]], "r", 8 + length + facts["data_offsets"][0], tuple(facts["shape"]))


def _stamp(path: Path) -> tuple[int, int]:
    found = path.stat()
    return found.st_size, found.st_mtime_ns


@dataclass(frozen=True)
class Embeddings:
    """A source that was looked through. Its images are counted in the order in which the index first names them.

    Attributes:
        images, captions: the matrices; a row of `captions` is a line of the index.
        names, splits: file name and split of each image; None where the source does not say.
        image_rows: row in `images` of each image, int64.
        texts, owners: text and image of each caption.
        digests: SHA-256 by file, of ``images``, ``captions`` and ``index``.
    """

    images: Matrix
    captions: Matrix
    names: list[str]
    splits: list[str | None]
    image_rows: np.ndarray
    texts: list[str]
    owners: np.ndarray
    digests: dict[str, dict[str, str]]

    @classmethod
    def of(cls, images: Matrix, captions: Matrix, lines: Iterable[Line], index: Sequence[Path]) -> "Embeddings":
        """Match matrices with the lines of an index, which lie in these files.

        Raises:
            SourceError: rows and lines do not fit, or two embeddings of one image differ.
        """
        numbers: dict[str, int] = {}
        texts: list[str] = []
        splits: list[str | None] = []
        first: list[int] = []
        owners: list[int] = []
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
        names = _within_folder(list(numbers), where)
        if captions.rows != len(texts):
            raise SourceError(
                f"{captions.paths[0]} has {captions.rows:,} rows, and {where} {len(texts):,} captions; a caption has a"
                " row"
            )
        if images.rows not in (len(texts), len(first)):
            raise SourceError(
                f"{images.paths[0]} has {images.rows:,} rows, and {where} {len(texts):,} captions of {len(first):,}"
                " images; an image has a row, or a caption"
            )
        rows = np.array(first if images.rows == len(texts) else range(len(first)), dtype=np.int64)
        files = {"images": images.paths, "captions": captions.paths, "index": index}
        digests = {key: {path.name: sha256(path) for path in paths} for key, paths in files.items()}
        found = cls(images, captions, names, splits, rows, texts, np.array(owners, dtype=np.int64), digests)
        if images.rows == len(texts):
            found._require_equal()
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


def _within_folder(names: list[str], source: Path) -> list[str]:
    """Return file names below the folder that all have in common, where some lead out of any."""
    if outside := [name for name in names if name.startswith(("/", ".."))]:
        try:
            common = posixpath.commonpath([posixpath.dirname(name) for name in names])
        except ValueError as error:
            raise SourceError(
                f"{source}: '{outside[0]}' leads out of the folder of the other pictures; name all from one folder"
            ) from error
        return [posixpath.relpath(name, common) for name in names]
    return names


def open_folder(folder: Path) -> Embeddings:
    """Look through a folder of ``images``, ``captions`` and ``index``; SourceError if one is missing or of no use."""
    images, captions = (_file(folder, name, (".npy", ".safetensors")) for name in ("images", "captions"))
    index = _file(folder, "index", (".csv", ".jsonl"))
    return Embeddings.of(Matrix([images]), Matrix([captions]), _index_lines(index), [index])


def _file(folder: Path, name: str, suffixes: tuple[str, ...]) -> Path:
    found = [folder / f"{name}{suffix}" for suffix in suffixes if (folder / f"{name}{suffix}").is_file()]
    if len(found) != 1:
        what = f"holds no {' or '.join(name + suffix for suffix in suffixes)}" if not found else f"holds two {name}"
        raise SourceError(f"{folder} {what}; --from embeddings needs images, captions and index, one file each")
    return found[0]


def _index_lines(index: Path) -> Iterator[Line]:
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
    if not isinstance(row, dict) or not {"file_name", "caption"} <= row.keys() <= {"file_name", "caption", "split"}:
        raise SourceError(f"{where} does not have file_name, caption and at most split besides; correct it")
    name, text, split = row["file_name"], row["caption"], row.get("split")
    if not (isinstance(name, str) and name.strip() and "\0" not in name and isinstance(text, str)):
        raise SourceError(f"{where}: file_name or caption is missing or no text; give it")
    if "split" in row and not (isinstance(split, str) and split):
        raise SourceError(f"{where}: the split is empty or no text; give it")
    return posixpath.normpath(name), text, split and sys.intern(split)


def open_clip_retrieval(folder: Path) -> Embeddings:
    """Look through clip-retrieval's folder.

    Raises:
        SourceError: files are missing or not of their form, or do not fit each other; or pyarrow is not installed.
    """
    parts = {kind: _parts(folder, kind) for kind in _KINDS}
    numbers = sorted(set().union(*parts.values()))
    if not numbers:
        raise SourceError(f"{folder} holds no img_emb_*.npy of clip-retrieval's inference; check --source")
    for kind, files in parts.items():
        if missing := [number for number in numbers if number not in files]:
            there = next(own[missing[0]] for own in parts.values() if missing[0] in own)
            advice = "complete the folder; clip-retrieval's inference writes all three of images and texts"
            raise SourceError(f"{folder} has {there.name} and no part {missing[0]} of {kind}; {advice}")
    images, captions = (Matrix([parts[kind][number] for number in numbers]) for kind in ("img_emb", "text_emb"))
    index = [parts["metadata"][number] for number in numbers]
    return Embeddings.of(images, captions, _metadata_lines(images, captions, index), index)


def _parts(folder: Path, kind: str) -> dict[int, Path]:
    """Return the files of a kind by their number."""
    paths = [path for place in (folder / kind, folder) for path in sorted(place.glob(f"{kind}_*{_KINDS[kind]}"))]
    return {int(found[1]): path for path in paths if (found := re.fullmatch(rf"{kind}_(\d+)", path.stem))}


def _metadata_lines(images: Matrix, captions: Matrix, index: Sequence[Path]) -> Iterator[Line]:
    """Yield image and caption of each row of the metadata, whose parts have as many rows as those of the matrices."""
    pa = require_pyarrow(SourceError, "clip-retrieval's metadata needs")
    for number, path in enumerate(index):
        image, caption = len(images.parts[number]), len(captions.parts[number])
        try:
            with pa.parquet.ParquetFile(path) as file:
                _check_metadata(file, path, pa)
                if not image == caption == file.metadata.num_rows:
                    raise SourceError(
                        f"{images.paths[number]} has {image:,} rows, {captions.paths[number].name} {caption:,} and"
                        f" {path.name} {file.metadata.num_rows:,}; they do not belong together, get the part anew"
                    )
                for batch in file.iter_batches(columns=list(_COLUMNS)):
                    for name, text in zip(*(batch.column(column).to_pylist() for column in _COLUMNS), strict=True):
                        if not name or text is None:
                            missing = "caption" if name else "image_path"
                            raise SourceError(f"{path}: a row has no {missing} ('{name or text}'); repair or remove it")
                        yield posixpath.normpath(name), text, None
        except (OSError, pa.ArrowException) as error:
            raise SourceError(f"{path} is no Parquet file, is damaged or was cut off; get it anew") from error


def _check_metadata(file: Any, path: Path, pa: Any) -> None:
    for column in _COLUMNS:
        if column not in file.schema_arrow.names:
            names = ", ".join(file.schema_arrow.names)
            raise SourceError(
                f"{path} has no column '{column}', but {names}; run clip-retrieval's inference with images and texts"
            )
        type_ = file.schema_arrow.field(column).type
        if not (pa.types.is_string(type_) or pa.types.is_large_string(type_)):
            raise SourceError(f"{path}: column '{column}' is {type_}, not text")
