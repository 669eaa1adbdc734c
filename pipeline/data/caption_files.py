"""Caption files, Karpathy's JSON, CSV and JSON lines, read into one entry an image."""

import csv
import posixpath
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TextIO

from ..documents import DocumentError, parse_json, read_json
from ..errors import ManifestError, nearest
from .manifest import SPLITS

ROW_KEYS = ("file_name", "caption", "split")


@dataclass(slots=True)
class Entry:
    """One image as its file gives it, before splits, ids and numbers are settled."""

    file_name: str  # normalised POSIX path below the image folder
    split: str | None  # any name; None where the file gives none
    captions: list[tuple[str, int | None]]  # at least one: its text, and the file's number for it if there is one
    imgid: str | None = None  # the file's id of the image; distinct
    cocoid: int = -1  # -1 where there is none
    place: tuple[int, int, int] | None = None  # of a picture that lies in a file with others, see `sources`


def read_entries(path: Path) -> list[Entry]:
    """Read a caption file in its own order; the suffix says which format it has.

    Raises:
        ManifestError: the file cannot be read or has no image, or an image or row is wrong; the message names it.
    """
    entries = _read_karpathy(path) if path.suffix == ".json" else _read_rows(path)
    if not entries:
        raise ManifestError(f"{path}: it has no images; a data set needs at least one.")
    return entries


def _read_karpathy(path: Path) -> list[Entry]:
    try:
        document = read_json(path)
    except OSError as error:
        raise ManifestError(f"{path}: the caption file cannot be read ({error.strerror}).") from error
    except DocumentError as error:
        raise ManifestError(f"{path}: this is not valid JSON ({error}); correct it.") from error
    images = document.get("images") if isinstance(document, dict) else None
    if not isinstance(images, list):
        raise ManifestError(f"{path}: this is not a Karpathy JSON, it has no list 'images'; convert it.")
    entries = []
    named: dict[str, int] = {}
    known: dict[str, int] = {}
    for index, image in enumerate(images):
        where = f"{path}: images[{index}]"
        entry = _karpathy_entry(image, where)
        if (other := named.setdefault(entry.file_name, index)) != index:
            raise ManifestError(f"{where}: images[{other}] has the file '{entry.file_name}' already; remove one.")
        if entry.imgid is not None and (other := known.setdefault(entry.imgid, index)) != index:
            raise ManifestError(f"{where}: images[{other}] has the imgid {entry.imgid} already; correct one.")
        entries.append(entry)
    return entries


def _karpathy_entry(image: Any, where: str) -> Entry:
    """Check one element of ``images``; keys that are not needed are left alone."""
    if not isinstance(image, dict):
        raise ManifestError(f"{where} is not a mapping with 'filename' and 'sentences'; correct it.")
    folder = image.get("filepath", "")
    if not isinstance(folder, str):
        raise ManifestError(f"{where}: 'filepath' is not a text; correct it.")
    name = file_name(image.get("filename"), where, folder)
    where = f"{where} ('{name}')"
    sentences = image.get("sentences")
    if not isinstance(sentences, list) or not sentences:
        raise ManifestError(f"{where} has no sentences; give it at least one, or leave the image out.")
    imgid = image.get("imgid")
    captions = []
    for index, sentence in enumerate(sentences):
        text = _sentence_text(sentence)
        if text is None:
            raise ManifestError(f"{where}: sentences[{index}] has neither 'raw' nor 'tokens'; correct it.")
        if imgid is not None and sentence.get("imgid", imgid) != imgid:
            other = sentence["imgid"]
            raise ManifestError(f"{where}: sentences[{index}] is of imgid {other}, not {imgid}; correct one.")
        captions.append((text, _whole(sentence, "sentid", where)))
    if not isinstance(imgid, int | str | None) or isinstance(imgid, bool) or imgid == "":
        raise ManifestError(f"{where}: 'imgid' is neither a whole number nor a text; correct it.")
    cocoid = _whole(image, "cocoid", where)
    identity = None if imgid is None else str(imgid)
    return Entry(name, _split(image, where), captions, identity, -1 if cocoid is None else cocoid)


def _sentence_text(sentence: Any) -> str | None:
    """Return the raw text, else the tokens with spaces between."""
    if not isinstance(sentence, dict):
        return None
    raw, tokens = sentence.get("raw"), sentence.get("tokens")
    if isinstance(raw, str):
        return raw
    if isinstance(tokens, list) and all(isinstance(token, str) for token in tokens):
        return " ".join(tokens)
    return None


def _whole(mapping: dict[str, Any], key: str, where: str) -> int | None:
    value = mapping.get(key)
    if value is not None and (type(value) is not int or abs(value) >= 2**63):
        raise ManifestError(f"{where}: '{key}' is {value!r}, not a whole number of 64 bits; correct it.")
    return value


def _split(mapping: dict[str, Any], where: str) -> str | None:
    """Return the split that an image or row names; None without the key."""
    if "split" not in mapping:
        return None
    split = mapping["split"]
    if not isinstance(split, str) or not split:
        raise ManifestError(f"{where}: the split is empty or not a text; name one of {', '.join(SPLITS)}.")
    return split


def file_name(name: Any, where: str, folder: str = "") -> str:
    """Join and normalise a path below the image folder."""
    if not isinstance(name, str) or not name.strip():
        raise ManifestError(f"{where}: the file name is missing; name the image of these captions.")
    if "\\" in name + folder or "\0" in name + folder:
        raise ManifestError(f"{where}: '{folder}{name}' is not a path with forward slashes; correct it.")
    joined = posixpath.normpath(posixpath.join(folder, name))
    if joined in (".", "..") or joined.startswith(("/", "../")):
        raise ManifestError(f"{where}: '{joined}' leaves the image folder; name a file inside it.")
    return joined


def _read_rows(path: Path) -> list[Entry]:
    """Gather the rows of a CSV or JSONL file by image, in the order of each image's first row."""
    entries: dict[str, Entry] = {}
    for line, row in _rows(path):
        where = f"{path}: line {line}"
        if unknown := [key for key in row if key not in ROW_KEYS]:
            hint = nearest(str(unknown[0]), list(ROW_KEYS))
            raise ManifestError(f"{where}: unknown key '{unknown[0]}'{hint}; allowed are {', '.join(ROW_KEYS)}.")
        name = file_name(row.get("file_name"), where)
        if not isinstance(row.get("caption"), str):
            raise ManifestError(f"{where} ('{name}'): the caption is missing or not a text; give it.")
        split = _split(row, where)
        entry = entries.setdefault(name, Entry(name, split, []))
        if entry.split != split:
            both = f"'{split or 'none'}' here and '{entry.split or 'none'}' before"
            raise ManifestError(f"{where}: the split of '{name}' is {both}; give it one split.")
        entry.captions.append((row["caption"], None))
    return list(entries.values())


def _rows(path: Path) -> Iterator[tuple[int, dict[str, Any]]]:
    """Yield (line number, row) of a CSV or JSONL file, without empty lines."""
    try:
        with path.open(encoding="utf-8-sig", newline="" if path.suffix == ".csv" else None) as file:
            yield from _csv_rows(file, path) if path.suffix == ".csv" else _jsonl_rows(file, path)
    except OSError as error:
        raise ManifestError(f"{path}: the caption file cannot be read ({error.strerror}).") from error
    except UnicodeDecodeError as error:
        raise ManifestError(f"{path}: this is not UTF-8 ({error.reason}); save it as UTF-8.") from error


def _csv_rows(file: TextIO, path: Path) -> Iterator[tuple[int, dict[str, Any]]]:
    reader = csv.reader(file, strict=True)
    try:
        header = next(reader, [])
        if sorted(header) not in (["caption", "file_name"], ["caption", "file_name", "split"]):
            found = ",".join(header) or "nothing"
            raise ManifestError(f"{path}: line 1: the header must be file_name,caption[,split], not {found}.")
        for row in reader:
            if row and len(row) != len(header):
                counts = f"{len(row)} fields where the header has {len(header)}"
                raise ManifestError(f"{path}: line {reader.line_num}: {counts}; quote a text that has commas.")
            if row:
                yield reader.line_num, dict(zip(header, row, strict=True))
    except csv.Error as error:
        raise ManifestError(f"{path}: line {reader.line_num}: not valid CSV ({error}); correct it.") from error


def _jsonl_rows(file: TextIO, path: Path) -> Iterator[tuple[int, dict[str, Any]]]:
    for line, text in enumerate(file, 1):
        if not text.strip():
            continue
        try:
            row = parse_json(text)
        except DocumentError as error:
            raise ManifestError(f"{path}: line {line}: not valid JSON ({error}); correct it.") from error
        if not isinstance(row, dict):
            raise ManifestError(f"{path}: line {line}: not a mapping of file_name and caption; correct it.")
        yield line, row
