"""Which files hold embeddings of images, of captions and their index, and where the vectors stand in them."""

import re
import zipfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import accumulate
from pathlib import Path
from typing import Any

import numpy as np

from ...documents import reading
from ...errors import require_pyarrow
from ...wording import some_of
from .source import SourceError, map_floats, shown

# Of images, of captions and of their index: the names of files or folders.
_NAMES = {"image": ("images", "img_emb"), "text": ("captions", "text_emb"), "index": ("index", "metadata")}
SIDES = {"image": ("image", "img"), "text": ("text", "txt", "caption")}  # in the names of vectors
reading_file = partial(reading, advice="copy it again", errors=Exception)
arrow = partial(require_pyarrow, SourceError, "Parquet needs")


@dataclass(frozen=True)
class Part:
    """Vectors in a file: a ``.npy``, an array of a ``.npz``, or a column of a row group of a ``.parquet``."""

    path: Path
    shape: tuple[int, ...]
    dtype: "np.dtype[Any]"
    array: str = ""  # the name of array or column
    group: int = 0
    first: int = 0  # its first row in the file

    def load(self) -> np.ndarray:
        """Return the vectors [n,C], mapped or read; SourceError if they are damaged."""
        if self.path.suffix == ".npy":
            return map_floats(self.path, 2)
        with reading_file(self.path):
            if self.path.suffix == ".npz":
                with np.load(self.path, allow_pickle=False) as file:
                    return np.asarray(file[self.array])
            pa = arrow()
            with pa.parquet.ParquetFile(self.path) as file:
                column = _lists(file.read_row_group(self.group, columns=[self.array]).column(0).combine_chunks())
            there, lengths = column.is_valid().to_numpy(False), pa.compute.list_value_length(column).to_numpy(False)
            if (odd := np.flatnonzero(there & (lengths != self.shape[1]))).size:
                raise SourceError(
                    f"{self.path}: '{self.array}' has {lengths[odd[0]]:.0f} numbers in row {self.first + odd[0]:,}, and"
                    f" {self.shape[1]} in the first; keep the embeddings of one model in a column"
                )
            values = np.full(self.shape, np.nan, self.dtype)  # of a row that is null
            values[there] = column.flatten().to_numpy(zero_copy_only=False).reshape(-1, self.shape[1])
            return values


def files_in_parts(place: Path) -> dict[str, list[Path]]:
    """Return the files of images, captions and index: of each one, or the same parts as of the others."""
    files = {role: _files(place, role, ".npy") or _files(place, role, ".parquet") for role in SIDES}
    if not any(files.values()):
        return {}
    files["index"] = _files(place, "index", ".csv", ".jsonl", ".parquet") or _files(place, "text", ".parquet")
    several = {role: parts for role, parts in files.items() if len(parts) > 1 or any(map(str.isdigit, parts))}
    keys = sorted(set[str]().union(*several.values()), key=lambda key: (len(key), key))
    lacking = [" or ".join(_NAMES[role]) for role, parts in files.items() if not parts]
    lacking += [
        f"part {key} of {_NAMES[role][0]}" for role, parts in several.items() for key in keys if key not in parts
    ]
    if lacking:
        raise SourceError(f"{place} lacks {', '.join(some_of(lacking))}; complete it: images, captions and index")
    ordered = {role: [parts[key] for key in keys if key in parts] or [*parts.values()] for role, parts in files.items()}
    if len(ordered["index"]) == 1:
        _require_one_order(ordered)
    return ordered


def _require_one_order(files: Mapping[str, Sequence[Path]]) -> None:
    """Refuse parts that are in another order by number than by name where a single index does not say which counts."""
    for paths in files.values():
        if [*paths] != sorted(paths):
            raise SourceError(
                f"{paths[0].parent}: '{paths[0].name}' to '{paths[-1].name}' are in another order by number than by"
                f" name, and {files['index'][0].name} does not say which counts; give the numbers leading zeros"
            )


def _files(place: Path, role: str, *suffixes: str) -> dict[str, Path]:
    """Return the files of a role by the numbers that they end in, or by their names."""
    files: dict[str, Path] = {}
    for name in _NAMES[role]:
        here = [path for path in place.glob(f"{name}*") if re.fullmatch(rf"{name}[_-]?\d*", path.stem)]
        for path in sorted([*here, *(place / name).glob("*")]):
            number = re.search(r"\d+$", path.stem)
            key = str(int(number[0])) if number else path.stem
            if path.suffix in suffixes and files.setdefault(key, path) != path:
                raise SourceError(f"{path} and {files[key]} are the same part; remove one")
    return files


def files_in_tables(place: Path) -> dict[str, list[Path]]:
    """Return the same of Parquet files that hold the vectors of both, or beside which a ``.npz`` does."""
    there = {place} if place.is_file() else {*place.rglob("*.parquet"), *place.rglob("*.npz")}
    index = sorted({path.with_suffix(".parquet") for path in there if path.suffix in (".parquet", ".npz")})
    if not index:
        raise SourceError(
            f"{place} holds no embeddings: neither images, captions and index, nor img_emb, text_emb and metadata, nor"
            " Parquet files with both; check --source"
        )
    beside = [path.with_suffix(".npz") for path in index]
    packed = any(path.is_file() for path in beside)
    for path, other in zip([*index, *beside], [*beside, *index], strict=True):
        if not path.is_file() and (packed or path.suffix == ".parquet"):
            raise SourceError(f"{other} has no {path.name} beside it; complete the folder")
    vectors = beside if packed else index
    return {"image": vectors, "text": vectors, "index": index}


def vectors_in(path: Path, side: str, apart: bool, named: Mapping[str, str]) -> list[Part]:
    """Return the vectors of a side in a file, which are `apart` from the other's; SourceError if they are not there."""
    if path.suffix == ".npy":
        values = map_floats(path, 2)
        return [Part(path, values.shape, values.dtype)]
    with reading_file(path):
        if path.suffix == ".npz":
            with zipfile.ZipFile(path) as archive:
                array = _choose(path, [name.removesuffix(".npy") for name in archive.namelist()], side, apart, named)
                with archive.open(f"{array}.npy") as file:
                    old = np.lib.format.read_magic(file) == (1, 0)
                    read = np.lib.format.read_array_header_1_0 if old else np.lib.format.read_array_header_2_0
                    shape, _, dtype = read(file)
            parts = [Part(path, shape, dtype, array)]
        else:
            parts = _row_groups(path, side, apart, named)
    for part in parts or [Part(path, (0, 0), np.dtype(np.float32))]:
        if len(part.shape) != 2 or 0 in part.shape or part.dtype.kind != "f":
            raise SourceError(f"{path}: '{part.array}' is {shown(part)}, not floats in 2 dimensions; check --source")
    return parts


def _row_groups(path: Path, side: str, apart: bool, named: Mapping[str, str]) -> list[Part]:
    pa = arrow()
    with pa.parquet.ParquetFile(path) as file:
        kinds = {field.name: getattr(field.type, "value_type", pa.null()) for field in file.schema_arrow}
        array = _choose(path, [name for name in kinds if pa.types.is_floating(kinds[name])], side, apart, named)
        vectors = (value for batch in file.iter_batches(1024, columns=[array]) for value in _lists(batch.column(0)))
        width = next((len(vector) for vector in vectors if vector.is_valid), 0)
        rows = [file.metadata.row_group(group).num_rows for group in range(file.num_row_groups)]
    dtype, first = np.dtype(kinds[array].to_pandas_dtype()), [0, *accumulate(rows)]
    return [Part(path, (count, width), dtype, array, group, first[group]) for group, count in enumerate(rows)]


def _lists(column: Any) -> Any:
    """Return a column of vectors as one of lists, which a column of tensors holds."""
    return getattr(column, "storage", column)


def _choose(path: Path, names: Sequence[str], side: str, apart: bool, named: Mapping[str, str]) -> str:
    """Return which of the vectors in a file are of a side: what is named, else the only one whose name says it."""
    fitting = [name for name in names if any(word in name.lower() for word in SIDES[side])]
    fitting = [named[side]] if side in named else [*names] if apart and len(names) == 1 else fitting
    if len(fitting) != 1 or fitting[0] not in names:
        what = f"the vectors {', '.join(names)}" if names else "no vectors"
        raise SourceError(
            f"{path} has {what}; name those of images and captions, as --arrays image=l14_img,text=l14_txt"
        )
    return fitting[0]
