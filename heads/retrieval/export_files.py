"""The files of an export of embeddings: .npy, Parquet or safetensors, written and read.

Each file says in its metadata, or in `about.json` beside the arrays, what it holds. The arrays are called ``images``
and ``captions``; of a Gaussian ``images.mean`` and ``images.log_variance``, of a sequence ``images.rows`` and
``images.length``. Where hubness is corrected, ``images.bias`` is to be added to the scores of each image as an answer.

    FILE.parquet       a row a sample: modality (image, caption), id, image_id, file_name, caption, and its embedding:
                       lists of D numbers in the column `embedding` (sets and sequences: a list of such lists), or in
                       `mean` and `log_variance`; a `rotation` is a list of its rows in the metadata
    FILE.safetensors   the arrays, `caption_image` (the row of each caption's image, -1 where an earlier export has it),
                       and in the metadata JSON lists image_ids, file_names, caption_ids, caption_image_ids, captions
    FOLDER             an .npy of each array, images.jsonl and captions.jsonl with a line a row, and README.md, the
                       card that the Hugging Face hub shows of a data set
"""

import json
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from safetensors import safe_open
from safetensors.numpy import save_file

from ...pipeline.errors import RunError, require_pyarrow
from ..evaluation.scoring import MODALITIES, Modality

_HEADER = 90_000_000  # bytes of metadata that readers of safetensors surely take
pyarrow = partial(require_pyarrow, RunError, "Parquet needs", ", or export to .safetensors")

_CARD = """\
---
tags:
- image-text-retrieval
- xret
configs:
- config_name: images
  data_files: images.jsonl
  default: true
- config_name: captions
  data_files: captions.jsonl
---

# Embeddings of {dataset}: {part}

Each image and caption is a {kind}, made by the recipe `{recipe}` with xret. What compares
them is: {measure}; larger is closer.

| file | shape |
|---|---|
{files}

Row i belongs to line i of `images.jsonl` or `captions.jsonl`, which have ids, file names and texts. `about.json` has
what made them.
"""

Arrays = dict[str, np.ndarray]
About = dict[str, Any]
Row = dict[str, str]


@dataclass(frozen=True)
class Side:
    """The samples of a modality.

    Attributes:
        rows: of images `id` and `file_name`; of captions `id`, `image_id`, `file_name` and `caption`.
        blocks: their arrays by the names of `tensors_of`, and `bias`, some samples at a time; of a file all at once.
    """

    rows: Sequence[Row]
    blocks: Iterable[Arrays]


@dataclass(frozen=True)
class Export:
    """What an export holds: what it says of itself, its samples, and the `shapes` of the arrays given so far."""

    about: About
    sides: dict[Modality, Side]
    rotation: np.ndarray | None = None
    shapes: dict[str, list[int]] = field(default_factory=dict)

    def blocks(self, modality: Modality) -> Iterator[tuple[list[Row], Arrays]]:
        """Yield the rows and arrays of a modality, some samples at a time."""
        side, first = self.sides[modality], 0
        for arrays in side.blocks:
            last = first + len(next(iter(arrays.values())))
            for part, array in arrays.items():
                self.shapes[name_of(modality, part)] = [len(side.rows), *array.shape[1:]]
            yield [*side.rows[first:last]], arrays
            first = last


def name_of(modality: Modality, part: str) -> str:
    """Return the name of an array of a modality."""
    return modality if part == "embedding" else f"{modality}.{part}"


def as_text(value: Any) -> str:
    """Return a value as the metadata of a safetensors file has it."""
    return value if isinstance(value, str) else json.dumps(value)


def _write_arrays(folder: Path, export: Export) -> Iterator[tuple[Modality, list[Row]]]:
    """Write each array as .npy, some samples at a time, and yield the rows of these samples."""
    for modality in MODALITIES:
        for rows, arrays in export.blocks(modality):
            for part, array in arrays.items():
                name = name_of(modality, part)
                with (folder / f"{name}.npy").open("ab") as file:
                    if not file.tell():
                        facts = {"descr": array.dtype.str, "fortran_order": False, "shape": tuple(export.shapes[name])}
                        np.lib.format.write_array_header_1_0(file, facts)
                    file.write(np.ascontiguousarray(array).data)
            yield modality, rows
    if export.rotation is not None:
        np.save(folder / "rotation.npy", export.rotation)
        export.shapes["rotation"] = [*export.rotation.shape]


def _write_folder(folder: Path, export: Export, _scratch: Path) -> None:
    for modality, rows in _write_arrays(folder, export):
        with (folder / f"{modality}.jsonl").open("a", encoding="utf-8") as file:
            file.writelines(json.dumps(row, ensure_ascii=False) + "\n" for row in rows)
    (folder / "about.json").write_text(json.dumps(export.about, indent=1) + "\n", encoding="utf-8")
    files = "\n".join(f"| `{name}.npy` | {' × '.join(map(str, shape))} |" for name, shape in export.shapes.items())
    card = _CARD.format(**export.about, part=", ".join(export.about["splits"]), files=files)
    (folder / "README.md").write_text(card, encoding="utf-8")


def _read_folder(folder: Path) -> Export:
    rows: dict[Modality, list[Row]] = {}
    for modality in MODALITIES:
        with (folder / f"{modality}.jsonl").open(encoding="utf-8") as lines:
            rows[modality] = list(map(json.loads, lines))
    arrays = {file.stem: np.load(file, mmap_mode="r") for file in folder.glob("*.npy")}
    return _as_export(json.loads((folder / "about.json").read_text(encoding="utf-8")), rows, arrays)


def _as_export(about: About, rows: dict[Modality, list[Row]], arrays: Arrays) -> Export:
    named = [(*name.partition("."), array) for name, array in arrays.items()]
    parts = {side: {part or "embedding": array for of, _, part, array in named if of == side} for side in MODALITIES}
    return Export(about, {side: Side(rows[side], [parts[side]]) for side in MODALITIES})


# What of the rows the metadata of a safetensors file have as lists.
_LISTS: dict[str, tuple[Modality, str]] = {
    "image_ids": ("images", "id"),
    "file_names": ("images", "file_name"),
    "caption_ids": ("captions", "id"),
    "caption_image_ids": ("captions", "image_id"),
    "captions": ("captions", "caption"),
}


def _write_safetensors(path: Path, export: Export, scratch: Path) -> None:
    lists: dict[str, list[str]] = {name: [] for name in _LISTS}
    size = len(json.dumps(export.about))
    for modality, rows in _write_arrays(scratch, export):
        for name, (of, key) in _LISTS.items():
            if of == modality:
                lists[name] += (values := [row[key] for row in rows])
                size += len(json.dumps(json.dumps(values)))
        if size > _HEADER:
            dataset = export.about["dataset"]
            raise RunError(f"{dataset} has too many captions for the header of a safetensors file; take .parquet")
    row_of = {id_: row for row, id_ in enumerate(lists["image_ids"])}
    owners = np.array([row_of.get(id_, -1) for id_ in lists["caption_image_ids"]], dtype=np.int64)
    arrays = {name: np.load(scratch / f"{name}.npy", mmap_mode="r") for name in export.shapes}
    metadata = {name: as_text(value) for name, value in {**export.about, **lists}.items()}
    save_file({**arrays, "caption_image": owners}, path, metadata=metadata)


def _read_safetensors(path: Path) -> Export:
    with safe_open(path, "numpy") as file:
        about, arrays = file.metadata(), {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    rows: dict[Modality, list[Row]] = {}
    for modality in MODALITIES:
        lists = {key: json.loads(about[name]) for name, (of, key) in _LISTS.items() if of == modality}
        rows[modality] = [dict(zip(lists, values, strict=True)) for values in zip(*lists.values(), strict=True)]
    return _as_export({**about, "gone": json.loads(about.get("gone", "{}"))}, rows, arrays)


_COLUMNS = {"images": ("id", "file_name"), "captions": ("id", "image_id", "file_name", "caption")}


def _write_parquet(path: Path, export: Export, _scratch: Path) -> None:
    pa, about, writer = pyarrow(), export.about, None
    if export.rotation is not None:
        about, export.shapes["rotation"] = about | {"rotation": export.rotation.tolist()}, [*export.rotation.shape]
    names = ("modality", "id", "image_id", "file_name", "caption")
    with ExitStack() as opened:
        for modality in MODALITIES:
            for rows, arrays in export.blocks(modality):
                of_side = {"modality": modality.removesuffix("s")}
                rows = [of_side | {"image_id": row["id"]} | row for row in rows]
                columns = {name: pa.array([row.get(name) for row in rows], pa.string()) for name in names}
                table = pa.table(columns | _columns(pa, arrays)).replace_schema_metadata({"xret": json.dumps(about)})
                writer = writer or opened.enter_context(pa.parquet.ParquetWriter(path, table.schema))
                writer.write_table(table)


def _columns(pa: Any, arrays: Arrays) -> dict[str, Any]:
    """Return the columns that hold the arrays of a modality, by name."""

    def lists(rows: np.ndarray) -> Any:
        return pa.FixedSizeListArray.from_arrays(pa.array(rows.reshape(-1)), rows.shape[-1])

    columns = {}
    for name, array in arrays.items():
        if array.ndim == 3:
            length = arrays.get("length", np.full(len(array), array.shape[1]))
            valid = np.arange(array.shape[1]) < length[:, None]
            offsets = np.append(0, np.cumsum(length)).astype(np.int32)
            columns["embedding"] = pa.ListArray.from_arrays(offsets, lists(array[valid]))
        elif name != "length":
            columns[name] = lists(array) if array.ndim == 2 else pa.array(array)
    return columns


def _read_parquet(path: Path) -> Export:
    pa = pyarrow()
    table = pa.parquet.read_table(path)
    about, arrays = json.loads(table.schema.metadata[b"xret"]), Arrays()
    rows: dict[Modality, list[Row]] = {}
    for modality in MODALITIES:
        number = [row for row, name in enumerate(table["modality"].to_pylist()) if modality.startswith(name)]
        part = table.take(pa.array(number, pa.int64()))
        rows[modality] = part.select(_COLUMNS[modality]).to_pylist()
        for name in {"embedding", "mean", "log_variance"}.intersection(table.column_names):
            column, key = part[name].combine_chunks(), modality if name == "embedding" else f"{modality}.{name}"
            if about["kind"] in ("vector", "gaussian"):
                arrays[key] = column.flatten().to_numpy().reshape(-1, column.type.list_size)
                continue
            length, width = column.value_lengths().to_numpy(), column.type.value_type.list_size
            values = np.zeros((len(length), length.max(initial=0), width), dtype=np.float32)
            values[np.arange(values.shape[1]) < length[:, None]] = (
                column.flatten().flatten().to_numpy().reshape(-1, width)
            )
            arrays |= {key: values} if about["kind"] == "set" else {f"{key}.rows": values, f"{key}.length": length}
    return _as_export(about, rows, arrays)


# By the suffix of a file; folders have none, or .npy. A writer may put files into another folder meanwhile.
WRITERS: dict[str, Callable[[Path, Export, Path], None]] = {
    ".parquet": _write_parquet,
    ".safetensors": _write_safetensors,
    "": _write_folder,
    ".npy": _write_folder,
}
READERS = {".parquet": _read_parquet, ".safetensors": _read_safetensors, "": _read_folder}
