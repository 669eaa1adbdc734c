"""Rows of CSV, TSV and JSON lines: a picture's name, its captions and its split, whatever the columns are called."""

import csv
import json
from collections.abc import Iterator
from dataclasses import dataclass
from difflib import get_close_matches
from pathlib import Path
from typing import Any, TextIO

from ..documents import DocumentError, parse_json
from ..errors import ManifestError
from ..wording import printable, some_of
from .manifest import SEPARATORS, SPLITS, Columns

_IMAGE = "file_name"  # the column, where the manifest does not say
_SHOWN, _LONGEST = 20, 40  # names of columns in a message, and characters of each


@dataclass(slots=True)
class CaptionRow:
    """One row of a file."""

    where: str  # file and line, for messages
    image: Any  # whatever stands where the file name should
    captions: list[str]  # perhaps none
    split: str | None  # None where there is no such column


def caption_rows(path: Path, columns: Columns, split: str | None = "split") -> Iterator[CaptionRow]:
    """Yield the rows of a file, without empty lines; its suffix says which of the formats it has.

    A caption field holds a text, in JSON also null or a list of texts. Where captions have several columns, an empty
    field is no caption.

    Args:
        path: the file.
        columns: what its columns or keys are called.
        split: the column of splits where `columns` names none; it may be missing. None: splits are not looked for.

    Raises:
        ManifestError: the file cannot be read, a column is missing, or a row is wrong; the message names the line.
    """
    before: tuple[str, ...] | None = None
    for line, row in _rows(path, columns, split):
        where, keys = f"{path}: line {line}", tuple(row)
        if keys != before:
            image, captions, by = _names(columns, keys, split, where)
            before = keys
        yield CaptionRow(where, row[image], _texts(row, captions, where), split_of(row, by, where))


def split_of(mapping: dict[str, Any], key: str | None, where: str) -> str | None:
    """Return the split that an image or row names; None without the key."""
    if key is None or key not in mapping:
        return None
    split = mapping[key]
    if not isinstance(split, str) or not split:
        raise ManifestError(f"{where}: the split is empty or not a text; name one of {', '.join(SPLITS)}.")
    return split


def _names(
    columns: Columns, there: tuple[str, ...], split: str | None, where: str
) -> tuple[str, tuple[str, ...], str | None]:
    """Return the columns of picture, captions and split; there may be none of splits unless the manifest names it."""
    image, captions, split = columns.image or _IMAGE, columns.captions_in(there), columns.split or split
    wanted = [image, *captions, *([split] if columns.split else [])]
    if missing := [name for name in wanted if name not in there]:
        advice = "name the right ones as image_column, caption_columns and split_column in the manifest"
        raise ManifestError(f"{where}: there is no column '{missing[0]}'; it has {_listed(there)}: {advice}.")
    like = [name for name in there if split and get_close_matches(split, [name.strip().lower()], cutoff=0.8)]
    if like and split not in there:
        advice = "rename it, or name it as split_column in the manifest"
        raise ManifestError(f"{where}: there is no column '{split}', and one called {_listed(like[:1])}; {advice}.")
    return image, captions, split


def _listed(names: tuple[str, ...] | list[str]) -> str:
    return ", ".join(some_of([f"'{printable(name)[:_LONGEST]}'" for name in names], _SHOWN)) or "none"


def _texts(row: dict[str, Any], columns: tuple[str, ...], where: str) -> list[str]:
    """Return the captions of a row: those of its columns, one after the other."""
    texts: list[Any] = []
    for column in columns:
        value = row[column]
        texts += value if isinstance(value, list) else [value]
    if not all(isinstance(text, str) or text is None for text in texts):
        raise ManifestError(f"{where}: a caption is no text; correct it.")
    return [text for text in texts if text is not None and (len(columns) == 1 or text.strip())]


def _rows(path: Path, columns: Columns, split: str | None) -> Iterator[tuple[int, dict[str, Any]]]:
    """Yield (line number, row) of a file."""
    try:
        if path.suffix == ".jsonl":
            with path.open(encoding="utf-8-sig") as file:
                yield from _jsonl_rows(file, path)
        else:
            with path.open(encoding="utf-8-sig", newline="") as file:
                yield from _csv_rows(file, path, columns, split)
    except OSError as error:
        raise ManifestError(f"{path}: the caption file cannot be read ({error.strerror}).") from error
    except UnicodeDecodeError as error:
        raise ManifestError(f"{path}: this is not UTF-8 ({error.reason}); save it as UTF-8.") from error


def _csv_rows(file: TextIO, path: Path, columns: Columns, split: str | None) -> Iterator[tuple[int, dict[str, Any]]]:
    separator = columns.separator or SEPARATORS[path.suffix]
    reader = csv.reader(file, delimiter=separator, strict=True)
    try:
        header = next(reader, [])
        _check_header(header, columns, split, separator, f"{path}: line {max(reader.line_num, 1)}")
        for row in reader:
            if row and len(row) != len(header):
                counts = f"{len(row)} fields where the header has {len(header)}"
                advice = f"quote a text that has {json.dumps(separator)} in it"
                raise ManifestError(f"{path}: line {reader.line_num}: {counts}; {advice}.")
            if row:
                yield reader.line_num, dict(zip(header, row, strict=True))
    except csv.Error as error:
        raise ManifestError(f"{path}: line {reader.line_num}: not valid CSV ({error}); correct it.") from error


def _check_header(header: list[str], columns: Columns, split: str | None, separator: str, where: str) -> None:
    """Refuse a header that is empty, names a column twice, lacks one, or was written with another separator."""
    if not header:
        raise ManifestError(f"{where}: it is empty, and the first line names the columns; write them there.")
    if twice := [name for number, name in enumerate(header) if name and name in header[:number]]:
        raise ManifestError(f"{where}: two columns are called {_listed(twice[:1])}; rename one.")
    other = next((mark for mark in ",;\t|" if mark in header[0]), None)
    if len(header) == 1 and other is not None:
        found = f"with {json.dumps(separator)} between columns there is but one, {_listed(header)}"
        raise ManifestError(
            f"{where}: {found}; if it should be {json.dumps(other)}, say so as separator in the manifest."
        )
    _names(columns, tuple(header), split, where)


def _jsonl_rows(file: TextIO, path: Path) -> Iterator[tuple[int, dict[str, Any]]]:
    for line, text in enumerate(file, 1):
        if not text.strip():
            continue
        try:
            row = parse_json(text)
        except DocumentError as error:
            raise ManifestError(f"{path}: line {line}: not valid JSON ({error}); correct it.") from error
        if not isinstance(row, dict):
            raise ManifestError(f"{path}: line {line}: not a mapping of columns to values; correct it.")
        yield line, row
