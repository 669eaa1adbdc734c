"""Where the pictures of a store are."""

import logging
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import numpy as np

from ..data.images import NO_DIGEST, digest_of
from ..data.manifest import Manifest, bundled_manifests, load_manifest
from ..data.sources import FOLDER, PictureReader, find_source, is_url, missing_from
from ..errors import CacheError, ManifestError, SampleError
from ..store import OK, FeatureCache, ImageSet
from ..wording import printable

_LOOKED_FOR = 100  # images of which one has to be in a folder; single ones may be missing
_COMPARED = 8  # of which the files are compared with those that features were made of

log = logging.getLogger("xret")


def image_folder(cache: FeatureCache, data_root: Path | None) -> Path:
    """Return the folder that holds the images of a store.

    It is `data_root`, the folder ``images`` in it, or where a manifest in `data_root` says, which may be a copy of a
    bundled one; else where the bundled one says, below `data_root`. CacheError or ManifestError if they are not there.
    """
    folders = [] if data_root is None else [data_root, data_root / "images"]
    folders += [manifest.images for manifest in manifests_in(data_root, cache.dataset)]
    names = cache.file_names(0, min(cache.images, _LOOKED_FOR))
    for folder in folders:
        if len(missing_from(folder, names)) < len(names):
            return folder
    if cache.dataset in bundled_manifests():
        return load_manifest(cache.dataset, data_root).images
    tried = f"{names[0]} is not in {', '.join(map(str, folders))}" if folders else "no folder was given"
    raise CacheError(f"the images of '{cache.dataset}' are missing: {tried}; give their folder as --data-root DIR")


def manifests_in(folder: Path | None, dataset: str) -> Iterator[Manifest]:
    """Yield the manifests of a data set that lie in a folder, or next to that folder."""
    for path in sorted([*folder.glob("*.yaml"), *folder.parent.glob("*.yaml")]) if folder is not None else ():
        with suppress(ManifestError):
            manifest = load_manifest(path)
            if manifest.name == dataset:
                yield manifest


def find_pictures(cache: FeatureCache, data_root: Path | None) -> PictureReader:
    """Return what opens the pictures of a store by their file names; errors as of `image_folder`.

    `data_root` is that of `image_folder`; where pictures lie in files with others, what the names of these start from.
    """
    if cache.source != FOLDER:  # its files are compared as they are opened
        return cache.open_pictures(_folder_of_files(cache, data_root), 0, cache.images)
    pictures = cache.open_pictures(folder := image_folder(cache, data_root), 0, cache.images)
    if changed := _changed(cache, pictures):
        log.warning(
            "%s in %s is another file than the one that %s has features of; check --data-root.",
            *(printable(changed), folder, cache.url),
        )
    return pictures


def _changed(cache: FeatureCache, pictures: PictureReader) -> str | None:
    """Return the name of a picture whose file is another one now; a few of the first ones are compared."""
    names = cache.file_names(0, min(cache.images, _COMPARED))
    for features in (ImageSet(cache, name) for name in cache.set_names("images")):
        rows = np.flatnonzero(features.status[: len(names)] == OK)
        if len(rows) and "digest" in features.array_names:
            made_of = zip(rows.tolist(), map(bytes, features.array("digest", rows)), strict=True)
            now = ((names[row], then, digest_of(pictures.open(names[row]))) for row, then in made_of)
            return next((name for name, then, digest in now if digest not in (NO_DIGEST, then)), None)
    return None


def _folder_of_files(cache: FeatureCache, data_root: Path | None) -> Path:
    """Return the folder where the names of the files start that hold the pictures of a store.

    A store may come from a stranger: it names files outside `data_root` only where a manifest in there does, too.
    """
    names = [file.name for file in cache.source.files]
    for manifest in manifests_in(data_root, cache.dataset):
        if set(names) <= {file.name for file in find_source(manifest).files}:
            return manifest.images
    outside = [name for name in names if is_url(name) or Path(name).is_absolute() or ".." in Path(name).parts]
    if not outside and data_root is not None and (data_root / names[0]).exists():
        return data_root
    where = f"is not in {data_root}" if data_root else "lies in a folder that was not given"
    what = "of the manifest that names it" if outside else "that this name starts from"
    raise CacheError(
        f"the images of '{cache.dataset}' are missing: {(outside or names)[0]} {where}; give the folder {what} as"
        f" --data-root DIR"
    )


def unreadable(error: SampleError) -> SampleError:
    """Return the error of an image that was extracted and cannot be read now, with what to do."""
    return SampleError(error.sample, f"{error.reason}; put the extracted file back, or check --data-root")
