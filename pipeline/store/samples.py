"""The samples of a store: what was encoded, in rows of images and of captions."""

import itertools
import math
from collections.abc import Iterable, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import zarr

from ..data.samples import Samples
from ..data.sources import FOLDER, PictureReader, Place, Source, open_pictures
from ..data.texts import blocks_of, text_hashes
from ..errors import CacheError
from .folder import LOCK, Folder, NewArray, begin_group, write_group
from .rows import SampleArray

FORMAT, VERSION = "xret", 2
MODALITIES = ("images", "captions")
_SAMPLES_BYTES = 16 << 20  # of a chunk of the samples
_BLOCK = 1 << 14  # samples that are read together


class StoredSamples:
    """The samples of an open store, read when they are first used; attributes as of `store.FeatureCache`."""

    def __init__(self, folder: Folder, group: zarr.Group) -> None:
        self.folder, self.group = folder, group
        self.url, self.absolute_url = folder.url, folder.absolute_url  # the second is valid in any working folder
        attributes: dict[str, Any] = dict(group.attrs)
        self.dataset: str = attributes["dataset"]
        self.manifest_sha256: str = attributes["manifest_sha256"]
        self.protocols: tuple[str, ...] = tuple(attributes["protocols"])
        self.splits: dict[str, tuple[int, int]] = {name: (a, b) for name, (a, b) in attributes["splits"].items()}
        self.images: int = max(last for _, last in self.splits.values())  # of the data set
        self.source = Source.from_json(attributes["source"]) if "source" in attributes else FOLDER
        self.left_out: tuple[str, ...] = tuple(attributes.get("left_out", ()))
        self._samples: dict[str, SampleArray] = {}  # arrays that were opened
        self._before = {0: 0}  # captions before an image

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

    @cached_property
    def captions(self) -> int:
        """How many captions the data set has."""
        return int(self.array("samples/sentid").shape[0])

    def captions_of(self, first: int, last: int) -> tuple[int, int]:
        """Return the caption rows [start, stop) of the image rows [first, last)."""
        for image in {first, last} - self._before.keys():
            self._before[image] = int(self.sample_array("caption_count", 0, image).sum())
        return self._before[first], self._before[last]

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
        return self.sample_array("sentid", first, last)

    def open_pictures(self, folder: str | Path, first: int, last: int) -> PictureReader:
        """Return what opens the pictures of image rows [first, last) by their file names.

        These names start at `folder`, or those of the files that hold the pictures.
        """
        places: dict[str, Place] = {}
        if self.source != FOLDER:
            found = self.sample_array("place", first, last).tolist()
            places = {
                name: (file, at, then)
                for name, (file, at, then) in zip(self.file_names(first, last), found, strict=True)
            }
        return open_pictures(self.source, folder, places)

    def sample_array(self, name: str, first: int = 0, last: int | None = None) -> np.ndarray:
        """Return rows [first, last) of an array of the samples; CacheError if it is missing or damaged."""
        rows = self._opened(name)
        return rows.gather(np.array([first]), np.array([(rows.shape[0] if last is None else last) - first]))

    def _opened(self, name: str) -> SampleArray:
        if name not in self._samples:
            self._samples[name] = SampleArray(self.folder, self.array(f"samples/{name}"))
        return self._samples[name]

    def _texts(self, name: str, first: int, last: int) -> list[str]:
        if first >= last:
            return []
        offsets = self.sample_array(f"{name}_offset", first, last + 1).tolist()
        data = self.sample_array(name, offsets[0], offsets[-1]).tobytes()
        with self.folder.reading(f"samples/{name}"):
            return [data[a - offsets[0] : b - offsets[0]].decode() for a, b in itertools.pairwise(offsets)]

    def text_hashes(self, rows: np.ndarray) -> np.ndarray:
        """Return a number for the text of each of these caption rows, equal for equal texts, int64."""
        return self._known_hashes[rows] if self._known_hashes is not None else self._opened("text_hash").few(rows)

    @cached_property
    def _known_hashes(self) -> np.ndarray | None:
        """Those of all captions where the store was made before it had them."""
        if self.folder.exists("samples/text_hash"):
            return None
        blocks = (range(0, self.captions)[first : first + _BLOCK] for first in range(0, self.captions, _BLOCK))
        texts = (self.caption_texts(block.start, block.stop) for block in blocks)
        return np.concatenate([text_hashes(map(str.encode, block)) for block in texts])

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
    arrays = _sample_arrays(samples)
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


def _sample_arrays(samples: Samples) -> dict[str, NewArray]:
    images, rows = samples.images, samples.images.rows

    def numbers(values: np.ndarray, order: np.ndarray, dtype: str, *dimensions: str) -> NewArray:
        shape = len(order), *values.shape[1:]
        return _array(dimensions, shape, dtype, (values[part] for part in blocks_of(order)))

    arrays = {
        "split": numbers(images.splits, rows, "uint8", "image"),
        "cocoid": numbers(images.cocoids, rows, "int64", "image"),
        "sentid": numbers(images.sentids, images.captions, "int64", "caption"),
        "caption_count": _array(("image",), (len(rows),), "int32", [np.diff(images.edges).astype(np.int32)]),
    }
    if samples.source != FOLDER:
        arrays["place"] = numbers(images.places, rows, "int64", "image", "part")
    for name, texts, order in (
        ("id", images.ids, rows),
        ("file_name", images.names, rows),
        ("caption", images.texts, images.captions),
    ):
        if name == "caption":
            arrays["text_hash"] = _array(("caption",), (len(order),), "int64", map(text_hashes, texts.in_blocks(order)))
        data = (np.frombuffer(b"".join(block), np.uint8) for block in texts.in_blocks(order))
        arrays[name] = _array((f"{name}_byte",), (texts.size(order),), "uint8", data)
        arrays[f"{name}_offset"] = _array((f"{name}_edge",), (len(order) + 1,), "int64", texts.offsets(order))
    return arrays


def _array(dimensions: tuple[str, ...], shape: tuple[int, ...], dtype: str, blocks: Iterable[np.ndarray]) -> NewArray:
    rows = min(shape[0], _SAMPLES_BYTES // (np.dtype(dtype).itemsize * math.prod(shape[1:])))
    return NewArray(dimensions, shape, rows, dtype, blocks=blocks)
