"""Caption files, read into an entry for each image: Karpathy's and COCO's JSON, CSV, TSV, JSON lines, imagefolders."""

import csv
import json
import posixpath
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from difflib import get_close_matches
from pathlib import Path
from typing import Any, TextIO

from ..documents import DocumentError, parse_json, read_json
from ..errors import ManifestError
from ..wording import some_of
from .manifest import SPLITS, Columns

Fault = Callable[[str, str], None]  # takes where and what is wrong: raises, or notes that a sample is left out

_IMAGE = "file_name"  # the default column
_CALLED = (*SPLITS, "validation")
_SEPARATORS = {".csv": ",", ".tsv": "\t"}
_NO_CAPTION = "it has no caption; add one, or take the row out"


@dataclass(slots=True)
class Entry:
    """One image as its file gives it, before splits, ids and numbers are settled."""

    file_name: str  # normalised POSIX path below the image folder
    split: str | None  # any name; None where the file gives none
    captions: list[tuple[str, int | None]]  # at least one: its text, and the file's number for it if there is one
    imgid: str | None = None  # the file's id of the image; distinct
    cocoid: int = -1  # -1 where there is none
    place: tuple[int, int, int] | None = None  # of a picture that lies in a file with others, see `sources`


@dataclass(slots=True)
class CaptionRow:
    """One row of a file."""

    where: str  # file and line, for messages
    image: Any  # whatever stands in the image's column
    captions: list[str]  # perhaps none
    split: str | None  # None where there is no such column


@dataclass(frozen=True, slots=True)
class RowColumns:
    """The columns of a file, as they were found in it."""

    image: str
    captions: tuple[str, ...]
    split: str | None

    @classmethod
    def find(cls, columns: Columns, there: tuple[str, ...], where: str, split: str | None = "split") -> "RowColumns":
        """Find the columns that a manifest names among those that are there; ManifestError where one is missing.

        `split` is the default column of splits, which may be missing; None: splits are not looked for.
        """
        image, captions, split = columns.image or _IMAGE, columns.captions_in(there), columns.split or split
        wanted = [image, *captions, *([columns.split] if columns.split else [])]
        if missing := [name for name in wanted if name not in there]:
            listed = ", ".join(some_of([f"'{name}'" for name in there], 20))
            advice = "name the right ones, or the separator of a table, in the manifest"
            raise ManifestError(f"{where}: there is no column '{missing[0]}'; it has {listed}: {advice}.")
        like = [name for name in there if split and get_close_matches(split, [name.strip().lower()], cutoff=0.8)]
        if like and split not in there:
            advice = "rename it, or name it as split_column in the manifest"
            raise ManifestError(f"{where}: there is no column '{split}', and one called '{like[0]}'; {advice}.")
        return cls(image, captions, split if split in there else None)

    def row(self, values: dict[str, Any], where: str) -> CaptionRow:
        """Return a row of these values by column; ManifestError where a caption or the split is not a text.

        Captions of several columns follow one another; an empty one among several columns is no caption.
        """
        texts: list[Any] = []
        for column in self.captions:
            value = values[column]
            texts += value if isinstance(value, list) else [value]
        if not all(isinstance(text, str | None) for text in texts):
            raise ManifestError(f"{where}: a caption is no text; correct it.")
        captions = [text for text in texts if text is not None and (len(self.captions) == 1 or text.strip())]
        return CaptionRow(where, values.get(self.image), captions, _split(values, self.split, where))


def read_entries(path: Path, columns: Columns, fault: Fault) -> list[Entry]:
    """Read a caption file, whose suffix says its format, in the order of each image's first row.

    `fault` is called for a row without captions. ManifestError: the file cannot be read, or an image or row is wrong.
    """
    if path.suffix == ".json":
        return _read_json(path)
    entries: dict[str, Entry] = {}
    for row in caption_rows(path, columns):
        name = file_name(row.image, row.where)
        if not row.captions:
            fault(f"{row.where} ('{name}')", _NO_CAPTION)
            continue
        entry = entries.setdefault(name, Entry(name, row.split, []))
        if entry.split != row.split:
            both = f"'{row.split or 'none'}' here and '{entry.split or 'none'}' before"
            raise ManifestError(f"{row.where}: the split of '{name}' is {both}; give it one split.")
        entry.captions += [(text, None) for text in row.captions]
    return list(entries.values())


def read_imagefolder(folder: Path, columns: Columns, fault: Fault) -> list[Entry]:
    """Read each ``metadata.jsonl`` and ``metadata.csv`` below a folder, in order of the paths.

    The split of a picture is the first folder of its metadata file if it is called as a split; else the row's; else
    that folder whatever it is called, or the picture's own if it is called as a split. A column that the manifest names
    goes before all folders. `fault` is called for a row without captions. ManifestError: a row is wrong.
    """
    entries: dict[str, Entry] = {}
    for path in sorted(path for kind in ("jsonl", "csv") for path in folder.rglob(f"metadata.{kind}")):
        below = path.parent.relative_to(folder)
        of_folder = below.parts[0] if below.parts else None
        by_folder = columns.split is None and of_folder in _CALLED
        for row in caption_rows(path, columns, None if by_folder else "split"):
            name = file_name(row.image, row.where, below.as_posix())
            first = name.partition("/")[0]
            split = of_folder if by_folder else row.split or of_folder or (first if first in _CALLED else None)
            if name in entries:
                raise ManifestError(f"{row.where}: '{name}' stands here a second time; give a picture one row.")
            if row.captions:
                entries[name] = Entry(name, split, [(text, None) for text in row.captions])
            else:
                fault(f"{row.where} ('{name}')", _NO_CAPTION)
    return list(entries.values())


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


# --- JSON


def _read_json(path: Path) -> list[Entry]:
    """Read Karpathy's form, where captions stand with their image, or COCO's, where they stand in ``annotations``."""
    try:
        document = read_json(path)
    except OSError as error:
        raise ManifestError(f"{path}: the caption file cannot be read ({error.strerror}).") from error
    except DocumentError as error:
        raise ManifestError(f"{path}: this is not valid JSON ({error}); correct it.") from error
    images = document.get("images") if isinstance(document, dict) else None
    if not isinstance(images, list):
        raise ManifestError(f"{path}: this is not a Karpathy JSON, it has no list 'images'; convert it.")
    annotations = document.get("annotations")
    if isinstance(annotations, list) and not any(isinstance(one, dict) and "sentences" in one for one in images):
        images = _with_sentences(images, annotations, path)
    entries: list[Entry] = []
    numbers: dict[tuple[str, str], int] = {}
    for index, image in enumerate(images):
        where = f"{path}: images[{index}]"
        entries.append(entry := _karpathy_entry(image, where))
        for kind, key in (("file", entry.file_name), ("imgid", entry.imgid)):
            if key is not None and (other := numbers.setdefault((kind, key), index)) != index:
                raise ManifestError(f"{where}: images[{other}] has the {kind} '{key}' already; correct one.")
    return entries


def _with_sentences(images: list[Any], annotations: list[Any], path: Path) -> list[Any]:
    """Return the images of COCO's form in Karpathy's, which has the captions with them."""
    sentences: dict[int | str, list[Any]] = {}
    for index, image in enumerate(images):
        if not isinstance(image, dict) or not isinstance(image.get("id"), int | str):
            raise ManifestError(f"{path}: images[{index}] has no 'id', by which annotations name it; give it one.")
        sentences[image["id"]] = []
    for index, annotation in enumerate(annotations):
        where = f"{path}: annotations[{index}]"
        if not isinstance(annotation, dict) or not isinstance(annotation.get("caption"), str):
            raise ManifestError(f"{where} has no 'caption'; take COCO's file of captions, or correct it.")
        of, number = annotation.get("image_id"), annotation.get("id")
        if not isinstance(of, int | str) or of not in sentences:
            raise ManifestError(f"{where} is of image {of!r}, which is not among the images; correct it.")
        sentences[of].append({"raw": annotation["caption"], "sentid": number if isinstance(number, int) else None})
    found = []
    for image in images:
        known = {"imgid": image["id"], "sentences": sentences[image["id"]]}
        found.append({**image, **known, **({} if isinstance(image["id"], str) else {"cocoid": image["id"]})})
    return found


def _karpathy_entry(image: Any, where: str) -> Entry:
    """Check one element of ``images``; other keys are left alone."""
    if not isinstance(image, dict) or not isinstance(folder := image.get("filepath", ""), str):
        raise ManifestError(f"{where} is not a mapping with 'filename', 'sentences' and texts in them; correct it.")
    name = file_name(image.get("filename", image.get("file_name")), where, folder)
    where = f"{where} ('{name}')"
    sentences, imgid = image.get("sentences"), image.get("imgid")
    if not isinstance(sentences, list) or not sentences:
        raise ManifestError(f"{where} has no sentences; give it at least one, or leave the image out.")
    captions = []
    for index, sentence in enumerate(sentences):
        text = _sentence_text(sentence)
        if text is None:
            raise ManifestError(f"{where}: sentences[{index}] has neither 'raw' nor 'tokens'; correct it.")
        if imgid is not None and (other := sentence.get("imgid", imgid)) != imgid:
            raise ManifestError(f"{where}: sentences[{index}] is of imgid {other}, not {imgid}; correct one.")
        captions.append((text, _whole(sentence, "sentid", where)))
    if not isinstance(imgid, int | str | None) or isinstance(imgid, bool) or imgid == "":
        raise ManifestError(f"{where}: 'imgid' is neither a whole number nor a text; correct it.")
    cocoid = _whole(image, "cocoid", where)
    identity = None if imgid is None else str(imgid)
    return Entry(name, _split(image, "split", where), captions, identity, -1 if cocoid is None else cocoid)


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


def _split(mapping: dict[str, Any], key: str | None, where: str) -> str | None:
    """Return the split of an image or row; None without the key."""
    if key is None or key not in mapping:
        return None
    split = mapping[key]
    if not isinstance(split, str) or not split:
        raise ManifestError(f"{where}: the split is empty or not a text; name one of {', '.join(SPLITS)}.")
    return split


# --- Rows


def caption_rows(path: Path, columns: Columns, split: str | None = "split") -> Iterator[CaptionRow]:
    """Yield the rows of a CSV, TSV or JSONL file, without empty lines; `split` is that of `RowColumns.find`.

    A caption field holds a text, in JSON also null or a list of texts. ManifestError: the file cannot be read, a column
    is missing, or a row is wrong; the message names the line.
    """
    before: tuple[str, ...] = ()
    try:
        with path.open(encoding="utf-8-sig", newline="") as file:
            for line, row in _json_lines(file, path) if path.suffix == ".jsonl" else _csv_rows(file, path, columns):
                where, keys = f"{path}: line {line}", tuple(row)
                if keys != before:
                    found, before = RowColumns.find(columns, keys, where, split), keys
                if row[found.image] is not _HEADER:
                    yield found.row(row, where)
    except OSError as error:
        raise ManifestError(f"{path}: the caption file cannot be read ({error.strerror}).") from error
    except UnicodeDecodeError as error:
        raise ManifestError(f"{path}: this is not UTF-8 ({error.reason}); save it as UTF-8.") from error


_HEADER = object()  # stands in every column of a table's first row


def _csv_rows(file: TextIO, path: Path, columns: Columns) -> Iterator[tuple[int, dict[str, Any]]]:
    """Yield the line and the fields of each row; first those of the header, so that it is checked before all rows."""
    separator = columns.separator or _SEPARATORS[path.suffix]
    reader = csv.reader(file, delimiter=separator, strict=True)
    try:
        header = next(reader, [])
        named = [name for name in header if name]
        if not named or len({*named}) < len(named):
            raise ManifestError(f"{path}: line 1: it names no columns, or two that are called the same; correct it.")
        yield 1, dict.fromkeys(header, _HEADER)
        for row in reader:
            if row and len(row) != len(header):
                counts = f"{len(row)} fields where the header has {len(header)}"
                advice = f"quote a text that has {json.dumps(separator)} in it"
                raise ManifestError(f"{path}: line {reader.line_num}: {counts}; {advice}.")
            if row:
                yield reader.line_num, dict(zip(header, row, strict=True))
    except csv.Error as error:
        raise ManifestError(f"{path}: line {reader.line_num}: not valid CSV ({error}); correct it.") from error


def _json_lines(file: TextIO, path: Path) -> Iterator[tuple[int, dict[str, Any]]]:
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
