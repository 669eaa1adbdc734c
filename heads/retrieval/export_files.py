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
from collections.abc import Callable
from dataclasses import dataclass
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
Rows = dict[Modality, list[dict[str, str]]]


@dataclass(frozen=True)
class Export:
    """What an export holds.

    Attributes:
        about: what it says of itself.
        rows: of images `id` and `file_name`; of captions `id`, `image_id`, `file_name` and `caption`.
        arrays: see the module; those of a modality have a row for each of `rows`.
    """

    about: About
    rows: Rows
    arrays: Arrays

    def of(self, modality: Modality) -> Arrays:
        """Return the arrays of a modality by what follows it in their names."""
        named = ((name.partition("."), array) for name, array in self.arrays.items())
        return {part: array for (side, _, part), array in named if side == modality}


def as_text(value: Any) -> str:
    """Return a value as the metadata of a safetensors file has it."""
    return value if isinstance(value, str) else json.dumps(value)


def _write_folder(folder: Path, export: Export) -> None:
    for name, array in export.arrays.items():
        np.save(folder / f"{name}.npy", array)
    for modality, rows in export.rows.items():
        text = "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows)
        (folder / f"{modality}.jsonl").write_text(text, encoding="utf-8")
    (folder / "about.json").write_text(json.dumps(export.about, indent=1) + "\n", encoding="utf-8")
    files = "\n".join(
        f"| `{name}.npy` | {' × '.join(map(str, array.shape))} |" for name, array in export.arrays.items()
    )
    card = _CARD.format(**export.about, part=", ".join(export.about["splits"]), files=files)
    (folder / "README.md").write_text(card, encoding="utf-8")


def _read_folder(folder: Path) -> Export:
    rows: Rows = {}
    for modality in MODALITIES:
        with (folder / f"{modality}.jsonl").open(encoding="utf-8") as lines:
            rows[modality] = list(map(json.loads, lines))
    arrays = {file.stem: np.load(file, mmap_mode="r") for file in folder.glob("*.npy")}
    return Export(json.loads((folder / "about.json").read_text(encoding="utf-8")), rows, arrays)


# What of `rows` the metadata of a safetensors file have as lists.
_LISTS: dict[str, tuple[Modality, str]] = {
    "image_ids": ("images", "id"),
    "file_names": ("images", "file_name"),
    "caption_ids": ("captions", "id"),
    "caption_image_ids": ("captions", "image_id"),
    "captions": ("captions", "caption"),
}


def _write_safetensors(path: Path, export: Export) -> None:
    lists = {name: [row[key] for row in export.rows[modality]] for name, (modality, key) in _LISTS.items()}
    metadata = {name: as_text(value) for name, value in {**export.about, **lists}.items()}
    if len(json.dumps(metadata)) > _HEADER:
        dataset = export.about["dataset"]
        raise RunError(f"{dataset} has too many captions for the header of a safetensors file; take .parquet")
    row_of = {id_: row for row, id_ in enumerate(lists["image_ids"])}
    owners = np.array([row_of.get(id_, -1) for id_ in lists["caption_image_ids"]], dtype=np.int64)
    save_file({**export.arrays, "caption_image": owners}, path, metadata=metadata)


def _read_safetensors(path: Path) -> Export:
    with safe_open(path, "numpy") as file:
        about, arrays = file.metadata(), {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    rows: Rows = {}
    for modality in MODALITIES:
        lists = {key: json.loads(about[name]) for name, (of, key) in _LISTS.items() if of == modality}
        rows[modality] = [dict(zip(lists, values, strict=True)) for values in zip(*lists.values(), strict=True)]
    return Export({**about, "gone": json.loads(about.get("gone", "{}"))}, rows, arrays)


_COLUMNS = {"images": ("id", "file_name"), "captions": ("id", "image_id", "file_name", "caption")}


def _write_parquet(path: Path, export: Export) -> None:
    pa, about = pyarrow(), export.about
    rows = [
        {"modality": modality.removesuffix("s"), "image_id": row["id"], **row}
        for modality in MODALITIES
        for row in export.rows[modality]
    ]
    names = ("modality", "id", "image_id", "file_name", "caption")
    table = {name: pa.array([row.get(name) for row in rows], pa.string()) for name in names}
    sides = [_columns(pa, export.of(modality)) for modality in MODALITIES]
    table |= {name: pa.chunked_array([side[name] for side in sides]) for name in sides[0]}
    if "rotation" in export.arrays:
        about = about | {"rotation": export.arrays["rotation"].tolist()}
    pa.parquet.write_table(pa.table(table).replace_schema_metadata({"xret": json.dumps(about)}), path)


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
            columns[name or "embedding"] = lists(array) if array.ndim == 2 else pa.array(array)
    return columns


def _read_parquet(path: Path) -> Export:
    pa = pyarrow()
    table = pa.parquet.read_table(path)
    about, rows, arrays = json.loads(table.schema.metadata[b"xret"]), Rows(), Arrays()
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
    return Export(about, rows, arrays)


# By the suffix of a file; folders have none, or .npy.
WRITERS: dict[str, Callable[[Path, Export], None]] = {
    ".parquet": _write_parquet,
    ".safetensors": _write_safetensors,
    "": _write_folder,
    ".npy": _write_folder,
}
READERS = {".parquet": _read_parquet, ".safetensors": _read_safetensors, "": _read_folder}
