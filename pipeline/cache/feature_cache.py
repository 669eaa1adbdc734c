"""The feature cache: one Zarr v3 group a data set, with its samples and any number of feature sets.

Layout (format "xret", version 1):

- ``/`` attributes: format, version, dataset, manifest_sha256, splits {name: [first, last)} in image rows, protocols.
- ``/samples/``: id, file_name, caption (UTF-8 bytes, with ``*_offset`` i64), split u8, cocoid i64, sentid i64,
  caption_start i64[I], caption_count i32[I], caption_image i64[M].
- ``/images/<set>/``: local [I,N,C], length i32[I], global [I,C], status u8[I], size i32[I,2] (w, h);
  of V views of an image (attribute ``views``) local [I,V,N,C] and global [I,V,C], each view in files of its own;
  sets of regions also, where they are known: boxes f32[I,N,4] (x1, y1, x2, y2 in pixels), classes i32[I,N],
  scores f32[I,N]. After an image's length its rows are zero and its classes -1; a failed image holds NaN.
- ``/captions/<set>/``: local [T,C], token i32[T], start i64[M], length i32[M], global [M,C], status u8[M].
- ``/<images|captions>/<set>/done``: u8, one file a shard; ``seal`` u32[shards, files], one file a shard: of each file
  of the shard a checksum of its checksums and its place. Attribute ``seals`` of the samples likewise.

A shard holds the images of one split from `Blocks`, and the captions of the same images. A split begins a new shard,
so the rows of a set's arrays are those of the samples with a gap after each split; a gap's status stays 255.
"""

import itertools
from functools import cached_property
from typing import Any

import numpy as np

from ..documents import TEXT, Rule, fault
from ..errors import CacheError, nearest
from .feature_sets import MOST, CaptionSet, ImageSet
from .storage.store import Store

FORMAT, VERSION = "xret", 1
MODALITIES = ("images", "captions")


class FeatureCache:
    """A cache opened for reading: its samples, and its feature sets by name."""

    def __init__(self, store: Store, attributes: dict[str, Any]) -> None:
        self.store = store
        self.url = store.url
        if wrong := fault(attributes, _RULES, {}):
            raise CacheError(f"{self.url}/zarr.json is damaged: {wrong}; get that store anew")
        self.dataset: str = attributes["dataset"]  # the manifest's name
        self.manifest_sha256: str = attributes["manifest_sha256"]  # of the samples
        self.protocols: tuple[str, ...] = tuple(attributes["protocols"])  # what ``--protocol auto`` evaluates
        # rows of images [first, last) of each split
        self.splits = {name: (first, last) for name, (first, last) in attributes["splits"].items()}
        self._seals: dict[str, list[int]] = store.read_group("samples").get("seals", {})  # none of an earlier version
        self._images = max(last for _, last in self.splits.values())

    @classmethod
    def open(cls, url: str, writer: str | None = None) -> "FeatureCache":
        """Open the cache at a local path or fsspec URL; `writer` is that of its `Store`.

        Raises:
            CacheError: there is none, it is of another format or version, unfinished or damaged.
        """
        store = Store(url, writer)
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

    # Read when first used: a task needs the samples of one shard only.

    @cached_property
    def caption_start(self) -> np.ndarray:
        """First caption row of each image, int64 [I]."""
        return self._numbers("caption_start", self._images)

    @cached_property
    def caption_count(self) -> np.ndarray:
        """Captions of each image, int32 [I]."""
        return self._numbers("caption_count", self._images)

    @cached_property
    def caption_image(self) -> np.ndarray:
        """Image row of each caption, int64 [M]."""
        return self._numbers("caption_image")

    @property
    def images(self) -> int:
        """How many images the data set has."""
        return len(self.caption_start)

    @property
    def captions(self) -> int:
        """How many captions the data set has."""
        return len(self.caption_image)

    def captions_of(self, first: int, last: int) -> tuple[int, int]:
        """Return the caption rows [start, stop) of the image rows [first, last)."""
        start = int(self.caption_start[first])
        return start, start + int(self.caption_count[first:last].sum())

    def caption_texts(self, first: int, last: int) -> list[str]:
        """Return the texts of caption rows [first, last)."""
        return self._texts("caption", first, last)

    def file_names(self, first: int, last: int) -> list[str]:
        """Return the file names, below the manifest's image folder, of image rows [first, last).

        Raises:
            CacheError: one leads out of the folder; a store may come from a stranger.
        """
        names = self._texts("file_name", first, last)
        for name in names:
            if name.startswith("/") or "\0" in name or ".." in name.split("/"):
                raise CacheError(
                    f"{self.url} names the image {name!r}, which is no file in its folder; extract it again"
                )
        return names

    def ids(self, first: int, last: int) -> list[str]:
        """Return the ids of image rows [first, last)."""
        return self._texts("id", first, last)

    def sentids(self, first: int, last: int) -> np.ndarray:
        """Return the sentence ids, int64, of caption rows [first, last)."""
        return self.sample_array("sentid", first, last)

    def sample_array(self, name: str, first: int = 0, last: int | None = None) -> np.ndarray:
        """Return the rows [first, last) of an array of the samples, by default all.

        Raises:
            CacheError: it is damaged, or its files do not lie where they were written.
        """
        if name not in self._seals:
            return self.store.read_array(f"samples/{name}", first, last)
        return self.store.read_sealed(f"samples/{name}", self._seals[name], first, last)

    def set_names(self, modality: str) -> list[str]:
        """Return the names of the feature sets of `modality`, ``images`` or ``captions``, without unfinished ones."""
        return [path.partition("/")[2] for path in self.set_paths(modality)]

    def set_paths(self, *modalities: str) -> list[str]:
        """Return ``images/NAME`` and ``captions/NAME`` of the feature sets, or those of some modalities only."""
        paths = []
        for modality in modalities or MODALITIES:
            paths += [f"{modality}/{name}" for name in self.store.names(modality) if name != "zarr.json"]
        # An empty folder is what a process leaves that was killed when it began or removed a set.
        return [path for path in paths if self.store.names(path) and not self.store.is_unfinished(path)]

    def set_at(self, path: str) -> ImageSet | CaptionSet:
        """Return the feature set at ``images/NAME`` or ``captions/NAME``."""
        modality, _, name = path.partition("/")
        return ImageSet(self, name) if modality == "images" else CaptionSet(self, name)

    def image_set(self, prefix: str = "auto") -> ImageSet:
        """Return the image feature set that `fits` the prefix; ``auto``: the only one there.

        Raises:
            CacheError: none or several fit; the message lists what is there.
        """
        return ImageSet(self, self._find("images", prefix, "data.image"))

    def caption_set(self, prefix: str = "auto") -> CaptionSet:
        """Return the caption feature set that `fits` the prefix; otherwise like `image_set`."""
        return CaptionSet(self, self._find("captions", prefix, "data.text"))

    def fits(self, path: str, prefix: str) -> bool:
        """Return whether the set at ``images/NAME`` or ``captions/NAME`` is called so.

        Its name begins with `prefix`, after ``images/`` or ``captions/`` if need be; or that is the kind of its
        encoder, as ``bert`` is of any model of that family.
        """
        modality, slash, begin = prefix.rpartition("/")
        if slash and not path.startswith(f"{modality}/"):
            return False
        return begin != "" and (path.partition("/")[2].startswith(begin) or self._encoder(path) == begin)

    def _encoder(self, path: str) -> str:
        """Return the kind of the encoder that made a set; an imported one has none, and one that is damaged."""
        identity = self.store.inspect_group(path)[0].get("identity")
        return str(identity.get("encoder", "")) if isinstance(identity, dict) else ""

    def _find(self, modality: str, prefix: str, key: str) -> str:
        paths = self.set_paths(modality)
        fitting = None
        if prefix == "auto":  # a set without any finished shard is in nobody's way
            begun = [path for path in paths if (self.store.read_array(f"{path}/done") == 1).any()] if paths[1:] else []
            fitting = begun or paths
        elif f"{modality}/{prefix}" not in paths:
            fitting = [path for path in paths if self.fits(path, prefix)]
        return choose_set(self.url, prefix, paths, fitting, f" with {key}").partition("/")[2]

    def _numbers(self, name: str, rows: int | None = None) -> np.ndarray:
        """Return an array of the samples, of so many rows."""
        shape = self.store.open_array(f"samples/{name}").shape
        if len(shape) != 1 or shape[0] > MOST or rows not in (None, shape[0]):
            expected = "one row a caption" if rows is None else f"the {rows:,} images of the splits"
            raise CacheError(
                f"{self.url}: samples/{name}/zarr.json is damaged: its shape is {shape}, not {expected}; get that store"
                " anew"
            )
        return self.sample_array(name)

    def _texts(self, name: str, first: int, last: int) -> list[str]:
        offsets = self.sample_array(f"{name}_offset", first, last + 1)
        raw = self.sample_array(name, int(offsets[0]), int(offsets[-1])).tobytes()
        try:
            return [raw[a:b].decode() for a, b in itertools.pairwise(offsets - offsets[0])]
        except UnicodeDecodeError as error:
            raise CacheError(f"{self.url}: a text of samples/{name} is not UTF-8; extract it again") from error


def _are_splits(value: Any) -> bool:
    """Return whether a value is the rows [first, last) of splits, one after the other from 0."""
    if not isinstance(value, dict) or not value:
        return False
    end = 0
    for pair in value.values():
        if not isinstance(pair, list) or [type(row) for row in pair] != [int, int] or not end == pair[0] < pair[1]:
            return False
        end = pair[1]
    return end <= MOST


_RULES: dict[str, Rule] = {
    "dataset": TEXT,
    "manifest_sha256": TEXT,
    "protocols": (
        "a list of texts",
        lambda value: isinstance(value, list) and all(isinstance(one, str) for one in value),
    ),
    "splits": ("rows of images, split after split from 0", _are_splits),
}


def choose_set(url: str, prefix: str, paths: list[str], fitting: list[str] | None = None, by: str = "") -> str:
    """Return the one feature set that `prefix` means.

    Args:
        url: the store, for the message.
        prefix: what a set's name begins with, after ``images/`` or ``captions/`` if need be. A set whose encoder has
            exactly this name goes before the others.
        paths: all sets, as ``images/NAME`` and ``captions/NAME``.
        fitting: those that may be meant; None: those that begin with `prefix`.
        by: how the user names one of several, for the message.

    Raises:
        CacheError: none or several fit; the message lists what is there.
    """
    modality, slash, begin = prefix.rpartition("/")
    names = {path: path.partition("/")[2] for path in paths if not slash or path.startswith(f"{modality}/")}
    if fitting is None:
        fitting = [path for path, name in names.items() if begin and name.startswith(begin)]
    exact = [path for path in fitting if names[path].split("@")[0] == begin]
    if len(exact or fitting) == 1:
        return (exact or fitting)[0]
    if fitting:
        raise CacheError(f"{url}: several feature sets fit '{prefix}': {', '.join(fitting)}; name one of them{by}")
    there = f"; there: {', '.join(paths)}" if paths else "; there is none at all: run `xret extract`"
    raise CacheError(f"{url}: no feature set fits '{prefix}'{nearest(prefix, [*paths, *names.values()])}{there}")
