"""Where samples and pictures come from: a folder, tar shards, Parquet, or a saved data set, each read where it lies."""

import re
from collections import Counter
from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from itertools import chain
from pathlib import Path

from ...documents import DocumentError, read_json
from ...errors import ManifestError
from ..caption_files import caption_rows, imagefolder_rows, read_json_images
from ..image_columns import Images, read_rows
from ..manifest import Manifest
from ..rows import RowReader, folder_split
from .files import File, find_files, is_url, look_at_all, url_of
from .source import FOLDER, FolderReader, PictureReader, Place, Source, digests_of, is_one_file, missing_from
from .tables import IMAGE, TableReader, read_tables
from .tar import TarReader, tar_rows

__all__ = ["FOLDER", "FolderReader", "PictureReader", "Place", "Source", "digests_of", "is_url", "missing_from"]

_NAMES_SPLIT = re.compile(
    "train|training|trainval|val|valid|validation|minival|restval|dev|development|eval|evaluation|test|testing"
)
_Files = list[tuple[File, str | None]]  # with the split of all that is in each


def open_pictures(source: Source, folder: str | Path, places: Mapping[str, Place]) -> PictureReader:
    """Return what opens the pictures of a source by their names.

    `folder` is where these names, or those of the files that hold pictures, start; `places` are in these files.
    """
    if source.kind == "folder":
        return FolderReader(folder)
    return (TarReader if source.kind == "tar" else TableReader)(source, folder, places)


def find_source(manifest: Manifest) -> Source:
    """Return the files that a manifest names as they are now, without reading them; errors as of `find_files`."""
    return _list_files(manifest)[1]


def read_source(manifest: Manifest, skip: bool = False) -> tuple[Images, Source, list[str]]:
    """Read what a manifest names, but for the pictures themselves.

    Returns the images in the order of the source, its files, and a sentence for each sample without captions, all of
    which `skip` leaves out; else the first is an error. ManifestError: a file is missing, damaged or wrong.
    """
    (files, source), columns, rows = _list_files(manifest), manifest.columns, manifest.captions
    reader = RowReader(
        manifest.listing,
        replace(columns, image=source.column) if source.column else columns,
        skip=skip,
        whole=source.kind != "tar" and (rows is None or rows.suffix != ".json"),
        by_folder=manifest.kind in ("arrow", "imagefolder"),
    )
    images = _read_images(manifest, source.kind, files, reader)
    if lists := reader.lists():
        images = Images(reader.unfold(images, lists))
    if not images:
        first = f" ({reader.left_out[0]})" if reader.left_out else ""
        raise ManifestError(
            f"{manifest.listing}: it has no images with captions{first}; a data set needs at least one."
        )
    if images.kinds == (None,) and not any(map(folder_split, images.names)):
        _refuse_names_of_splits(manifest, files)
        reader.note_unread()
    return images, source, reader.left_out


def _read_images(manifest: Manifest, kind: str, files: _Files, reader: RowReader) -> Images:
    rows, urls = manifest.captions, [(url_of(manifest.images, file.name), split) for file, split in files]
    if rows is not None and rows.suffix == ".json":
        return read_json_images(rows, reader)
    if rows is not None:
        return read_rows(caption_rows(rows, reader, ""), partial(is_one_file, manifest.images))
    if manifest.kind == "imagefolder":
        return read_rows(imagefolder_rows(manifest.images, reader))
    if kind == "tar":
        of_each = (tar_rows(url, number, split, reader) for number, (url, split) in enumerate(urls))
        return read_rows(chain.from_iterable(of_each))
    return read_tables(kind, urls, reader)


def _refuse_names_of_splits(manifest: Manifest, files: _Files) -> None:
    """Raise ManifestError where the manifest names splits, or files are called so, as ``train-0.parquet``."""
    if manifest.columns.split:
        raise ManifestError(f"{manifest.listing}: no image has a '{manifest.columns.split}'; correct split_column.")
    parts = [[part.lower().removeprefix("split=") for part in Path(file.name).parts] for file, _ in files]
    words = [{re.split(r"[^a-z]", part)[0] for part in of_file} for of_file in parts]
    called = sorted(filter(_NAMES_SPLIT.fullmatch, set.union(*words) - set.intersection(*words))) if words else []
    if len(called) > 1:
        advice = f"give each split its files, as {manifest.kind}: {{train: train-*, test: test-*}}"
        raise ManifestError(f"{manifest.listing}: no sample has a split, but files are called {called}; {advice}.")


def _list_files(manifest: Manifest) -> tuple[_Files, Source]:
    if manifest.kind == "arrow":
        listed = _saved(manifest.images, manifest.packed[None], by_folder=manifest.columns.split is None)
    else:
        named = manifest.packed.items()
        listed = [(file, split) for split, name in named for file in find_files(manifest.images, name)]
    files = tuple(file for file, _ in listed)
    for name, times in Counter(file.name for file in files).items():
        if times > 1:
            raise ManifestError(f"{manifest.path}: {name} is named twice; name each file once.")
    if not manifest.packed:
        return listed, FOLDER
    return listed, Source(manifest.kind, files, "" if manifest.kind == "tar" else manifest.columns.image or IMAGE)


def _saved(folder: Path, name: str, by_folder: bool) -> _Files:
    """Return the Arrow files of a data set that ``save_to_disk`` of `datasets` wrote, or of each of its splits."""
    place = folder / name
    try:
        splits = read_json(place / "dataset_dict.json")["splits"] if (place / "dataset_dict.json").exists() else [""]
        named = []
        for split in splits:
            of_split = split if split and by_folder else None
            for one in read_json(place / split / "state.json")["_data_files"]:
                named.append((str(Path(name, split, one["filename"])), of_split))
    except (OSError, DocumentError, LookupError, TypeError) as error:
        raise ManifestError(f"{place}: this is not what `save_to_disk` writes ({error}); save it again.") from error
    files = look_at_all(folder, [name for name, _ in named])
    return [(file, split) for file, (_, split) in zip(files, named, strict=True)]
