"""What all sources have in common: which keys of a row count, and what becomes of a row that is wrong."""

import logging
import posixpath
import re
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass
from difflib import get_close_matches
from typing import Any, TypeVar

from ..errors import ManifestError
from ..wording import printable, some_of
from .manifest import SPLITS, Columns

log = logging.getLogger("xret")

# Default columns: the first that is there.
IMAGES = ("file_name", "filename", "image")
CAPTIONS = ("captions", "caption", "text")
_SPLIT = "split"
SPLIT_NAMES = {**{split: split for split in SPLITS}, "validation": "val"}  # of each name the split
_NUMBERED = re.compile(r"(caption|text)s?[-_ ]?\d+")  # a column of captions beside others
_NAMES = "train|training|trainval|val|valid|validation|minival|restval|dev|development|eval|evaluation|test|testing"
_NAMES_SPLIT = re.compile(rf"({_NAMES})[-_ ]?(\d{{1,4}}|[ab])?")

_Item = TypeVar("_Item")
_Value = TypeVar("_Value")


@dataclass(slots=True)
class Entry:
    """One image as its file gives it, before splits, ids and numbers are settled."""

    file_name: str  # normalised POSIX path below the image folder
    split: str | None  # any name; None where the file gives none
    captions: list[tuple[str, int | None]]  # at least one: its text, and the file's number for it if there is one
    imgid: str | None = None  # the file's id of the image; distinct
    cocoid: int = -1  # -1 where there is none
    place: tuple[int, int, int] | None = None  # of a picture that lies in a file with others, see `sources`


@dataclass(frozen=True, slots=True)
class RowColumns:
    """The columns of a row that count; `image` is where it would be if there is none."""

    image: str
    captions: tuple[str, ...]  # none where captions may stand elsewhere
    split: str | None


class RowReader:
    """Finds what counts in the rows of a source: columns of a table, or keys of a JSON object."""

    def __init__(
        self,
        listing: object,  # the file that notes name
        columns: Columns | None = None,  # what the manifest names; None without a manifest
        *,
        skip: bool | None = False,  # leave out samples that are wrong; None: nothing can be left out
        whole: bool = True,  # each row must have an image and captions, which otherwise may stand elsewhere
        by_folder: bool = False,  # the splits that are given are the names of folders, and not the manifest's
    ) -> None:
        self.listing, self.columns, self.skip, self.whole = listing, columns or Columns(), skip, whole
        self.by_folder = by_folder
        self.left_out: list[str] = []  # why samples were left out, a phrase each
        self._named = columns is not None
        self._notes: set[str] = set()
        self._found: dict[tuple[str, ...], RowColumns] = {}
        self._unread: dict[str, bool] = {}  # columns that nothing reads: whether each of their values names a split
        self._like: set[str] = set()  # those that are called nearly as the column of splits

    def attempt(self, read: Callable[..., _Item], *arguments: Any) -> _Item | None:
        """Return what `read` returns of a sample; None where that is wrong, and it is left out.

        ManifestError: it is wrong, and nothing is left out.
        """
        try:
            return read(*arguments)
        except ManifestError as error:
            self.leave_out(str(error).removesuffix("."))
            return None

    def leave_out(self, reason: str) -> None:
        """Note why a sample is left out, where that is asked for; else raise ManifestError."""
        if not self.skip:
            raise ManifestError(f"{reason}{', or go on with --on-error skip' if self.skip is False else ''}.")
        self.left_out.append(reason)

    def good(self, values: Iterable[_Value], read: Callable[[int, _Value], _Item]) -> list[_Item]:
        """Return what `read` makes of an image's captions, without those that are left out.

        ManifestError: one is wrong, and nothing is left out, or none is good.
        """
        good: list[_Item] = []
        errors: list[ManifestError] = []
        for index, value in enumerate(values):
            try:
                good.append(read(index, value))
            except ManifestError as error:
                errors.append(error)
        if errors and not (self.skip and good):
            raise errors[0]
        self.left_out += [str(error).removesuffix(".") for error in errors]
        return good

    def find(self, there: tuple[str, ...], where: str) -> RowColumns:
        """Find the columns that count among those that are there; ManifestError where one is missing."""
        if there in self._found:
            return self._found[there]
        columns = self.columns
        images = (columns.image,) if columns.image else self._usual("image", IMAGES, there)
        captions = columns.captions or self._usual("caption", CAPTIONS, there)[:1]
        splits = (columns.split,) if columns.split else self._usual("split", (_SPLIT,), there)
        wanted = [*columns.captions, *splits]
        if self.whole:
            wanted = [*(images[:1] or IMAGES[:1]), *(captions or ("caption",)), *splits]
        if missing := [name for name in wanted if name not in there]:
            advice = "name the right ones, or the separator of a table, in the manifest"
            advice = advice if self._named else "rename one"
            raise ManifestError(f"{where}: there is no column '{missing[0]}'; {it_has(there)}: {advice}.")
        if not splits:
            self._like |= {name for name in there if _is_like_split(name.strip().lower())}
        found = RowColumns((images or IMAGES)[0], captions, splits[0] if splits else None)
        self._found[there] = found
        return found

    def _usual(self, role: str, names: Collection[str], there: Collection[str]) -> tuple[str, ...]:
        """Return which of the usual names of a role are there, in capitals or not, and note what is not plain."""
        spelt = {name.strip().lower(): name for name in there}
        found = tuple(name if name in there else spelt[name] for name in names if name in there or name in spelt)
        if not found:
            return found
        if found[0] not in names:
            self.note(f"'{found[0]}' counts as the {role}")
        others = [*found[1:], *(name for name in there if _NUMBERED.fullmatch(name.strip().lower()))]
        if role == "caption" and others:
            named = "', '".join(others)
            self.note(f"captions are those of '{found[0]}', and not of '{named}', unless caption_columns names them")
        return found

    def or_in_manifest(self, advice: str) -> str:
        """Return what else can be done by a manifest, if there is one."""
        return f", or {advice} in the manifest" if self._named else ""

    def note(self, text: str) -> None:
        """Say something of the source, once."""
        if text not in self._notes:
            self._notes.add(text)
            log.warning("%s: %s.", printable(str(self.listing)), printable(text))

    def captions(self, values: Mapping[str, Any], found: RowColumns, where: str) -> list[str]:
        """Return the captions of a row, perhaps none; ManifestError where one is not a text.

        Captions of several columns follow one another; an empty one among several columns is no caption.
        """
        texts: list[Any] = []
        for column in found.captions:
            value = values[column]
            texts += value if isinstance(value, list) else [value]
        captions = self.good(
            [text for text in texts if text is not None], lambda _, text: require_text(text, f"{where}: a caption")
        )
        return [text for text in captions if len(found.captions) == 1 or text.strip()]

    def entry(self, values: Mapping[str, Any], found: RowColumns, where: str, name: str, given: str | None) -> Entry:
        """Return the image `name` with the captions of a row; ManifestError: it has none, or something is wrong."""
        captions = self.captions(values, found, where)
        if not captions:
            of_image = f" ('{name}')" if name else ""
            raise ManifestError(f"{where}{of_image}: it has no caption; add one, or take the row out.")
        return Entry(name, self.split(values, found, where, given), [(text, None) for text in captions])

    def split(self, values: Mapping[str, Any], found: RowColumns, where: str, given: str | None = None) -> str | None:
        """Return the split of a row, None if nothing says it.

        `given` is that of a folder, or what the manifest says of a file, and goes before the row's own.
        """
        if found.split is None:
            self.look(values, found)
            return given
        split = values.get(found.split)
        if given is None:
            if not isinstance(split, str) or not split:
                raise ManifestError(f"{where}: the split is empty or not a text; name one of {', '.join(SPLITS)}.")
            return split
        named = SPLIT_NAMES.get(split) if isinstance(split, str) else None
        if named and named != SPLIT_NAMES.get(given, named):
            if self.by_folder:
                advice = f"correct one, or take this column by split_column: {found.split} in the manifest"
                raise ManifestError(f"{where}: '{found.split}' is '{split}', and its folder '{given}'; {advice}.")
            self.note(f"images whose '{found.split}' is '{split}' count as '{given}', as the manifest says")
        return given

    def look(self, values: Mapping[str, Any], found: RowColumns | None = None) -> None:
        """Look whether keys that nothing reads hold names of splits."""
        read = () if found is None else (found.image, *found.captions)
        for name, value in values.items():
            if self._unread.get(name, True) and name not in read and name not in CAPTIONS and value is not None:
                self._unread[name] = isinstance(value, str) and names_split(value)
            if isinstance(value, dict):
                self.look(value)

    def refuse_unread_splits(self) -> None:
        """Raise ManifestError where splits were not found, but a column that seems to name them."""
        for name in (*sorted(self._like), *(name for name, of_splits in self._unread.items() if of_splits)):
            advice = f"rename it{self.or_in_manifest('name it as split_column')}"
            raise ManifestError(f"{self.listing}: no image has a '{_SPLIT}', but '{name}' seems to name it; {advice}.")


def _is_like_split(name: str) -> bool:
    """Return whether a column may be one of splits: ``splits``, or ``is_train``."""
    return bool(get_close_matches(_SPLIT, [name], cutoff=0.8)) or names_split(name.removeprefix("is_"))


def names_split(text: str) -> bool:
    """Return whether a text is what data sets call a split: ``train``, ``dev``, ``val2017``."""
    return _NAMES_SPLIT.fullmatch(text.strip().lower()) is not None


def folder_split(name: str) -> str | None:
    """Return the split as which a folder of a picture is called; None where none is."""
    return next((SPLIT_NAMES[part] for part in name.split("/")[:-1] if part in SPLIT_NAMES), None)


def require_text(value: Any, what: str) -> str:
    """Return a text; ManifestError where it is something else, or is no valid Unicode."""
    if not isinstance(value, str):
        raise ManifestError(f"{what} is no text ({str(value)[:20]}); correct it.")
    try:
        value.encode()
    except UnicodeEncodeError as error:
        fault = "has half of a character pair, or bytes that are not UTF-8, in it"
        raise ManifestError(f"{what} {fault}; correct it.") from error
    return value


def it_has(there: Iterable[str]) -> str:
    """Say which columns or keys are there."""
    return f"it has {', '.join(some_of([repr(name) for name in there], 20)) or 'none'}"


def file_name(name: Any, where: str, folder: str = "") -> str:
    """Join and normalise a path below the image folder."""
    if not isinstance(name, str) or not name.strip():
        raise ManifestError(f"{where}: the file name is missing; name the image of these captions.")
    require_text(name, f"{where}: the file name {name!r}")
    if "\\" in name + folder or "\0" in name + folder:
        raise ManifestError(f"{where}: '{folder}{name}' is not a path with forward slashes; correct it.")
    joined = posixpath.normpath(posixpath.join(folder, name))
    if joined in (".", "..") or joined.startswith(("/", "../")):
        raise ManifestError(f"{where}: '{joined}' leaves the image folder; name a file inside it.")
    return joined
