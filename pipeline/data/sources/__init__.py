"""Where samples and pictures come from: a folder, tar shards, Parquet, or a saved data set, each read where it lies."""

from .base import FOLDER, Contents, PictureReader, Source
from .files import is_url, require_same
from .folder import FolderReader, missing_from
from .handles import Place
from .reading import find_source, open_pictures, read_contents

__all__ = [
    "FOLDER",
    "Contents",
    "FolderReader",
    "PictureReader",
    "Place",
    "Source",
    "find_source",
    "is_url",
    "missing_from",
    "open_pictures",
    "read_contents",
    "require_same",
]
