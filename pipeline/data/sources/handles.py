"""Open files of a source: a few at a time, each looked at when it is opened, shared by threads."""

import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Generic, TypeVar

from ...errors import ManifestError, SampleError
from ...wording import reason
from ..images import PictureFile, check_bytes
from .base import Source
from .files import url_of

Place = tuple[int, int, int]  # number of the file, and where in it: what these two mean is the reader's
_OPEN = 32  # files at a time

Handle = TypeVar("Handle")


@dataclass(frozen=True)
class UnreadPicture:
    """A picture that was found in its file, before its bytes are taken."""

    size: int | None  # bytes; None: the file has none for it
    take: Callable[[], bytes]
    called: str = ""  # beside its file, if not by its name


class PackedReader(ABC, Generic[Handle]):
    """Pictures that lie in files with others; see `base.PictureReader`.

    Args:
        source: the files.
        folder: where their relative names start.
        places: of each picture by its name.
    """

    def __init__(self, source: Source, folder: str | Path, places: Mapping[str, Place]) -> None:
        self.source, self.folder, self._places = source, folder, places
        self._handles: dict[int, Handle] = {}
        self._lock = threading.Lock()

    def open(self, name: str) -> PictureFile:
        """Return the bytes of a picture; errors as of `base.PictureReader.open`."""
        number, *at = self._places[name]
        if not 0 <= number < len(self.source.files) or min(at) < 0:
            raise ManifestError(
                f"the store says that '{name}' lies in file {number} at {at}, where nothing is; get that store anew."
            )
        url = url_of(self.folder, self.source.files[number].name)
        with self._lock:
            try:
                found = self.find(self._handle(number), *at)
                where = f"{url}: {found.called or name}"
                _check(where, found.size)
                return PictureFile(found.take(), where)
            except (ManifestError, SampleError):
                raise
            except LookupError as error:
                raise ManifestError(
                    f"{url} holds nothing where the store says '{name}' lies; get that store anew."
                ) from error
            except Exception as error:  # whatever a file system or a damaged file raises
                raise ManifestError(f"{url}: '{name}' cannot be read ({short(error)}); restore the file.") from error

    def close(self) -> None:
        """Close the files."""
        with self._lock:
            while self._handles:
                self._forget(next(iter(self._handles)))

    def __del__(self) -> None:  # a gallery keeps its reader as long as it lives
        self.close()

    @abstractmethod
    def begin(self, number: int) -> Handle:
        """Open a file."""

    @abstractmethod
    def find(self, handle: Handle, first: int, second: int) -> UnreadPicture:
        """Return the picture at a place, of two numbers that are not negative; LookupError where there is none."""

    @abstractmethod
    def end(self, handle: Handle) -> None:
        """Close a file."""

    def _handle(self, number: int) -> Handle:
        if (handle := self._handles.get(number)) is None:
            if len(self._handles) >= _OPEN:
                self._forget(next(iter(self._handles)))
            handle = self._handles[number] = self.begin(number)
        return handle

    def _forget(self, number: int) -> None:
        handle = self._handles.pop(number)
        with suppress(Exception):  # it was only read
            self.end(handle)


def _check(where: str, size: int | None) -> None:
    """Refuse what has no bytes, or too many, before they are taken."""
    if size is None:
        raise SampleError(where, "it holds no bytes, perhaps a path alone; put the picture into the file")
    try:
        check_bytes(size)
    except ValueError as error:
        raise SampleError(where, str(error)) from error


def short(error: Exception) -> str:
    """Say in a few words what was wrong."""
    return str(getattr(error, "strerror", None) or reason(error))[:200]
