"""Feature sets go out as one HDF5 file with the samples of some splits, in the store's order, and their features.

- ``/`` attributes: dataset, manifest_sha256, and splits, JSON {name: [first, last)} of the file's image rows.
- ``/images/``: id, file_name, split (texts), cocoid, caption_start i64[I], caption_count i32[I]; of the image set, if
  there is one, local [I,N,C], a chunk an image, length i32[I], global [I,C], size i32[I,2] (width, height; zeros where
  it is not known), and of regions boxes [I,N,4] (x1, y1, x2, y2 in pixels), classes and scores [I,N].
- ``/captions/``: text, sentid i64[M], image i64[M], the file's image row of each; of the caption set, if there is one,
  token i32[T] and local [T,C], packed, with start i64[M] and length i32[M], global [M,C]; vocabulary, the words by
  token id, for a set of words.
- Both groups have the attributes of their set: set, kind, fingerprint, and identity, JSON.
"""

import io
import itertools
import json
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import h5py
import numpy as np

from ..errors import CacheError, OutputError
from ..extraction.options import DEFAULT_SPLITS
from ..files import making_file, require_new
from ..progress import Progress
from ..reading.split import require_complete, texts_of
from ..store import OK, CaptionSet, FeatureCache, ImageSet
from ..store.rows import ranges
from ..store.store import MODALITIES, choose_set

_Read = Callable[[np.ndarray], np.ndarray]  # values of some rows of the store
_TEXT = h5py.string_dtype()
_ROWS = 1024  # rows in a chunk of an array of small rows
_IMAGES = 64  # read and written at once


def export(url: str, out: Path, sets: Sequence[str] = (), splits: Sequence[str] = DEFAULT_SPLITS) -> dict[str, Any]:
    """Write feature sets of the store at `url` to one new HDF5 file, some images at a time.

    `sets` are prefixes, at most one of images and one of captions; empty: the only ones there are. Images that failed
    are left out with their captions, and so are captions that failed. Of several views the first is written. Return
    ``sets``, ``bytes``, and the ``images``, ``captions`` and images ``left_out`` by split in ``splits``.
    OutputError: `out` exists or cannot be written. CacheError: the store, a set or a split is missing, incomplete or
    damaged, or there are several sets.
    """
    require_new(out, folder=False)
    cache = FeatureCache.open(url)
    images, captions = _choose(cache, sets)
    rows = _usable(cache, images, captions, splits)
    with making_file(out, OutputError, "make room, or take another --out") as partial:
        disk = _Disk(partial, "w+")
        try:
            with disk, h5py.File(disk, "w") as file:
                counts = _write(file, disk, cache, images, captions, rows)
        except ValueError as error:  # h5py raises it of a NUL in a text
            raise CacheError(f"{url}: an id or caption cannot be exported ({error}); choose other --splits") from error
        if disk.failure:
            raise disk.failure
    names = tuple(features.name for features in (images, captions) if features)
    return {"store": url, "out": str(out), "sets": names, "splits": counts, "bytes": out.stat().st_size}


def _choose(cache: FeatureCache, prefixes: Sequence[str]) -> tuple[ImageSet | None, CaptionSet | None]:
    """Return the sets to export, at most one of each modality and one at least."""
    there = cache.set_paths()
    if not there:
        raise CacheError(f"{cache.url}: there is no feature set to export; run `xret extract`")
    fitting = {prefix: [path for path in there if cache.fits(path, prefix)] for prefix in prefixes} or {"auto": there}
    names: dict[str, str] = {}
    for prefix, paths in fitting.items():
        for modality in MODALITIES:
            of_modality = [path for path in paths if path.startswith(f"{modality}/")]
            if not of_modality and paths:
                continue
            name = choose_set(cache.url, prefix, there, of_modality, " with --set").partition("/")[2]
            if names.setdefault(modality, name) != name:
                raise CacheError(f"{cache.url}: only one set of {modality} fits in an export; choose with --set")
    return (
        ImageSet(cache, names["images"]) if "images" in names else None,
        CaptionSet(cache, names["captions"]) if "captions" in names else None,
    )


def _usable(
    cache: FeatureCache, images: ImageSet | None, captions: CaptionSet | None, splits: Sequence[str]
) -> dict[str, np.ndarray]:
    """Return the image rows of each split, without those that failed."""
    unknown = [split for split in splits if split not in cache.splits]
    wanted = [split for split in cache.splits if split in splits]
    if not wanted or (unknown and tuple(splits) != DEFAULT_SPLITS):
        there = ", ".join(cache.splits)
        raise CacheError(f"{cache.url} has no split {', '.join(unknown)}; it has {there}: choose with --splits")
    rows = {}
    for split in wanted:
        for features in filter(None, (images, captions)):
            require_complete(features, split)
        of_split = np.arange(*cache.splits[split])
        rows[split] = of_split if images is None else of_split[images.status[of_split] == OK]
        if not len(rows[split]):
            raise CacheError(f"{cache.url}: every image of split '{split}' failed; choose others with --splits")
    return rows


class _Disk(io.FileIO):
    """A file that keeps the first error of writing: HDF5 crashes the process if it cannot write what it closes."""

    failure: OSError | None = None

    def write(self, data: Any) -> int:
        left = memoryview(data)
        try:
            while len(left) and not self.failure:
                left = left[super().write(left) :]
        except OSError as error:
            self.failure = OSError(error.errno, error.strerror, str(self.name))
        return len(data)

    def truncate(self, size: int | None = None) -> int:
        return super().truncate(None if self.failure else size)


def _write(
    file: h5py.File,
    disk: _Disk,
    cache: FeatureCache,
    images: ImageSet | None,
    captions: CaptionSet | None,
    splits: Mapping[str, np.ndarray],
) -> dict[str, dict[str, int]]:
    """Write the image rows of each split with their captions; return the counts of each split."""
    rows = np.concatenate([*splits.values()])
    caption_rows = ranges(cache.caption_start[rows], cache.caption_count[rows])
    if captions is not None:
        caption_rows = caption_rows[captions.status[caption_rows] == OK]
    owner = np.searchsorted(rows, cache.caption_image[caption_rows])
    count = np.bincount(owner, minlength=len(rows)).astype(np.int32)
    start = _starts(count)
    whole = {  # arrays of little memory
        "images/split": np.repeat(np.array([*splits], object), [*map(len, splits.values())]),
        "images/cocoid": cache.sample_array("cocoid")[rows],
        "images/caption_start": start,
        "images/caption_count": count,
        "captions/sentid": cache.sample_array("sentid")[caption_rows],
        "captions/image": owner,
    }
    read: dict[str, _Read] = {
        "images/id": _texts(cache.ids),
        "images/file_name": _texts(cache.file_names),
        "captions/text": _texts(cache.caption_texts),
    }
    if images is not None:
        first_view: dict[str, _Read] = {"local": images.local, "global": images.global_}
        for name in images.array_names:
            if name not in ("status", "digest"):
                read[f"images/{name}"] = first_view.get(name, partial(images.array, name))
    if captions is not None:
        features = {"token": captions.token, "local": captions.local, "global": captions.global_}
        read |= {f"captions/{name}": features[name] for name in captions.array_names if name in features}
        if "token" in captions.array_names:
            length = captions.length[caption_rows]
            whole |= {"captions/length": length, "captions/start": _starts(length)}
        if captions.vocabulary is not None:
            whole["captions/vocabulary"] = np.array(captions.vocabulary, object)
    for name, values in whole.items():
        _append(file, name, values)
    for one in filter(None, (images, captions)):
        facts = {"set": one.name, "kind": one.kind, "fingerprint": one.fingerprint}
        file[one.modality].attrs.update(facts, identity=json.dumps(one.identity))
    with Progress("export", len(rows), "images") as progress:
        for first in range(0, len(rows), _IMAGES):
            some = rows[first : first + _IMAGES]
            theirs = caption_rows[start[first] :][: count[first : first + _IMAGES].sum()]
            for name, of_rows in read.items():
                if not disk.failure:
                    _append(file, name, of_rows(some if name.startswith("images/") else theirs))
            progress.update(len(some))
    ends = np.cumsum([0, *map(len, splits.values())]).tolist()
    places = dict(zip(splits, itertools.pairwise(ends), strict=True))
    file.attrs.update(dataset=cache.dataset, manifest_sha256=cache.manifest_sha256, splits=json.dumps(places))
    return {
        split: {
            "images": last - first,
            "captions": int(count[first:last].sum()),
            "left_out": len(range(*cache.splits[split])) - (last - first),
        }
        for split, (first, last) in places.items()
    }


def _append(file: h5py.File, name: str, values: np.ndarray) -> None:
    """Append rows to a dataset, which is made when its first rows come."""
    if name not in file:
        rows = 1 if name == "images/local" else _ROWS  # images are read at random
        dtype, shape = _TEXT if values.dtype == object else values.dtype, values.shape[1:]
        file.create_dataset(name, (0, *shape), dtype, chunks=(rows, *shape), maxshape=(None, *shape))
    dataset = file[name]
    dataset.resize(len(dataset) + len(values), axis=0)
    dataset[len(dataset) - len(values) :] = values


def _starts(count: np.ndarray) -> np.ndarray:
    starts: np.ndarray = np.cumsum(count, dtype=np.int64) - count
    return starts


def _texts(read: Callable[[int, int], list[str]]) -> _Read:
    return lambda rows: np.array(texts_of(read, rows), dtype=object)
