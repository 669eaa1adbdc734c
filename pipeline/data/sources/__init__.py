"""Where samples and pictures come from: a folder, tar shards, Parquet, or a saved data set, each read where it lies."""

from .files import is_url
from .reading import find_source, open_pictures, read_contents
from .source import FOLDER, Contents, FolderReader, PictureReader, Place, Source, missing_from

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
]
