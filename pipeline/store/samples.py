"""The samples of a store: what was encoded, in rows of images and of captions."""

import itertools
from collections.abc import Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import zarr

from ..data.manifest import SPLITS
from ..data.samples import Samples
from ..data.sources import FOLDER, PictureReader, Place, Source, open_pictures
from ..errors import CacheError
from .folder import LOCK, Folder, NewArray, begin_group, write_group
from .rows import Rows

FORMAT, VERSION = "xret", 2
MODALITIES = ("images", "captions")
_SAMPLES_BYTES = 64 << 20  # of a chunk of the samples, which are read whole


class StoredSamples:
    """The samples of an open store, read when they are first used; attributes as of `store.FeatureCache`."""

    def __init__(self, folder: Folder, group: zarr.Group) -> None:
        self.folder, self.url, self.group = folder, folder.url, group
        attributes: dict[str, Any] = dict(group.attrs)
        self.dataset: str = attributes["dataset"]
        self.manifest_sha256: str = attributes["manifest_sha256"]
        self.protocols: tuple[str, ...] = tuple(attributes["protocols"])
        self.splits: dict[str, tuple[int, int]] = {name: (a, b) for name, (a, b) in attributes["splits"].items()}
        self.source = Source.from_json(attributes["source"]) if "source" in attributes else FOLDER
        self.left_out: tuple[str, ...] = tuple(attributes.get("left_out", ()))
        self._samples: dict[str, np.ndarray] = {}  # arrays that were read

    @property
    def absolute_url(self) -> str:
        """The URL, valid in any working folder."""
        return self.folder.absolute_url

    @cached_property
    def caption_count(self) -> np.ndarray:
        """Captions of each image, int32 [I]."""
        return np.asarray(self.sample_array("caption_count"))

    @cached_property
    def caption_start(self) -> np.ndarray:
        """First caption row of each image, int64 [I]."""
        return np.asarray(np.cumsum(self.caption_count, dtype=np.int64) - self.caption_count)

    @cached_property
    def caption_image(self) -> np.ndarray:
        """Image row of each caption, int64 [M]."""
        return np.repeat(np.arange(self.images), self.caption_count)

    @property
    def images(self) -> int:
        """How many images the data set has."""
        return max(last for _, last in self.splits.values())

    @cached_property
    def captions(self) -> int:
        """How many captions the data set has."""
        return int(self.caption_count.sum())

    def captions_of(self, first: int, last: int) -> tuple[int, int]:
        """Return the caption rows [start, stop) of the image rows [first, last)."""
        start, stop = np.append(self.caption_start, self.captions)[[first, last]].tolist()
        return start, stop

    def caption_texts(self, first: int, last: int) -> list[str]:
        """Return the texts of caption rows [first, last)."""
        return self._texts("caption", first, last)

    def ids(self, first: int, last: int) -> list[str]:
        """Return the ids of image rows [first, last)."""
        return self._texts("id", first, last)

    def file_names(self, first: int, last: int) -> list[str]:
        """Return the file names, below the manifest's image folder, of image rows [first, last).

        CacheError: one leads out of the folder.
        """
        names = self._texts("file_name", first, last)
        for name in names:
            if name.startswith("/") or "\0" in name or ".." in name.split("/"):
                raise CacheError(f"{self.url}: the image {name!r} lies outside of the image folder; extract it again")
        return names

    def sentids(self, first: int, last: int) -> np.ndarray:
        """Return the sentence ids, int64, of caption rows [first, last)."""
        return self.sample_array("sentid")[first:last]

    def open_pictures(self, folder: str | Path, first: int, last: int) -> PictureReader:
        """Return what opens the pictures of image rows [first, last) by their file names.

        These names start at `folder`, or those of the files that hold the pictures.
        """
        places: dict[str, Place] = {}
        if self.source != FOLDER:
            found = self.sample_array("place")[first:last].tolist()
            places = {
                name: (file, at, then)
                for name, (file, at, then) in zip(self.file_names(first, last), found, strict=True)
            }
        return open_pictures(self.source, folder, places)

    def sample_array(self, name: str) -> np.ndarray:
        """Return an array of the samples; CacheError if it is missing or damaged."""
        if name not in self._samples:
            array = self.array(f"samples/{name}")
            rows = Rows(self.folder, array, advice="copy the store again, or extract into another --store")
            self._samples[name] = rows.whole(range(array.nchunks))
        return self._samples[name]

    def _texts(self, name: str, first: int, last: int) -> list[str]:
        if first >= last:
            return []
        offsets, data = self.sample_array(f"{name}_offset")[first : last + 1].tolist(), self.sample_array(name)
        with self.folder.reading(f"samples/{name}"):
            return [data[a:b].tobytes().decode() for a, b in itertools.pairwise(offsets)]

    def array(self, path: str) -> "zarr.Array[Any]":
        """Return an array of the store; CacheError if it is missing, or its metadata is damaged."""
        with self.folder.reading(path):
            found = self.group[path]
            assert isinstance(found, zarr.Array)
            return found


def create_store(folder: Folder, samples: Samples, protocols: Sequence[str]) -> None:
    """Create a store without feature sets; what a stopped creation left is replaced."""
    for name in folder.names(""):
        if name != LOCK:
            folder.remove(name)
    begin_group(folder, "")
    for name in MODALITIES:
        write_group(folder, name, {})
    arrays = {}
    for name, (dimensions, values) in _sample_arrays(samples).items():
        rows = min(len(values), _SAMPLES_BYTES // max(1, values.itemsize * values[:1].size))
        arrays[name] = NewArray(dimensions, values.shape, rows, values.dtype.name, values=values)
    write_group(folder, "samples", {"arrays": list(arrays)}, arrays)
    attributes: dict[str, Any] = {
        "format": FORMAT,
        "version": VERSION,
        "dataset": samples.dataset,
        "manifest_sha256": samples.digest,
        "splits": {name: list(rows) for name, rows in samples.splits.items()},
        "protocols": list(protocols),
    }
    if samples.source != FOLDER:
        attributes["source"] = samples.source.to_json()
    if samples.left_out:
        attributes["left_out"] = list(samples.left_out)
    write_group(folder, "", attributes)


def _sample_arrays(samples: Samples) -> dict[str, tuple[tuple[str, ...], np.ndarray]]:
    captions = [caption for image in samples.images for caption in image.captions]
    arrays: dict[str, tuple[tuple[str, ...], np.ndarray]] = {
        "split": (("image",), np.array([SPLITS.index(image.split) for image in samples.images], dtype=np.uint8)),
        "cocoid": (("image",), np.array([image.cocoid for image in samples.images], dtype=np.int64)),
        "sentid": (("caption",), np.array([caption.sentid for caption in captions], dtype=np.int64)),
        "caption_count": (("image",), np.array([len(image.captions) for image in samples.images], dtype=np.int32)),
    }
    if samples.source != FOLDER:
        arrays["place"] = ("image", "part"), np.array([image.place for image in samples.images], dtype=np.int64)
    texts = {
        "id": [image.id for image in samples.images],
        "file_name": [image.file_name for image in samples.images],
        "caption": [caption.text for caption in captions],
    }
    for name, strings in texts.items():
        encoded = [text.encode() for text in strings]
        arrays[name] = (f"{name}_byte",), np.frombuffer(b"".join(encoded), dtype=np.uint8)
        arrays[f"{name}_offset"] = (f"{name}_edge",), np.cumsum([0, *map(len, encoded)], dtype=np.int64)
    return arrays
