"""Caption files, an image or a row after the other: Karpathy's and COCO's JSON, CSV, TSV, JSON lines, imagefolders."""

import csv
import json
import re
from collections.abc import Iterator
from itertools import chain
from pathlib import Path
from typing import Any, Literal, TextIO

import numpy as np

from ..documents import DocumentError, json_items, parse_json, reading
from ..errors import ManifestError
from ..files import walk
from .image_columns import NO_NUMBER, Images, ImageSample
from .rows import CAPTIONS, SPLIT_NAMES, RowReader, folder_split, it_has, sentence_text, whole
from .texts import Column, Texts, distinct, ranges, repeated

_SEPARATORS = {".csv": ",", ".tsv": "\t"}
_QUOTE = (
    'quote a text that has a quotation mark in it, and double its marks, as """Hi"" he said", or set quoting: none, by'
    " which marks are plain text, in the manifest"
)
_SUFFIXED = re.compile(r'\.\w{1,5}[ "\r\n]*$').search  # the name of a file, perhaps quoted


def imagefolder_rows(folder: Path, reader: RowReader) -> Iterator[tuple[str, ImageSample]]:
    """Yield the images of each ``metadata.jsonl`` and ``metadata.csv`` below a folder, also in folders that are links.

    The split of a picture is the folder of its metadata file that is called as a split; else the row's; else the first
    folder of its metadata file, whatever it is called, or a folder of its own that is called as a split. A column that
    the manifest names goes before all folders. ManifestError: a row is wrong.
    """
    found = sorted(Path(above, name) for above, _, names in walk(folder) for name in names if name[:9] == "metadata.")
    for path in found:
        if path.name not in ("metadata.jsonl", "metadata.csv"):
            reader.note(f"{path} is passed over; metadata are read from .jsonl and .csv")
            continue
        below = path.parent.relative_to(folder)
        of_folder = next((part for part in below.parts if part in SPLIT_NAMES), (*below.parts, None)[0])
        given = of_folder if reader.columns.split is None and of_folder in SPLIT_NAMES else None
        for where, image in caption_rows(path, reader, below.as_posix(), given):
            if image is not None:
                image.split = image.split or of_folder or folder_split(image.file_name)
                yield where, image


# --- JSON


def read_json_images(path: Path, reader: RowReader) -> Images:
    """Read images in Karpathy's form, where captions stand with them, or COCO's, where they are in ``annotations``.

    ManifestError: the file is damaged or of another form, or an image or annotation is wrong.
    """
    reader.usual = ("sentences", *CAPTIONS)
    document, annotations = dict[str, Any](), _Annotations()
    captioned, bare = False, list[str]()  # whether an image has captions itself; the keys of the last that has none

    def samples() -> Iterator[ImageSample]:
        nonlocal captioned, bare
        for key, number, item in json_items(path):
            where = f"{path}: {key}[{number}]"
            if number is None:
                document[key] = item
            elif key == "images":
                if isinstance(item, dict) and item.keys().isdisjoint(reader.usual):
                    bare = [*item]
                else:
                    captioned = captioned or isinstance(item, dict)
                if (image := _image(item, where, reader)) is not None:
                    yield image
            elif key == "annotations" and not captioned:
                annotations.add(number, item, where, reader)

    with reading(path):
        images = Images(samples())
    if document.get("images") != []:
        way = f" ({it_has(document)}); convert it" if document else "; write each entry on a line of a .jsonl"
        raise ManifestError(f"{path}: this is not a Karpathy JSON, it has no list 'images'{way}.")
    reader.beside |= document.keys() - {"images", "annotations"}
    if joined := document.get("annotations") == [] and not captioned:
        annotations.give(images, path, reader)
    there = "" if joined else f" ({it_has(bare)})"
    without = np.diff(images.edges) == 0
    for row in np.flatnonzero(without).tolist():
        reader.leave_out(f"{path}: '{images.names[row]}': it has no caption{there}; add one, or take the image out")
    if without.any():
        images.join(np.flatnonzero(~without), np.arange(len(images) - without.sum() + 1))
    for what, texts in (("file", images.names), ("imgid", images.ids)):
        if pair := repeated(texts):
            raise ManifestError(f"{path}: the {what} '{texts[pair[0]]}' is that of two images; remove one of them.")
    return images


class _Annotations:
    """The captions of COCO's form in columns."""

    def __init__(self) -> None:
        self.texts, self.sentids = Texts(), Column("q")
        self.owners, self.numbers = Texts(), Column("q")  # the id of each one's image, and its place in the file
        self.faults, self.keys = list[object](), set[str]()

    def add(self, number: int, annotation: Any, where: str, reader: RowReader) -> None:
        """Take an annotation; what is wrong with it counts only where images have no captions themselves."""
        text = sentence_text(annotation) if isinstance(annotation, dict) else None
        try:
            if text is None:
                there = f" ({it_has(annotation)})" if isinstance(annotation, dict) else ""
                raise ManifestError(f"{where} has no 'caption'{there}; take COCO's file of captions, or correct it.")
            sentid = annotation["id"] if isinstance(annotation.get("id"), int) else None
            caption = reader.caption({"raw": text, "sentid": sentid}, "sentences", where, {})
        except ManifestError as error:
            self.faults.append(error)
            return
        self.keys |= annotation.keys() - {"id", "image_id", "raw", "tokens", *CAPTIONS}
        self.texts.append(text)
        self.sentids.append(NO_NUMBER if caption.sentid is None else caption.sentid)
        self.owners.append(str(annotation.get("image_id")))
        self.numbers.append(number)

    def give(self, images: Images, path: Path, reader: RowReader) -> None:
        """Give images their captions, by their ids, which may be a number in one place and a text in another."""
        which = distinct(Texts(chain(images.ids, self.owners)))[1]
        image, owner = which[: len(images)], which[len(images) :]
        for fault in self.faults:
            reader.leave_out(fault)
        numbers = self.numbers.read()
        for row in np.flatnonzero(~np.isin(owner, image)).tolist():
            where, of = f"{path}: annotations[{numbers[row]}]", self.owners[row]
            reader.leave_out(f"{where} is of image {of}, which is not among the images; correct it")
        reader.beside |= self.keys
        order = np.argsort(owner, kind="stable")
        first, last = (np.searchsorted(owner[order], image, side) for side in ("left", "right"))
        images.texts, images.sentids = self.texts, self.sentids.read()
        images.captions, images.edges = order[ranges(first, last - first)], np.append(0, np.cumsum(last - first))


def _image(image: Any, where: str, reader: RowReader) -> ImageSample | None:
    """Return an image of a JSON file; in COCO's form, without captions."""
    try:
        if not isinstance(image, dict) or not isinstance(folder := image.get("filepath", ""), str):
            raise ManifestError(f"{where} is not a mapping with 'filename', 'sentences' and texts in them; correct it.")
        if bare := image.keys().isdisjoint(reader.usual):
            if type(number := image.get("id")) not in (int, str):
                fault = f"has no 'id', by which annotations name it, nor captions ({it_has(image)})"
                raise ManifestError(f"{where} {fault}; give it one.")
            image = {**image, "imgid": number} | ({"cocoid": number} if isinstance(number, int) else {})
        imgid, cocoid = image.get("imgid"), whole(image, "cocoid", where)
        if not isinstance(imgid, int | str | None) or isinstance(imgid, bool) or imgid == "":
            raise ManifestError(f"{where}: 'imgid' is neither a whole number nor a text; correct it.")
    except ManifestError as error:
        reader.leave_out(error)
        return None
    sample = reader.image(image, where, folder=folder, bare=bare)
    if sample is not None:
        sample.id, sample.cocoid = None if imgid is None else str(imgid), -1 if cocoid is None else cocoid
    return sample


# --- Rows


def caption_rows(
    path: Path, reader: RowReader, folder: str | None = None, split: str | None = None
) -> Iterator[tuple[str, ImageSample | None]]:
    """Yield the place of each row of a CSV, TSV or JSONL file and its image, None where it is left out.

    Empty lines are no rows. A caption field holds a text, in JSON also null or a list of texts. The names of images
    start at `folder`; None: they are taken as they are. `split` is that of all rows; None: as they say. ManifestError:
    the file cannot be read, a column is missing, or a row is wrong; the message names the line.
    """
    with reading(path), path.open(encoding="utf-8-sig", newline="") as file:
        for line, row in (_json_lines if path.suffix == ".jsonl" else _csv_rows)(file, path, reader):
            where = f"{path}: line {line}"
            yield where, None if row is None else reader.image(row, where, split, folder=folder)


def _csv_rows(file: TextIO, path: Path, reader: RowReader) -> Iterator[tuple[int, dict[str, Any] | None]]:
    """Yield the first line and the fields of each row, None where it is left out.

    A quotation mark that nothing closes takes in the rows that follow. So a row of several lines is refused, and never
    left out, if its first line and another could be rows.
    """
    separator, quoting = reader.columns.separator or _SEPARATORS[path.suffix], reader.columns.quoting
    rows = _fields(file, separator, csv.QUOTE_NONE if quoting == "none" else csv.QUOTE_MINIMAL)
    _, lines, header, fault = next(rows, (1, [], [], ""))
    if fault or len(lines) != 1 or not _names_columns(header):
        fault = fault or "it names no columns, or two that are called the same, or is not UTF-8; correct it"
        raise ManifestError(f"{path}: line 1: {fault}.")
    at = header.index(reader.find(tuple(header), f"{path}: line 1").image)
    for first, lines, row, fault in rows:
        if row and len(row) != len(header):
            fault = f"{len(row)} fields where the header has {len(header)}"
            fault += f"; quote a text that has {json.dumps(separator)} in it" if quoting != "none" else ""
        elif row and lines[1:] and quoting is None:
            fault = _row_within(lines, row, at, separator)
        if fault and len(lines) > 1:
            raise ManifestError(f"{path}: lines {first} to {first + len(lines) - 1}: {fault}.")
        if fault:
            reader.leave_out(f"{path}: line {first}: {fault}")
        if row or fault:
            yield first, None if fault else dict(zip(header, row, strict=True))


def _fields(file: TextIO, separator: str, how: Literal[0, 3]) -> Iterator[tuple[int, list[str], list[str], str]]:
    """Yield of each row the number of its first line, its lines, its fields, and what is wrong with its quoting."""
    lines: list[str] = []

    def taken() -> Iterator[str]:
        for line in file:
            lines.append(line)
            yield line

    rows = csv.reader(taken(), delimiter=separator, strict=True, quoting=how)
    row: list[str] | None = []
    while row is not None:
        lines.clear()
        try:
            row, fault = next(rows, None), ""
        except csv.Error as error:
            problem = str(error).replace("\t", "\\t")
            row, fault = [], f"a text begins with a quotation mark and does not end with it ({problem}); {_QUOTE}"
        if row is not None:
            yield rows.line_num - len(lines) + 1, lines, row, fault


def _names_columns(header: list[str]) -> bool:
    named = [name for name in header if name]
    return len(named) == len({*named}) > 0 and "\0" not in "".join(named)


def _row_within(lines: list[str], row: list[str], at: int, separator: str) -> str:
    """Return what is wrong with a row of several lines of which another could be a row, as the first could.

    The name of an image stands at `at`.
    """

    def is_row(line: str) -> bool:
        fields = line.split(separator)
        return len(fields) >= len(row) and bool(_SUFFIXED(fields[at])) == bool(_SUFFIXED(row[at]))

    if not is_row(lines[0]) or (line := next(filter(is_row, lines[1:]), None)) is None:
        return ""
    shown = json.dumps(line.strip()[:40], ensure_ascii=False)
    opens = f"a quotation mark opens a text in which {shown} would be a row of its own"
    return f"{opens}; {_QUOTE}, or quoting: csv, by which such texts are right"


def _json_lines(file: TextIO, path: Path, reader: RowReader) -> Iterator[tuple[int, dict[str, Any] | None]]:
    for line, text in enumerate(file, 1):
        if text.strip():
            row, fault = None, "not a mapping of columns to values"
            try:
                row = parse_json(text)
            except DocumentError as error:
                fault = f"not valid JSON ({error})"
            if not isinstance(row, dict):
                reader.leave_out(f"{path}: line {line}: {fault}; correct it")
            yield line, row if isinstance(row, dict) else None
