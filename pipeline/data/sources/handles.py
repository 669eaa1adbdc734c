"""Open files of a source: a few at a time, each looked at when it is opened, shared by threads."""

import threading
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Generic, TypeVar

from ...errors import ManifestError, SampleError
from ..images import PictureFile, check_bytes
from .base import Source
from .files import place_of

Place = tuple[int, int, int]  # number of the file, and where in it: what these two mean is the reader's
_OPEN = 32  # files at a time

Handle = TypeVar("Handle")


class PackedReader(Generic[Handle]):
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
        if not 0 <= number < len(self.source.files):
            raise ManifestError(f"'{name}' lies in file {number} of a source that has none; extract it again.")
        url = place_of(self.folder, self.source.files[number].name)
        with self._lock:
            try:
                where, data = self.read(self._handle(number), *at)
            except ManifestError:
                raise
            except Exception as error:  # whatever a file system or a damaged file raises
                raise ManifestError(f"{url}: '{name}' cannot be read ({short(error)}); restore the file.") from error
        where = f"{url}: {where or name}"
        if data is None:
            raise SampleError(where, "it holds no bytes, perhaps a path alone; put the picture into the file")
        try:
            check_bytes(len(data))
        except ValueError as error:
            raise SampleError(where, str(error)) from error
        return PictureFile(data, where)

    def close(self) -> None:
        """Close the files."""
        with self._lock:
            while self._handles:
                self._forget(next(iter(self._handles)))

    def __del__(self) -> None:  # a gallery keeps its reader as long as it lives
        self.close()

    def begin(self, number: int) -> Handle:
        """Open a file."""
        raise NotImplementedError

    def read(self, handle: Handle, first: int, second: int) -> tuple[str, bytes | None]:
        """Return what to call a picture beside its file, if not by its name, and its bytes."""
        raise NotImplementedError

    def end(self, handle: Handle) -> None:
        """Close a file."""
        raise NotImplementedError

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


def short(error: Exception) -> str:
    """Say in a few words what was wrong."""
    return str(getattr(error, "strerror", None) or str(error).strip().partition("\n")[0] or type(error).__name__)[:200]


Fault = Callable[[str, str], None]  # takes where and what is wrong: raises, or notes that a sample is left out
