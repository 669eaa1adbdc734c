"""Caption files, Karpathy's and COCO's JSON, CSV, TSV and JSON lines, read into one entry an image."""

import posixpath
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..documents import DocumentError, read_json
from ..errors import ManifestError
from .caption_rows import caption_rows, split_of
from .manifest import Columns

Fault = Callable[[str, str], None]  # takes where and what is wrong: raises, or notes that a sample is left out


@dataclass(slots=True)
class Entry:
    """One image as its file gives it, before splits, ids and numbers are settled."""

    file_name: str  # normalised POSIX path below the image folder
    split: str | None  # any name; None where the file gives none
    captions: list[tuple[str, int | None]]  # at least one: its text, and the file's number for it if there is one
    imgid: str | None = None  # the file's id of the image; distinct
    cocoid: int = -1  # -1 where there is none
    place: tuple[int, int, int] | None = None  # of a picture that lies in a file with others, see `sources`


def read_entries(path: Path, columns: Columns, fault: Fault) -> list[Entry]:
    """Read a caption file in its own order.

    Args:
        path: the file; its suffix says which format it has.
        columns: what its columns or keys are called; of JSON they are always the same.
        fault: hears of a row without captions.

    Raises:
        ManifestError: the file cannot be read or has no image, or an image or row is wrong; the message names it.
    """
    entries = _read_json(path) if path.suffix == ".json" else _read_rows(path, columns, fault)
    if not entries:
        raise ManifestError(f"{path}: it has no images; a data set needs at least one.")
    return entries


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


def _with_sentences(images: list[Any], annotations: list[Any], path: Path) -> list[Any]:
    """Return the images of COCO's form in Karpathy's, which has the captions with them."""
    sentences: dict[int | str, list[Any]] = {}
    found = []
    for index, image in enumerate(images):
        if isinstance(image, dict):
            identity = image.get("id")
            if not isinstance(identity, str):
                identity = _whole(image, "id", where := f"{path}: images[{index}]")
                if identity is None:
                    raise ManifestError(f"{where} has no 'id', by which annotations name it; give it one.")
                image = {**image, "cocoid": identity}
            image = {**image, "imgid": identity, "sentences": sentences.setdefault(identity, [])}
        found.append(image)
    for index, annotation in enumerate(annotations):
        where = f"{path}: annotations[{index}]"
        if not isinstance(annotation, dict) or not isinstance(annotation.get("caption"), str):
            raise ManifestError(f"{where} has no 'caption'; take COCO's file of captions, or correct it.")
        of, number = annotation.get("image_id"), annotation.get("id")
        if not isinstance(of, int | str) or of not in sentences:
            raise ManifestError(f"{where} is of image {of!r}, which is not among the images; correct it.")
        sentences[of].append({"raw": annotation["caption"], "sentid": number if isinstance(number, int) else None})
    return found


def _karpathy_entry(image: Any, where: str) -> Entry:
    """Check one element of ``images``; keys that are not needed are left alone."""
    if not isinstance(image, dict):
        raise ManifestError(f"{where} is not a mapping with 'filename' and 'sentences'; correct it.")
    folder = image.get("filepath", "")
    if not isinstance(folder, str):
        raise ManifestError(f"{where}: 'filepath' is not a text; correct it.")
    name = file_name(image.get("filename", image.get("file_name")), where, folder)
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
    return Entry(name, split_of(image, "split", where), captions, identity, -1 if cocoid is None else cocoid)


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


def _read_rows(path: Path, columns: Columns, fault: Fault) -> list[Entry]:
    """Gather the rows of a CSV, TSV or JSONL file by image, in the order of each image's first row."""
    entries: dict[str, Entry] = {}
    for row in caption_rows(path, columns):
        name = file_name(row.image, row.where)
        if not row.captions:
            fault(f"{row.where} ('{name}')", "it has no caption; add one, or take the row out")
            continue
        entry = entries.setdefault(name, Entry(name, row.split, []))
        if entry.split != row.split:
            both = f"'{row.split or 'none'}' here and '{entry.split or 'none'}' before"
            raise ManifestError(f"{row.where}: the split of '{name}' is {both}; give it one split.")
        entry.captions += [(text, None) for text in row.captions]
    return list(entries.values())
