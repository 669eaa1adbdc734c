"""The contract of a source: what it holds is read once, and each of its pictures is found again by its name."""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from ..caption_files import Entry
from ..images import PictureFile
from .files import File


@dataclass(frozen=True)
class Source:
    """The files that pictures lie in, as they were when they were looked through."""

    kind: str  # ``folder``, ``tar``, ``parquet`` or ``arrow``
    files: tuple[File, ...] = ()  # a picture's place names one by its number; of a folder none
    column: str = ""  # of a table, the one that holds the pictures
    keys: str = ""  # SHA-256 of the manifest's keys that decide the samples

    def to_json(self) -> dict[str, Any]:
        """Return what a store keeps."""
        files = [[file.name, file.size, file.stamp] for file in self.files]
        return {"kind": self.kind, "files": files, "column": self.column, "keys": self.keys}

    @classmethod
    def from_json(cls, value: Any) -> "Source":
        """Return what `to_json` gave.

        Raises:
            ValueError: it did not give this; a sentence says what is wrong.
        """
        kind, files, column, keys = (value.get(key) for key in ("kind", "files", "column", "keys"))
        if not all(isinstance(one, str) for one in (kind, column, keys)):
            raise ValueError("'source' has no kind, column or keys")
        if not isinstance(files, list) or not files or not all(_is_file(one) for one in files):
            raise ValueError("'source' names no files with their sizes and stamps")
        return cls(kind, tuple(File(*one) for one in files), column, keys)


def _is_file(value: Any) -> bool:
    return isinstance(value, list) and [type(one) for one in value] == [str, int, str] and value[1] >= 0


FOLDER = Source("folder")


@dataclass
class Contents:
    """What a source holds, read once."""

    entries: list[Entry]  # in its own order, whatever the number of files
    source: Source = FOLDER
    left_out: list[str] = field(default_factory=list)  # samples at fault that were skipped, a sentence each


class PictureReader(Protocol):
    """Finds pictures by their names; several threads may share one."""

    def open(self, name: str) -> PictureFile | Path:
        """Return the bytes of a picture; of a folder of frames, or of what cannot be read, the path.

        Raises:
            SampleError: there is no such picture.
            ManifestError: the file that holds it is missing, damaged, or has changed since it was looked through.
        """
        ...

    def close(self) -> None:
        """Close the files; what was opened stays good."""
        ...
