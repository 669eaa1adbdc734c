"""The contract of a source: its content is listed once, and each of its pictures is opened by its name."""

import os
import unicodedata
from abc import abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Protocol

from ...documents import reading
from ...errors import ManifestError, SampleError
from ...progress import Progress
from ..images import NO_DIGEST, PictureFile, digest_of, read_picture, stamp_of
from .files import File, look_at, url_of

_READ_AT_ONCE = 8  # pictures whose digests are wanted
Place = tuple[int, int, int]  # number of the file; in a tar offset and bytes, in a table the row and 0


@dataclass(frozen=True)
class Source:
    """The files that pictures lie in, as they were when they were read."""

    kind: str  # ``folder``, ``tar``, ``parquet`` or ``arrow``
    files: tuple[File, ...] = ()  # none for a folder
    column: str = ""  # the column of a table that holds the pictures

    def to_json(self) -> dict[str, Any]:
        """Return the value that a store keeps."""
        return asdict(self)

    @classmethod
    def from_json(cls, value: dict[str, Any]) -> "Source":
        """Return the source that `to_json` wrote."""
        return cls(**{**value, "files": tuple(File(**one) for one in value["files"])})


FOLDER = Source("folder")


class PictureReader(Protocol):
    """Opens pictures by their names; several threads may share one."""

    @abstractmethod
    def open(self, name: str) -> PictureFile | Path:
        """Return the bytes of a picture; the path of a folder of frames, or of a file that cannot be read.

        SampleError: there is no such picture. ManifestError: the file that holds it is missing, damaged, or has changed
        since it was read.
        """

    def stamp(self, name: str) -> tuple[int, int]:
        """Return the `images.stamp_of` of a picture that is a file or folder of its own; zeros of others."""
        return 0, 0


class FolderReader(PictureReader):
    """A folder of pictures: the name of each is its path below the folder."""

    def __init__(self, folder: str | Path) -> None:
        self.folder = Path(folder)

    def open(self, name: str) -> PictureFile | Path:
        """Return the bytes of a file; the path of a folder of frames, or of a file that cannot be read."""
        return read_picture(self.folder / as_spelt(self.folder, name))

    def stamp(self, name: str) -> tuple[int, int]:
        """Return the bytes of a picture and the time of its last change."""
        return stamp_of(self.folder / as_spelt(self.folder, name))


class PackedReader(PictureReader):
    """Opens pictures that lie at `places` of files with others; relative names of files start at `folder`."""

    def __init__(self, source: Source, folder: str | Path, places: Mapping[str, Place]) -> None:
        self.source, self.folder, self._places = source, folder, places
        self._unchanged: set[int] = set()

    def open(self, name: str) -> PictureFile:
        """Return the bytes of a picture; errors as of `PictureReader.open`."""
        number, *at = self._places[name]
        file = self.source.files[number]
        url = url_of(self.folder, file.name)
        if number not in self._unchanged:
            now = look_at(self.folder, file.name)
            if now != file:
                raise ManifestError(
                    f"{url}: it has changed since it was read ({file.size:,} bytes of {file.stamp} then,"
                    f" {now.size:,} of {now.stamp} now); put the file back with its time (cp -p, rsync -t), or extract"
                    " into a new store."
                )
            self._unchanged.add(number)
        with reading(f"{url}: '{name}'", errors=Exception):
            return self._read(url, name, *at)

    @abstractmethod
    def _read(self, url: str, name: str, first: int, second: int) -> PictureFile:
        """Return the picture at a place in a file; SampleError where there are no bytes, or too many."""


def digests_of(pictures: PictureReader, names: Sequence[str]) -> list[bytes]:
    """Return the digest of each picture, `NO_DIGEST` of one that cannot be read; errors as of `PictureReader.open`."""

    def digest(name: str) -> bytes:
        try:
            found = digest_of(pictures.open(name))
        except SampleError:
            found = NO_DIGEST
        progress.update(1)
        return found

    if not names:
        return []
    with Progress("compared", len(names), "pictures") as progress, ThreadPoolExecutor(_READ_AT_ONCE) as pool:
        return list(pool.map(digest, names))


def as_spelt(folder: Path, name: str) -> str:
    """Return a name as the folder spells it: macOS writes accents as characters of their own, others do not."""
    if name.isascii() or os.path.lexists(folder / name):
        return name
    others = (unicodedata.normalize(form, name) for form in ("NFC", "NFD"))
    return next((other for other in others if os.path.lexists(folder / other)), name)


def is_one_file(folder: Path, one: str, other: str) -> bool:
    """Return whether names in two normal forms are of one file, also where there is none."""
    try:
        return (folder / as_spelt(folder, one)).samefile(folder / as_spelt(folder, other))
    except OSError:
        return True


def missing_from(folder: Path, names: Iterable[str]) -> list[str]:
    """Return the names of pictures that are not there; each folder is listed once, and no file opened."""
    listed: dict[str, set[str]] = {}
    missing = []
    for name in names:
        above, _, last = name.rpartition("/")
        if above not in listed:
            listed[above] = set()
            with suppress(OSError):  # missing, or may not be listed
                listed[above] = set(os.listdir(folder / above))  # noqa: PTH208 -- names alone
        # A listing may spell a name otherwise than the file system takes it.
        if last not in listed[above] and not os.path.exists(folder / as_spelt(folder, name)):  # noqa: PTH110 -- a name may be too long
            missing.append(name)
    return missing
