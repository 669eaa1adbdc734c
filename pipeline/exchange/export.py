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
import json
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
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
                counts = _Writer(cache, images, captions, file, disk).write(rows)
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


@dataclass
class _Writer:
    cache: FeatureCache
    images: ImageSet | None
    captions: CaptionSet | None
    file: h5py.File
    disk: _Disk

    def write(self, rows: Mapping[str, np.ndarray]) -> dict[str, dict[str, int]]:
        """Write the image rows of each split with their captions; return the counts of each split."""
        cache, counts = self.cache, {}
        self.written: Counter[str] = Counter()  # images, captions and tokens
        for group, features in (("images", self.images), ("captions", self.captions)):
            self._describe(self.file.create_group(group), features)
        with Progress("export", sum(map(len, rows.values())), "images") as progress:
            for split, of_split in rows.items():
                before = self.written.copy()
                for first in range(0, len(of_split), _IMAGES):
                    some = of_split[first : first + _IMAGES]
                    if not self.disk.failure:
                        self._put(some, split)
                    progress.update(len(some))
                left_out = cache.splits[split][1] - cache.splits[split][0] - len(of_split)
                captions = self.written["captions"] - before["captions"]
                counts[split] = {"images": len(of_split), "captions": captions, "left_out": left_out}
        ends = np.cumsum([0, *map(len, rows.values())]).tolist()
        splits = {split: [ends[number], ends[number + 1]] for number, split in enumerate(rows)}
        about = {"dataset": cache.dataset, "manifest_sha256": cache.manifest_sha256, "splits": json.dumps(splits)}
        self.file.attrs.update(about)
        return counts

    def _describe(self, group: h5py.Group, features: ImageSet | CaptionSet | None) -> None:
        if features is not None:
            facts = {"set": features.name, "kind": features.kind, "fingerprint": features.fingerprint}
            group.attrs.update(facts, identity=json.dumps(features.identity))
        if isinstance(features, CaptionSet) and features.vocabulary is not None:
            group.create_dataset("vocabulary", data=list(features.vocabulary), dtype=_TEXT)

    def _put(self, rows: np.ndarray, split: str) -> None:
        """Append these images of a split, and their captions."""
        cache, features = self.cache, self.captions
        captions = ranges(cache.caption_start[rows], cache.caption_count[rows])
        if features is not None:
            captions = captions[features.status[captions] == OK]
        owner = np.searchsorted(rows, cache.caption_image[captions])
        count = np.bincount(owner, minlength=len(rows)).astype(np.int32)
        of_captions = {
            "text": _texts(texts_of(cache.caption_texts, captions)),
            "sentid": cache.sample_array("sentid")[captions],
            "image": self.written["images"] + owner,
        }
        of_tokens = {}
        if features is not None and features.global_channels is not None:
            of_captions["global"] = features.global_(captions)
        if features is not None and "token" in features.array_names:
            length = features.length[captions]
            of_captions |= {"length": length, "start": self.written["tokens"] + _starts(length)}
            of_tokens["token"] = features.token(captions)
            if features.channels is not None:
                of_tokens["local"] = features.local(captions)
        of_images = {
            "id": _texts(texts_of(cache.ids, rows)),
            "file_name": _texts(texts_of(cache.file_names, rows)),
            "split": _texts([split] * len(rows)),
            "cocoid": cache.sample_array("cocoid")[rows],
            "caption_start": self.written["captions"] + _starts(count),
            "caption_count": count,
        }
        if self.images is not None:
            views = {"local": self.images.local, "global": self.images.global_}
            for name in self.images.array_names:
                if name not in ("status", "digest"):
                    of_images[name] = views[name](rows) if name in views else self.images.array(name, rows)
        self._append("images", "images", of_images)
        self._append("captions", "captions", of_captions)
        self._append("captions", "tokens", of_tokens)

    def _append(self, group: str, kind: str, arrays: Mapping[str, np.ndarray]) -> None:
        """Append rows to the datasets of a group, which are made when their first rows come."""
        for name, values in arrays.items():
            if name not in self.file[group]:
                rows = 1 if kind == "images" and name == "local" else _ROWS  # images are read at random
                dtype, shape = _TEXT if values.dtype == object else values.dtype, values.shape[1:]
                self.file[group].create_dataset(
                    name, (0, *shape), dtype, chunks=(rows, *shape), maxshape=(None, *shape)
                )
            dataset = self.file[group][name]
            dataset.resize(len(dataset) + len(values), axis=0)
            dataset[len(dataset) - len(values) :] = values
        self.written[kind] += max(map(len, arrays.values()), default=0)


def _starts(count: np.ndarray) -> np.ndarray:
    starts: np.ndarray = np.cumsum(count, dtype=np.int64) - count
    return starts


def _texts(texts: list[str]) -> np.ndarray:
    return np.array(texts, dtype=object)
