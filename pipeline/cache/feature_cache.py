"""The feature cache: one Zarr v3 group a data set, with its samples and any number of feature sets.

Layout (format "xret", version 1):

- ``/`` attributes: format, version, dataset, manifest_sha256, splits {name: [first, last)} in image rows, protocols.
- ``/samples/``: id, file_name, caption (UTF-8 bytes, with ``*_offset`` i64), split u8, cocoid i64, sentid i64,
  caption_start i64[I], caption_count i32[I], caption_image i64[M].
- ``/images/<set>/``: local [I,N,C], length i32[I], global [I,C], status u8[I], size i32[I,2] (w, h);
  sets of regions also, where they are known: boxes f32[I,N,4] (x1, y1, x2, y2 in pixels), classes i32[I,N],
  scores f32[I,N]. Behind an image's length its rows are zero, its classes -1; a failed image holds NaN.
- ``/captions/<set>/``: local [T,C], token i32[T], start i64[M], length i32[M], global [M,C], status u8[M].
- ``/<images|captions>/<set>/done``: u8, one file a shard.

A shard holds the images of one split from `Blocks`, and the captions of the same images. A split begins a new shard,
so the rows of a set's arrays are those of the samples with a gap behind each split; a gap's status stays 255.
"""

import hashlib
import itertools
import json
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np

from ..errors import CacheError, nearest
from .rows import Rows
from .store import Store

FORMAT, VERSION = "xret", 1
OK, FAILED, NOT_DONE = 0, 1, 255


@dataclass(frozen=True)
class Blocks:
    """Which images each shard holds: `length` of them, the last shard of a split fewer.

    Args:
        length: images in a shard.
        splits: rows of images [first, last) of each split, in row order.
    """

    length: int
    splits: dict[str, tuple[int, int]]

    @classmethod
    def choose(cls, splits: dict[str, tuple[int, int]], length: int | None = None) -> "Blocks":
        """Take `length`, or one that gives the largest split 16 shards, of at most 512 images."""
        largest = max(last - first for first, last in splits.values())
        return cls(length or min(512, -(-largest // 16 // 8) * 8 or 8), splits)

    def of_split(self, split: str) -> range:
        """Return the shards of a split."""
        first = 0
        for name, (begin, end) in self.splits.items():
            last = first + -(-(end - begin) // self.length)
            if name == split:
                return range(first, last)
            first = last
        raise KeyError(split)

    def __len__(self) -> int:
        return sum(-(-(end - begin) // self.length) for begin, end in self.splits.values())

    def images(self, shard: int) -> tuple[int, int]:
        """Return the rows of images [first, last) that `shard` holds."""
        for name, (begin, end) in self.splits.items():
            shards = self.of_split(name)
            if shard in shards:
                first = begin + (shard - shards.start) * self.length
                return first, min(first + self.length, end)
        raise IndexError(shard)

    def shard_of(self, images: np.ndarray) -> np.ndarray:
        """Return the shard of each image row."""
        shards = np.empty(len(images), dtype=np.int64)
        for name, (begin, end) in self.splits.items():
            inside = (images >= begin) & (images < end)
            shards[inside] = self.of_split(name).start + (images[inside] - begin) // self.length
        return shards

    def array_rows(self, images: np.ndarray) -> np.ndarray:
        """Return the row in a set's arrays of each image row."""
        shards = self.shard_of(images)
        first = np.array([self.images(shard)[0] for shard in range(len(self))], dtype=np.int64)
        return shards * self.length + images - first[shards]


class FeatureCache:
    """A cache opened for reading: its samples, and its feature sets by name.

    Attributes:
        url: where it lies.
        dataset: the manifest's name.
        splits: rows of images [first, last) of each split.
        protocols: what ``--protocol auto`` evaluates.
    """

    def __init__(self, store: Store, attributes: dict[str, Any]) -> None:
        self.store = store
        self.url = store.url
        self.dataset: str = attributes["dataset"]
        self.manifest_sha256: str = attributes["manifest_sha256"]
        self.protocols: tuple[str, ...] = tuple(attributes["protocols"])
        self.splits = {name: (first, last) for name, (first, last) in attributes["splits"].items()}
        store.read_group("samples")

    @classmethod
    def open(cls, url: str) -> "FeatureCache":
        """Open the cache at a local path or fsspec URL.

        Raises:
            CacheError: there is none, it is of another format or version, unfinished or damaged.
        """
        store = Store(url)
        if not store.exists("zarr.json"):
            raise CacheError(
                f"{url}: no feature cache is there; check the path, or make one with `xret extract … --store {url}`"
            )
        attributes, damage = store.inspect_group("")
        foreign = attributes and not {"format", "digest", "unfinished"} & set(attributes)
        if foreign or (not damage and attributes.get("format") != FORMAT):
            raise CacheError(f"{url} is a Zarr group, but not a feature cache of xret; choose another --store")
        if not damage and attributes.get("version") != VERSION:
            raise CacheError(
                f"{url} is a feature cache of version {attributes.get('version')}, this xret reads version"
                f" {VERSION}; extract into another --store"
            )
        return cls(store, store.read_group(""))

    # Read when asked for: a task needs the samples of one shard.

    @cached_property
    def caption_start(self) -> np.ndarray:
        """First caption row of each image, int64 [I]."""
        return self._sample("caption_start")

    @cached_property
    def caption_count(self) -> np.ndarray:
        """Captions of each image, int32 [I]."""
        return self._sample("caption_count")

    @cached_property
    def caption_image(self) -> np.ndarray:
        """Image row of each caption, int64 [M]."""
        return self._sample("caption_image")

    @property
    def images(self) -> int:
        """How many images the data set has."""
        return len(self.caption_start)

    @property
    def captions(self) -> int:
        """How many captions the data set has."""
        return len(self.caption_image)

    def caption_texts(self, first: int, last: int) -> list[str]:
        """Return the texts of caption rows [first, last)."""
        return self._texts("caption", first, last)

    def file_names(self, first: int, last: int) -> list[str]:
        """Return the file names, below the manifest's image folder, of image rows [first, last)."""
        return self._texts("file_name", first, last)

    def ids(self, first: int, last: int) -> list[str]:
        """Return the ids of image rows [first, last)."""
        return self._texts("id", first, last)

    def sentids(self, first: int, last: int) -> np.ndarray:
        """Return the sentence ids, int64, of caption rows [first, last)."""
        return self.store.read_array("samples/sentid", first, last)

    def set_names(self, modality: str) -> list[str]:
        """Return the names of the feature sets of `modality`, ``images`` or ``captions``, without unfinished ones."""
        names = [name for name in self.store.names(modality) if name != "zarr.json"]
        paths = {name: f"{modality}/{name}" for name in names}
        # An empty folder is what a process leaves that was killed when it began or removed a set.
        return [name for name in names if self.store.names(paths[name]) and not self.store.is_unfinished(paths[name])]

    def image_set(self, prefix: str = "auto") -> "ImageSet":
        """Return the image feature set whose name begins with `prefix`; ``auto``: the only one there.

        Raises:
            CacheError: none or several fit; the message lists what is there.
        """
        return ImageSet(self, self._find("images", prefix))

    def caption_set(self, prefix: str = "auto") -> "CaptionSet":
        """Return the caption feature set whose name begins with `prefix`; ``auto``: the only one there.

        Raises:
            CacheError: none or several fit; the message lists what is there.
        """
        return CaptionSet(self, self._find("captions", prefix))

    def _find(self, modality: str, prefix: str) -> str:
        names = self.set_names(modality)
        if prefix == "auto":  # a set that an extraction began and could not fill is in nobody's way
            fitting = names if len(names) < 2 else [name for name in names if self._begun(modality, name)] or names
        else:
            fitting = [name for name in names if name.startswith(prefix)]
        exact = [name for name in fitting if name.split("@")[0] == prefix]
        if len(exact or fitting) == 1:
            return (exact or fitting)[0]
        there = ", ".join(names) if names else "none"
        key = "data.image" if modality == "images" else "data.text"
        if not fitting:
            hint = nearest(prefix, names) if names else "; run `xret extract`"
            raise CacheError(f"{self.url}: no feature set of {modality} fits '{prefix}'{hint}; there: {there}")
        raise CacheError(
            f"{self.url}: several feature sets of {modality} fit '{prefix}'; choose one with {key}: {there}"
        )

    def _begun(self, modality: str, name: str) -> bool:
        return bool((self.store.read_array(f"{modality}/{name}/done") == 1).any())

    def _sample(self, name: str) -> np.ndarray:
        return self.store.read_array(f"samples/{name}")

    def _texts(self, name: str, first: int, last: int) -> list[str]:
        offsets = self.store.read_array(f"samples/{name}_offset", first, last + 1)
        raw = self.store.read_array(f"samples/{name}", int(offsets[0]), int(offsets[-1])).tobytes()
        begins = offsets - offsets[0]
        return [raw[a:b].decode() for a, b in itertools.pairwise(begins)]


class FeatureSet:
    """What image and caption sets share: one encoder's features of one modality.

    Attributes:
        name: the encoder's name, ``@`` and the first 8 digits of the fingerprint.
        kind: ``grid``, ``roi``, ``frames``, ``words`` or ``tokens``.
        fingerprint: SHA-256 of what decides the features.
        identity: the same, readable.
        dtype: ``float16`` or ``float32``.
        channels: width of a local row; None for words.
        global_channels: width of the global feature; None for words.
        failed: {id: reason} of the samples that could not be read.
        blocks: which images each shard holds.
    """

    modality: str
    _at: Any  # row in this set's arrays of each row of the samples

    def __init__(self, cache: FeatureCache, name: str) -> None:
        self.cache, self.name = cache, name
        self.path = f"{self.modality}/{name}"
        self.attributes = cache.store.read_group(self.path)
        self.kind: str = self.attributes["kind"]
        self.fingerprint: str = self.attributes["fingerprint"]
        self.identity: dict[str, Any] = self.attributes["identity"]
        self.dtype: str = self.attributes["dtype"]
        self.channels: int | None = self.attributes["channels"]
        self.global_channels: int | None = self.attributes["global_channels"]
        self.failed: dict[str, str] = self.attributes["failed"]
        self.blocks = Blocks(self.attributes["shard_images"], cache.splits)
        self._rows: dict[str, Rows] = {}

    @cached_property
    def status(self) -> np.ndarray:
        """Of each sample, u8: 0 ok, 1 failed, 255 not done."""
        return self._whole("status")[self._at]

    @cached_property
    def length(self) -> np.ndarray:
        """Valid local rows, or tokens, of each sample, i32."""
        return self._whole("length")[self._at]

    def done(self) -> np.ndarray:
        """Return which shards are finished, bool [shards]."""
        return self.cache.store.read_array(f"{self.path}/done") == 1

    def complete(self, split: str) -> bool:
        """Return whether every shard of `split` is finished."""
        return bool(self.done()[self.blocks.of_split(split)].all())

    def array_names(self) -> list[str]:
        """Return the names of this set's arrays, `done` apart."""
        return [name for name in self.cache.store.names(self.path) if name not in ("done", "zarr.json")]

    def _whole(self, name: str) -> np.ndarray:
        """Return an array that has a value a sample; of a file that was lost Zarr would make up the values."""
        marked, there = (self.cache.store.names(f"{self.path}/{array}/c") for array in ("done", name))
        if lost := set(marked) - set(there):
            raise CacheError(
                f"{self.cache.url}: '{self.path}/{name}' has lost shard {min(map(int, lost))}; run `xret cache verify`,"
                " then the extraction again with --repair"
            )
        return self.cache.store.read_array(f"{self.path}/{name}")

    def _gather(self, name: str, first: np.ndarray, count: np.ndarray | int = 1) -> np.ndarray:
        if name not in self._rows:
            self._rows[name] = Rows(self.cache.store, f"{self.path}/{name}")
        return self._rows[name].gather(first, count)


class ImageSet(FeatureSet):
    """Image features of one encoder. Rows are image rows of the samples.

    Attributes:
        rows: local rows of an image, N (the longest, where it varies).
    """

    modality = "images"

    def __init__(self, cache: FeatureCache, name: str) -> None:
        super().__init__(cache, name)
        self.rows: int = self.attributes["rows"]

    @cached_property
    def _at(self) -> np.ndarray:
        return self.blocks.array_rows(np.arange(self.cache.images))

    def samples_in(self, shard: int) -> int:
        """Return how many images the shard holds."""
        first, last = self.blocks.images(shard)
        return last - first

    def rows_of(self, split: str) -> slice:
        """Return the image rows of a split."""
        return slice(*self.cache.splits[split])

    def local(self, rows: np.ndarray) -> np.ndarray:
        """Return the local features [B,N,C] of these image rows."""
        return self._gather("local", self._at[rows])

    def global_(self, rows: np.ndarray) -> np.ndarray:
        """Return the global features [B,C] of these image rows."""
        return self._gather("global", self._at[rows])

    def array(self, name: str, rows: np.ndarray) -> np.ndarray:
        """Return ``size`` [B,2] of these image rows, or of regions ``boxes`` [B,N,4], ``classes`` or ``scores`` [B,N].

        Raises:
            CacheError: the set has no such array.
        """
        return self._gather(name, self._at[rows])


class CaptionSet(FeatureSet):
    """Caption features of one encoder, packed. Rows are caption rows of the samples.

    Attributes:
        vocabulary: the words of a ``words`` set by token id; None for other kinds.
    """

    modality = "captions"

    def __init__(self, cache: FeatureCache, name: str) -> None:
        super().__init__(cache, name)
        words = self.attributes.get("vocabulary")
        self.vocabulary: tuple[str, ...] | None = None if words is None else tuple(words)

    @cached_property
    def _at(self) -> np.ndarray:
        return caption_array_rows(self.cache, self.blocks, self.attributes["shard_captions"])

    @cached_property
    def _start(self) -> np.ndarray:
        return self._whole("start")[self._at]

    def samples_in(self, shard: int) -> int:
        """Return how many captions the shard holds."""
        return int(self.cache.caption_count[slice(*self.blocks.images(shard))].sum())

    def rows_of(self, split: str) -> slice:
        """Return the caption rows of a split."""
        first, last = self.cache.splits[split]
        start = int(self.cache.caption_start[first])
        return slice(start, start + int(self.cache.caption_count[first:last].sum()))

    def local(self, rows: np.ndarray) -> np.ndarray:
        """Return the token features of these caption rows, packed [sum of lengths, C]."""
        return self._gather("local", self._start[rows], self.length[rows])

    def global_(self, rows: np.ndarray) -> np.ndarray:
        """Return the global features [B,C] of these caption rows."""
        return self._gather("global", self._at[rows])

    def token(self, rows: np.ndarray) -> np.ndarray:
        """Return the token ids of these caption rows, packed int32 [sum of lengths]."""
        return self._gather("token", self._start[rows], self.length[rows])


def caption_array_rows(cache: FeatureCache, blocks: Blocks, shard_captions: int) -> np.ndarray:
    """Return the row in a caption set's arrays of every caption row, int64 [M]."""
    shards = blocks.shard_of(cache.caption_image)
    first = np.array([cache.caption_start[blocks.images(s)[0]] for s in range(len(blocks))], dtype=np.int64)
    return shards * shard_captions + np.arange(cache.captions) - first[shards]


def fingerprint(identity: dict[str, Any], dtype: str) -> str:
    """Return the SHA-256 of what decides a set's features: encoder, weights, preprocessing, layer, dtype."""
    text = json.dumps({**identity, "dtype": dtype}, sort_keys=True, ensure_ascii=True)
    return hashlib.sha256(text.encode()).hexdigest()
