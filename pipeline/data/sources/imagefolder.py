"""An `imagefolder` of `datasets`: pictures in folders, and in each folder a ``metadata.jsonl`` or ``metadata.csv``."""

import csv
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from ...documents import DocumentError, parse_json
from ...errors import ManifestError
from ..caption_files import Entry, file_name
from ..manifest import Packed
from .handles import Fault

_NAMES = ("metadata.jsonl", "metadata.csv")


def imagefolder_entries(folder: Path, packed: Packed, fault: Fault) -> list[Entry]:
    """Return the pictures that the metadata below a folder name, file by file in the order of their paths.

    Without a column of splits, metadata in a folder below are of the split that this folder is called.

    Raises:
        ManifestError: there are no metadata, or a row is wrong.
    """
    entries: dict[str, Entry] = {}
    for path in sorted(path for name in _NAMES for path in folder.rglob(name)):
        below = path.parent.relative_to(folder)
        of_folder = below.parts[0] if below.parts and packed.split_column is None else None
        for where, row in _rows(path):
            name = file_name(row.get("file_name"), where, below.as_posix())
            if name in entries:
                raise ManifestError(f"{where}: '{name}' stands here a second time; give a picture one row.")
            captions = _captions(row, packed, where)
            if not captions:
                fault(f"{where} ('{name}')", "it has no caption; add one, or take the row out")
                continue
            split = of_folder if packed.split_column is None else row.get(packed.split_column)
            if packed.split_column and (not isinstance(split, str) or not split):
                raise ManifestError(f"{where}: '{packed.split_column}' names no split; correct it.")
            entries[name] = Entry(name, split, captions)
    return list(entries.values())


def _rows(path: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield where each row of a metadata file stands, and the row."""
    try:
        with path.open(encoding="utf-8-sig", newline="") as file:
            if path.suffix == ".csv":
                for line in (reader := csv.DictReader(file, strict=True)):
                    yield f"{path}: line {reader.line_num}", dict(line)
                return
            for number, text in enumerate(file, 1):
                if text.strip():
                    row = parse_json(text)
                    if not isinstance(row, dict):
                        raise ManifestError(f"{path}: line {number}: this is no mapping with file_name; correct it.")
                    yield f"{path}: line {number}", row
    except (OSError, UnicodeDecodeError, csv.Error, DocumentError) as error:
        raise ManifestError(f"{path}: this cannot be read ({error}); correct it.") from error


def _captions(row: dict[str, Any], packed: Packed, where: str) -> list[tuple[str, int | None]]:
    texts: list[Any] = []
    for column in packed.caption_columns:
        if column not in row:
            raise ManifestError(
                f"{where}: there is no '{column}'; it has {', '.join(map(str, row))}: name the right ones as"
                " caption_columns."
            )
        value = row[column]
        texts += value if isinstance(value, list) else [value]
    if not all(isinstance(text, str) or text is None for text in texts):
        raise ManifestError(f"{where}: a caption is no text; correct it.")
    return [(text, None) for text in texts if text is not None]
