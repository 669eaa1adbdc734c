"""Rows of a source, plain dictionaries: which keys count, and the image that a row makes, or what is wrong with it."""

import ast
import json
import logging
import posixpath
import re
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

from ..errors import ManifestError
from ..wording import counted, printable, some_of
from .image_columns import Caption, ImageSample
from .manifest import SPLITS, Columns

log = logging.getLogger("xret")

# Default columns, in capitals or not: the first that is there.
IMAGES = ("file_name", "filename", "image")
CAPTIONS = ("captions", "caption", "text")
# The split that a name means.
SPLIT_NAMES = {split: split for split in SPLITS} | dict.fromkeys(("validation", "valid", "dev"), "val")
_NUMBERED = re.compile(r"(caption|text)s?[-_ ]?\d+")  # a column of captions beside others
# A list that was written as a text: JSON, or Python's or numpy's `repr`, which has no commas.
_QUOTED = r"""'(?:\\.|[^'\\])*'|"(?:\\.|[^"\\])*\""""
_EMPTY = "None|null|nan|NaN"
_LIST = re.compile(rf"[\[({{]\s*(?:(?:np\.str_\((?:{_QUOTED})\)|{_QUOTED}|{_EMPTY})\s*(?:,\s*)?)*[\])}}]", re.DOTALL)
_ITEMS = re.compile(f"({_QUOTED})|{_EMPTY}", re.DOTALL)
_BROKEN = re.compile(r"\[\s*['\"].*['\"]\s*\]", re.DOTALL)  # nothing else than a list that cannot be read
_CLOSING = {"[": "]", "(": ")", "{": "}"}
_OPENING = (*_CLOSING, " ", "\n")  # how such a text may begin
_NOTHING = ("", "None", "null", "nan", "NaN")  # what beside such texts is a list of nothing


@dataclass(frozen=True, slots=True)
class RowColumns:
    """The columns of a row that count; `image` is where it would be if there is none."""

    image: str
    captions: tuple[str, ...]  # none where captions may stand elsewhere
    split: str | None


@dataclass(slots=True)
class _Column:
    """What the texts of a column of captions are."""

    lists: dict[str, list[Any]] = field(default_factory=dict)  # what is in each text that is a list
    first: str = ""  # where the first of them is
    others: int = 0  # how many are none, without those in `_NOTHING`


class RowReader:
    """Judges the rows of a source: those of a table, or JSON objects."""

    def __init__(
        self,
        listing: object,  # the file that notes name
        columns: Columns | None = None,  # what the manifest names
        *,
        skip: bool = False,  # leave out samples that are wrong
        whole: bool = True,  # each row must have an image and captions, which otherwise may stand elsewhere
        by_folder: bool = False,  # the splits that are given are the names of folders, and not the manifest's
    ) -> None:
        self.listing, self.columns, self.skip, self.whole = listing, columns or Columns(), skip, whole
        self.by_folder = by_folder
        self.left_out: list[str] = []  # why samples were left out, a phrase each
        self.usual: tuple[str, ...] = CAPTIONS
        self.beside = set[str]()  # keys that stand beside the rows
        self._notes = set[str]()
        self._found: dict[tuple[str, ...], RowColumns] = {}
        self._texts: dict[str, _Column] = {}

    def leave_out(self, reason: object) -> None:
        """Note why a sample is left out, where that is asked for; else raise ManifestError."""
        phrase = str(reason).removesuffix(".")
        if not self.skip:
            raise ManifestError(f"{phrase}, or go on with --on-error skip.")
        self.left_out.append(phrase)

    def note(self, text: str) -> None:
        """Say something of the source, once."""
        if text not in self._notes:
            self._notes.add(text)
            log.warning("%s: %s.", printable(str(self.listing)), printable(text))

    def image(
        self,
        row: Mapping[str, Any],
        where: str,
        split: str | None = None,
        *,
        folder: str | None = "",
        name: str | None = None,
        text: str | None = None,
        bare: bool = False,
    ) -> ImageSample | None:
        """Return the image that a row makes; None where the row is wrong and left out.

        `split` is that of the row's file or folder. The image's name starts at `folder`, None: it is taken as it is;
        `name` stands for it. `text` is the caption if the row has no words; `bare` rows need none. ManifestError: the
        row is wrong, and nothing is left out.
        """
        try:
            columns = self.find(tuple(row), where)
            if name is None:
                if columns.image not in row:
                    raise ManifestError(f"{where}: the file name is missing ({it_has(row)}); call it 'file_name'.")
                name = row[columns.image] if folder is None else file_name(row[columns.image], where, folder)
            if name:
                where = f"{where} ('{name}')"
            captions = self._captions(row, columns.captions, where)
            if text is not None and not any(caption for caption, _ in captions):
                captions = [self.caption(text, "txt", where, {})]
            if not captions and not bare:
                there = "" if columns.captions else f" ({it_has(row)})"
                raise ManifestError(f"{where}: it has no caption{there}; add one, or take the row out.")
            return ImageSample(None, name, self._split(row, columns.split, where, split), -1, captions)
        except ManifestError as error:
            self.leave_out(error)
            return None

    def find(self, there: tuple[str, ...], where: str) -> RowColumns:
        """Find the columns that count among those that are there; ManifestError where one is missing."""
        if there in self._found:
            return self._found[there]
        named, spelt = self.columns, {name.strip().lower(): name for name in there} | {name: name for name in there}
        images, texts, splits = (
            [spelt[name] for name in names if name in spelt] for names in (IMAGES, self.usual, ("split",))
        )
        found = RowColumns(
            named.image or (*images, IMAGES[0])[0],
            named.captions or tuple(texts[:1]),
            named.split or (*splits, None)[0],
        )
        wanted = [*named.captions, *filter(None, [named.split])]
        if self.whole:
            wanted = [found.image, *(found.captions or ("caption",)), *wanted]
        if missing := [name for name in wanted if there and name not in there]:
            advice = "name the right ones, or the separator of a table, in the manifest, or rename one"
            raise ManifestError(f"{where}: there is no column '{missing[0]}'; {it_has(there)}: {advice}.")
        if texts and not named.captions:
            others = [*texts[1:], *(name for name in there if _NUMBERED.fullmatch(name.strip().lower()))]
            self._note_others(texts[0], others)
        self._found[there] = found
        return found

    def _note_others(self, read: str, others: list[str]) -> None:
        if others:
            passed = "', '".join(others)
            self.note(f"captions are those of '{read}', and not of '{passed}', unless caption_columns names them")

    def lists(self) -> dict[str, list[Any]]:
        """Return what is in each text of the columns whose texts all are lists.

        ManifestError: most texts of a column are lists, and some are not.
        """
        lists: dict[str, list[Any]] = {}
        for name, column in self._texts.items():
            if column.lists and column.others:
                plain = counted(column.others, "plain text")
                fault = f"'{name}' holds {counted(len(column.lists), 'list')} written as text, and {plain}"
                if len(column.lists) > column.others:
                    raise ManifestError(f"{self.listing}: {fault} ({column.first}); write all as lists, or none.")
                self.note(f"{fault}; each is one caption ({column.first})")
            else:
                lists |= column.lists
        return lists

    def unfold(self, images: Iterable[ImageSample], lists: Mapping[str, list[Any]]) -> Iterator[ImageSample]:
        """Yield images with a caption for each text of their `lists`, without those that have none then."""
        lists = {**lists, **{text: [] for text in _NOTHING}}
        for image in images:
            found = [value for text, _ in image.captions for value in lists.get(text.strip(), [text])]
            values = [sentence_text(one) or one if isinstance(one, dict) else one for one in found]
            image.captions = [Caption(one, None) for one in values if isinstance(one, str)]
            strange = next((repr(one)[:20] for one in values if not isinstance(one, str | None)), None)
            if strange or not image.captions:
                fault = (
                    f"its list of captions has {strange} in it, which is no text" if strange else "it has no caption"
                )
                self.leave_out(f"{self.listing}: '{image.file_name}': {fault}; correct it, or take the row out")
            if image.captions:
                yield image

    def note_unread(self) -> None:
        """Say which columns nothing reads, unless one has the splits."""
        if any(found.split for found in self._found.values()):
            return
        read = {"imgid", "cocoid", "sentids", "filepath"}
        read |= {name for found in self._found.values() for name in (found.image, *found.captions, found.split) if name}
        if unread := sorted({name for there in self._found for name in there}.union(self.beside) - read):
            self.note(f"no column is called 'split'; nothing reads {', '.join(some_of(unread, 20))}")

    def _captions(self, row: Mapping[str, Any], columns: tuple[str, ...], where: str) -> list[Caption]:
        """Return the captions of a row, perhaps none; those of several columns follow one another.

        An empty one among several columns is no caption. ManifestError: one is wrong, and not left out.
        """
        captions: list[Caption] = []
        errors: list[ManifestError] = []
        for column in columns:
            found = row.get(column)
            for value in found if isinstance(found, list) else (found,):
                if value is not None:
                    try:
                        captions.append(self.caption(value, column, where, row))
                    except ManifestError as error:
                        errors.append(error)
        if errors and not (self.skip and captions):
            raise errors[0]
        self.left_out += [str(error).removesuffix(".") for error in errors]
        return captions if len(columns) == 1 else [caption for caption in captions if caption[0].strip()]

    def caption(self, value: Any, column: str, where: str, row: Mapping[str, Any]) -> Caption:
        """Return a caption and its number, of a text or of a mapping as Karpathy's, whose image has an `imgid`."""
        text, number = value, None
        if isinstance(value, dict):
            if (text := sentence_text(value)) is None:
                raise ManifestError(
                    f"{where}: one of '{column}' has no text as 'raw', nor as 'tokens' ({it_has(value)})."
                )
            number = whole(value, "sentid", where)
            if (imgid := row.get("imgid")) is not None and str(other := value.get("imgid", imgid)) != str(imgid):
                raise ManifestError(f"{where}: one of '{column}' is of imgid {other}, not {imgid}; correct one.")
        require_text(text, column, where)
        texts = self._texts.get(column) or self._texts.setdefault(column, _Column())
        if text[:1] in _OPENING and (found := _listed(text.strip())) is not None:
            texts.first = texts.first or where
            texts.lists[text.strip()] = found
        elif text.strip() not in _NOTHING:
            texts.others += 1
        return Caption(text, number)

    def _split(self, row: Mapping[str, Any], column: str | None, where: str, given: str | None) -> str | None:
        """Return the split of a row, None if nothing says it; `given` goes before the row's own."""
        if column is None:
            return given
        split = row.get(column)
        if given is None:
            if not isinstance(split, str) or not split:
                raise ManifestError(
                    f"{where}: the split '{column}' is empty or no text; name one of {', '.join(SPLITS)}."
                )
            return split
        named = SPLIT_NAMES.get(split) if isinstance(split, str) else None
        if named and named != SPLIT_NAMES.get(given, named):
            if self.by_folder:
                advice = f"correct one, or take this column by split_column: {column} in the manifest"
                raise ManifestError(f"{where}: '{column}' is '{split}', and its folder '{given}'; {advice}.")
            self.note(f"images whose '{column}' is '{split}' count as '{given}', as the manifest says")
        return given


def _listed(text: str) -> list[Any] | None:
    """Return what is in a list, or in a mapping, that was written as a text; None where a text is none.

    What cannot be read of a list is a value of bytes.
    """
    if _CLOSING.get(text[:1]) != text[-1:]:
        return None
    for read in (_quoted, json.loads, ast.literal_eval):
        with suppress(ValueError, SyntaxError, RecursionError, MemoryError):
            found = read(text)
            return [*found] if isinstance(found, list | tuple | set) else [found] if isinstance(found, dict) else None
    return [text.encode()] if _BROKEN.fullmatch(text) else None


def _quoted(text: str) -> list[str | None]:
    """Return the quoted texts of a list as JSON or Python reads each, None for no value; ValueError: it has others."""

    def value(quoted: str) -> str:
        with suppress(ValueError):
            return str(json.loads(quoted, strict=False))
        return str(ast.literal_eval(quoted.replace("\n", "\\n").replace("\r", "\\r")))

    if not _LIST.fullmatch(text):
        raise ValueError(text)
    return [value(quoted) if quoted else None for quoted in _ITEMS.findall(text)]


def sentence_text(sentence: Mapping[str, Any]) -> Any:
    """Return the raw text of a mapping, else its tokens with spaces between; None where it has none."""
    tokens = sentence.get("tokens")
    if isinstance(tokens, list) and not isinstance(sentence.get("raw"), str):
        return " ".join(tokens) if all(isinstance(token, str) for token in tokens) else None
    return next((sentence[key] for key in ("raw", *CAPTIONS) if isinstance(sentence.get(key), str)), None)


def folder_split(name: str) -> str | None:
    """Return the split as which a folder of a picture is called; None where none is."""
    return next((SPLIT_NAMES[part] for part in name.split("/")[:-1] if part in SPLIT_NAMES), None)


def require_text(value: Any, what: str, where: str) -> None:
    """Raise ManifestError where a value is no text, or no valid Unicode."""
    if not isinstance(value, str):
        raise ManifestError(f"{where}: the {what} is no text ({str(value)[:20]}); correct it.")
    try:
        value.isascii() or value.encode()
    except UnicodeEncodeError as error:
        fault = "has half of a character pair, or bytes that are not UTF-8, in it"
        raise ManifestError(f"{where}: the {what} {value!r} {fault}; correct it.") from error


def whole(mapping: Mapping[str, Any], key: str, where: str) -> int | None:
    """Return a whole number of 64 bits, or None; ManifestError where it is something else."""
    value = mapping.get(key)
    if value is not None and (type(value) is not int or abs(value) >= 2**63):
        raise ManifestError(f"{where}: '{key}' is {value!r}, not a whole number of 64 bits; correct it.")
    return value


def it_has(there: Iterable[str]) -> str:
    """Say which columns or keys are there."""
    return f"it has {', '.join(some_of([repr(name) for name in there], 20)) or 'none'}"


def file_name(name: Any, where: str, folder: str = "") -> str:
    """Join and normalise a path below the image folder."""
    if not isinstance(name, str) or not name.strip():
        raise ManifestError(f"{where}: the file name is missing; name the image of these captions.")
    require_text(name, "file name", where)
    if "\\" in name + folder or "\0" in name + folder:
        raise ManifestError(f"{where}: '{folder}{name}' is not a path with forward slashes; correct it.")
    joined = posixpath.normpath(posixpath.join(folder, name))
    if joined in (".", "..") or joined.startswith(("/", "../")):
        raise ManifestError(f"{where}: '{joined}' leaves the image folder; name a file inside it.")
    return joined
