"""Reads what a manifest names, whichever kind of source it is."""

import hashlib
import json
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from ...documents import DocumentError, parse_json
from ...errors import ManifestError
from ..caption_files import Entry, Fault, file_name, read_entries
from ..manifest import CAPTIONS, Manifest, Packed
from .base import FOLDER, Contents, PictureReader, Source
from .files import File, find_files, look_at, look_at_all, read_all, url_of
from .folder import FolderReader
from .handles import Place
from .imagefolder import imagefolder_entries
from .tables import IMAGE, ArrowReader, ParquetReader, Row, table_rows
from .tar import TarReader, tar_entries

_READERS: dict[str, Callable[[Source, str | Path, Mapping[str, Place]], PictureReader]] = {
    "folder": lambda _, folder, __: FolderReader(folder),
    "tar": TarReader,
    "parquet": ParquetReader,
    "arrow": ArrowReader,
}


def open_pictures(source: Source, folder: str | Path, places: Mapping[str, Place]) -> PictureReader:
    """Return what opens pictures by their names.

    Args:
        source: the files that they lie in.
        folder: where the names of pictures, or of the files that hold them, start.
        places: of each picture by its name, where they lie in files with others.

    Raises:
        ManifestError: this xret does not know the source's kind.
    """
    if source.kind not in _READERS:
        raise ManifestError(f"the store's pictures lie in '{source.kind}', which this xret cannot read; extract again.")
    return _READERS[source.kind](source, folder, places)


def find_source(manifest: Manifest) -> Source:
    """Return the files that a manifest names as they are now, without reading them; errors as of `find_files`."""
    if manifest.packed is None or manifest.is_imagefolder:
        return FOLDER
    return _source_of(manifest, manifest.packed, list(_files(manifest, manifest.packed)))


def _source_of(manifest: Manifest, packed: Packed, listed: list[tuple[File, str | None]]) -> Source:
    kind = "arrow" if packed.kind == "dataset" else packed.kind
    files = tuple(file for file, _ in listed)
    name, times = Counter(file.name for file in files).most_common(1)[0] if files else ("", 0)
    if times > 1:
        raise ManifestError(f"{manifest.path}: {name} is named twice; name each file once.")
    columns, image = manifest.columns, manifest.columns.image or IMAGE
    decide: list[Any] = [manifest.name, packed.kind, packed.files, image, columns.captions or CAPTIONS[:1]]
    decide += [columns.split, manifest.merge_splits, manifest.captions_per_image, manifest.counts]
    keys = hashlib.sha256(json.dumps(decide).encode()).hexdigest()
    return Source(kind, files, image if kind != "tar" else "", keys)


def read_contents(manifest: Manifest, skip: bool = False) -> Contents:
    """Read what a manifest names, but for the pictures themselves.

    Args:
        manifest: names it.
        skip: leave out samples without captions; else the first one is an error.

    Raises:
        ManifestError: a file is missing, changed or damaged, or what it says is wrong or contradicts itself.
    """
    left_out: list[str] = []

    def fault(where: str, reason: str) -> None:
        if not skip:
            raise ManifestError(f"{where}: {reason}, or go on with --on-error skip.")
        left_out.append(f"{where}: {reason}")

    if manifest.captions is not None:
        return Contents(read_entries(manifest.captions, manifest.columns, fault), left_out=left_out)
    packed = manifest.packed
    assert packed is not None, "a manifest names captions, or what they lie in"
    if manifest.is_imagefolder:
        source, entries = FOLDER, imagefolder_entries(manifest.images, manifest.columns, fault)
    else:
        listed = list(_files(manifest, packed))
        source = _source_of(manifest, packed, listed)
        read = _from_tars if packed.kind == "tar" else _from_tables
        entries = read(manifest, listed, fault)
    if not entries:
        named = ", ".join(packed.files.values())
        raise ManifestError(f"{manifest.path}: {named} holds no picture with a caption; correct the manifest.")
    return Contents(entries, source, left_out)


def _files(manifest: Manifest, packed: Packed) -> Iterator[tuple[File, str | None]]:
    """Yield the files, in the order of the manifest, and the split of all that is in each."""
    for split, pattern in packed.files.items():
        if packed.kind == "dataset":
            yield from _saved(manifest.images, pattern, manifest.columns.split is None)
        else:
            yield from ((file, split) for file in find_files(manifest.images, pattern))


def _saved(folder: Path, name: str, by_folder: bool) -> Iterator[tuple[File, str | None]]:
    """Yield the files of a data set that was saved, or of each of its splits."""
    parts: dict[str, str | None] = {name: None}
    if splits := _document(folder, f"{name}/dataset_dict.json", "splits"):
        parts = {f"{name}/{split}": str(split) if by_folder else None for split in splits}
    for part, split in parts.items():
        named = _document(folder, f"{part}/state.json", "_data_files") or []
        yield from ((file, split) for file in look_at_all(folder, [f"{part}/{one['filename']}" for one in named]))


def _document(folder: Path, name: str, key: str) -> list[Any] | None:
    """Return a list of a small JSON document; None where there is no such file."""
    where = url_of(folder, name)
    try:
        file = look_at(folder, name)
    except ManifestError:
        return None
    try:
        document = parse_json(read_all(folder, file).decode())
        if not isinstance(document[key], list):
            raise TypeError(f"'{key}' is no list")
    except (DocumentError, UnicodeDecodeError, KeyError, TypeError) as error:
        raise ManifestError(f"{where}: this is not what `save_to_disk` writes ({error}); save it again.") from error
    found: list[Any] = document[key]
    return found


def _from_tars(manifest: Manifest, files: list[tuple[File, str | None]], fault: Fault) -> list[Entry]:
    folder = manifest.images
    entries: list[Entry] = []
    where: dict[str, File] = {}
    for number, (file, split) in enumerate(files):
        for entry in tar_entries(folder, number, file, split, fault):
            if (other := where.setdefault(entry.file_name, file)) is not file:
                raise ManifestError(
                    f"{url_of(folder, file.name)}: {entry.file_name} is in {url_of(folder, other.name)} already;"
                    " remove one of them."
                )
            entries.append(entry)
    return entries


def _from_tables(manifest: Manifest, files: list[tuple[File, str | None]], fault: Fault) -> list[Entry]:
    rows: list[Row] = []
    before = 0
    for number, (file, split) in enumerate(files):
        found, count = table_rows(manifest, number, file, split, fault)
        for row in found:
            row.number += before
        rows += found
        before += count
    paths = {row.path for row in rows if row.path is not None and _is_name(row.path)}
    for row in rows:
        row.entry.file_name = str(row.path) if len(paths) == len(rows) else f"{row.number:08d}"
    return [row.entry for row in rows]


def _is_name(path: str) -> bool:
    try:
        return file_name(path, "") == path
    except ManifestError:
        return False
