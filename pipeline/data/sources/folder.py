"""A folder of pictures: the name of each is its path below the folder."""

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
