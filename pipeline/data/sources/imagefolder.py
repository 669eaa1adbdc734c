"""An `imagefolder` of `datasets`: pictures in folders, and in each folder a ``metadata.jsonl`` or ``metadata.csv``."""

from pathlib import Path

from ...errors import ManifestError
from ..caption_files import Entry, Fault, file_name
from ..caption_rows import caption_rows
from ..manifest import SPLITS, Columns

_NAMES = ("metadata.jsonl", "metadata.csv")
_SPLITS = (*SPLITS, "validation")


def imagefolder_entries(folder: Path, columns: Columns, fault: Fault) -> list[Entry]:
    """Return the pictures that the metadata below a folder name, file by file in the order of their paths.

    Unless the manifest names a column of splits, metadata in a folder below are of the split that it is called, and
    pictures that metadata of the whole name in folders of splits are of those.

    Raises:
        ManifestError: there are no metadata, or a row is wrong.
    """
    entries: dict[str, Entry] = {}
    for path in sorted(path for name in _NAMES for path in folder.rglob(name)):
        below = path.parent.relative_to(folder)
        of_folder = below.parts[0] if below.parts and columns.split is None else None
        for row in caption_rows(path, columns, split=None):
            name = file_name(row.image, row.where, below.as_posix())
            first = name.partition("/")[0]
            split = of_folder or row.split or (first if columns.split is None and first in _SPLITS else None)
            if name in entries:
                raise ManifestError(f"{row.where}: '{name}' stands here a second time; give a picture one row.")
            if not row.captions:
                fault(f"{row.where} ('{name}')", "it has no caption; add one, or take the row out")
                continue
            entries[name] = Entry(name, split, [(text, None) for text in row.captions])
    return list(entries.values())
