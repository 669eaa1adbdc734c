"""A folder of pictures: the name of each is its path below the folder."""

import os
from collections.abc import Iterable
from pathlib import Path

from ..images import PictureFile, read_picture


class FolderReader:
    """A folder; see `base.PictureReader`."""

    def __init__(self, folder: str | Path) -> None:
        self.folder = Path(folder)

    def open(self, name: str) -> PictureFile | Path:
        """Return the bytes of a file; of a folder of frames, or of what cannot be read, the path."""
        return read_picture(self.folder / name)

    def close(self) -> None:
        """Do nothing: no file stays open."""


def missing_from(folder: Path, names: Iterable[str]) -> list[str]:
    """Return the names of pictures that are not there; each folder is listed once, and no file opened."""
    listed: dict[str, set[str]] = {}
    missing = []
    for name in names:
        above, _, last = name.rpartition("/")
        if above not in listed:
            listed[above] = _listed(folder / above)
        # A link may lead nowhere, and a listing may write a name otherwise than the file system takes it.
        if last not in listed[above] and not _exists(folder / name):
            missing.append(name)
    return missing


def _exists(path: Path) -> bool:
    try:
        return path.exists()
    except OSError:  # a name may be too long for the file system
        return False


def _listed(folder: Path) -> set[str]:
    """Return the names in a folder, links apart; none where it is missing or may not be listed."""
    try:
        with os.scandir(folder) as entries:
            return {entry.name for entry in entries if not entry.is_symlink()}
    except OSError:
        return set()
