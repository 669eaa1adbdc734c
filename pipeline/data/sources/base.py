"""The contract of a source: what it holds is read once, and each of its pictures is found again by its name."""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from ...errors import ManifestError
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
            ManifestError: it did not give this.
        """
        try:
            files = tuple(File(str(name), int(size), str(stamp)) for name, size, stamp in value["files"])
            return cls(str(value["kind"]), files, str(value["column"]), str(value["keys"]))
        except (KeyError, TypeError, ValueError) as error:
            raise ManifestError("the store's record of its source is damaged; extract it again.") from error


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
