"""The feature cache: one Zarr v3 group a data set, with its samples and any number of feature sets.

Layout (format "xret", version 1):

- ``/`` attributes: format, version, dataset, manifest_sha256, splits {name: [first, last)} in image rows, protocols.
- ``/samples/``: id, file_name, caption (UTF-8 bytes, with ``*_offset`` i64), split u8, cocoid i64, sentid i64,
  caption_start i64[I], caption_count i32[I], caption_image i64[M]; where pictures lie in files with others also
  place i64[I,3], the number of the file and where in it, and the attribute ``source``, the files.
- ``/images/<set>/``: local [I,N,C], length i32[I], global [I,C], status u8[I], size i32[I,2] (w, h),
  digest u8[I,16] of the picture's file;
  of V views of an image (attribute ``views``) local [I,V,N,C] and global [I,V,C], each view in files of its own;
  sets of regions also, where they are known: boxes f32[I,N,4] (x1, y1, x2, y2 in pixels), classes i32[I,N],
  scores f32[I,N]. After an image's length its rows are zero and its classes -1; a failed image holds NaN.
- ``/captions/<set>/``: local [T,C], token i32[T], start i64[M], length i32[M], global [M,C], status u8[M].
- ``/<images|captions>/<set>/done``: u8, one file a shard; ``seal`` u32[shards, files], one file a shard: of each file
  of the shard a checksum of its checksums and its place. Attribute ``seals`` of the samples likewise.

A shard holds the images of one split from `Blocks`, and the captions of the same images. A split begins a new shard,
so the rows of a set's arrays are those of the samples with a gap after each split; a gap's status stays 255.

``/generations/N`` are later generations of the cache, each laid out like this; see `generations`.
"""

import itertools
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from ..data.sources import FOLDER, PictureReader, Place, Source, open_pictures
from ..errors import CacheError, nearest
from .feature_sets import CaptionSet, ImageSet
from .rules import MOST, require_root, require_samples
from .storage.folder import GENERATIONS, home_of
from .storage.generations import require_generation, store_of
from .storage.store import Store

FORMAT, VERSION = "xret", 1
MODALITIES = ("images", "captions")


class FeatureCache:
    """A cache opened for reading: its samples, and its feature sets by name.

    Attributes:
        store: where this generation lies.
        url: of the cache, with all its generations.
        generation: the number of this one.
    """

    def __init__(self, store: Store, attributes: dict[str, Any]) -> None:
        self.store = store
        self.url, number = home_of(store.url)
        self.generation = number or 1
        require_root(self.url, attributes)
        self.dataset: str = attributes["dataset"]  # the manifest's name
        self.manifest_sha256: str = attributes["manifest_sha256"]  # of the samples
        self.protocols: tuple[str, ...] = tuple(attributes["protocols"])  # what ``--protocol auto`` evaluates
        # rows of images [first, last) of each split
        self.splits = {name: (first, last) for name, (first, last) in attributes["splits"].items()}
        of_samples = store.read_group("samples")
        require_samples(self.url, of_samples)
        self._seals: dict[str, list[int]] = of_samples.get("seals", {})  # none of an earlier version
        # The files that the pictures lie in.
        try:
            self.source = Source.from_json(of_samples["source"]) if "source" in of_samples else FOLDER
        except ValueError as error:
            raise CacheError(f"{self.url}: samples/zarr.json is damaged: {error}; get that store anew") from error
        self.left_out: tuple[str, ...] = tuple(of_samples.get("left_out", ()))  # samples, and why
        self._images = max(last for _, last in self.splits.values())

    @classmethod
    def open(cls, url: str, writer: str | None = None, generation: int | None = None) -> "FeatureCache":
        """Open the cache at a local path or fsspec URL.

        Args:
            url: of the cache, or ``CACHE/generations/N``.
            writer: that of its `Store`.
            generation: which; None: that of the URL, else the current one.

        Raises:
            CacheError: there is none, it is of another format or version, unfinished or damaged.
        """
        store = store_of(url, writer, generation)
        if not store.exists("zarr.json"):
            require_generation(url, generation)
            raise CacheError(
                f"{url}: no feature cache is there; check the path, or make one with `xret extract … --store {url}`"
            )
        attributes, damage = store.inspect_group("")
        if damage:
            require_generation(url, generation)
        foreign = attributes and not {"format", "digest", "unfinished"} & set(attributes)
        if foreign or (not damage and attributes.get("format") != FORMAT):
            raise CacheError(f"{url} is a Zarr group, but not a feature cache of xret; choose another --store")
        if not damage and attributes.get("version") != VERSION:
            raise CacheError(
                f"{url} is a feature cache of version {attributes.get('version')}, this xret reads version"
                f" {VERSION}; extract into another --store"
            )
        return cls(store, store.read_group(""))

    @property
    def address(self) -> str:
        """The URL of this generation, whichever is the current one; good in any working folder."""
        home, _ = home_of(self.store.absolute_url)
        return f"{home}/{GENERATIONS}/{self.generation}"

    @property
    def known_by(self) -> dict[str, Any]:
        """What tells the samples of this generation from others, in files of those who use them."""
        later = {"generation": self.generation} if self.generation > 1 else {}
        return {"dataset": self.dataset, "manifest_sha256": self.manifest_sha256, **later}

    # Read when first used: a task needs the samples of one shard only.

    @cached_property
    def caption_start(self) -> np.ndarray:
        """First caption row of each image, int64 [I]."""
        count = self.caption_count
        return self._as_counted("caption_start", np.cumsum(count, dtype=np.int64) - count)

    @cached_property
    def caption_count(self) -> np.ndarray:
        """Captions of each image, int32 [I]."""
        count = self._numbers("caption_count", self._images)
        if (count < 0).any() or count.sum(dtype=np.int64) != self._rows_of("caption_image"):
            raise self._wrong("caption_count")
        return count

    @cached_property
    def caption_image(self) -> np.ndarray:
        """Image row of each caption, int64 [M]."""
        return self._as_counted("caption_image", np.repeat(np.arange(self._images), self.caption_count))

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

    def open_pictures(self, folder: str | Path, first: int, last: int) -> PictureReader:
        """Return what opens the pictures of image rows [first, last) by their file names.

        Args:
            folder: where their names start, or those of the files that hold them.
            first, last: which.
        """
        if self.source == FOLDER:
            return open_pictures(FOLDER, folder, {})
        named = zip(self.file_names(first, last), self.places(first, last), strict=True)
        return open_pictures(self.source, folder, {name: place for name, place in named if place is not None})

    def places(self, first: int, last: int) -> list[Place | None]:
        """Return where the pictures of image rows [first, last) lie in the files of the source; None in a folder."""
        if self.source == FOLDER:
            return [None] * (last - first)
        array = self.store.open_array("samples/place")
        if array.shape != (self._images, 3) or array.dtype != np.int64:
            raise self._wrong("place")
        return [(file, at, then) for file, at, then in self.sample_array("place", first, last).tolist()]

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

    def image_set(self, prefix: str = "auto", key: str = "data.image") -> ImageSet:
        """Return the image feature set that `fits` the prefix; ``auto``: the only one there.

        Args:
            prefix: how its name begins.
            key: by what the user names one of several, for the message.

        Raises:
            CacheError: none or several fit; the message lists what is there.
        """
        return ImageSet(self, self._find("images", prefix, key))

    def caption_set(self, prefix: str = "auto", key: str = "data.text") -> CaptionSet:
        """Return the caption feature set that `fits` the prefix; otherwise like `image_set`."""
        return CaptionSet(self, self._find("captions", prefix, key))

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
        if not paths:
            there = ("--visual none", "images") if modality == "captions" else ("--text none", "captions")
            alone = f" with {there[0]}" if self.set_paths(there[1]) else ""
            raise CacheError(f"{self.url} has no features of {modality}; run `xret extract` on it{alone}, to its end")
        if prefix == "auto":  # a set without any finished shard is in nobody's way
            begun = [path for path in paths if (self.store.read_array(f"{path}/done") == 1).any()] if paths[1:] else []
            fitting = begun or paths
        elif f"{modality}/{prefix}" not in paths:
            fitting = [path for path in paths if self.fits(path, prefix)]
        return choose_set(self.url, prefix, paths, fitting, f" with {key}").partition("/")[2]

    def _numbers(self, name: str, rows: int) -> np.ndarray:
        """Return an array of the samples, of so many rows."""
        if (found := self._rows_of(name)) != rows:
            raise CacheError(
                f"{self.url}: samples/{name}/zarr.json is damaged: it has {found:,} rows, not {rows:,}; get that store"
                " anew"
            )
        return self.sample_array(name)

    def _rows_of(self, name: str) -> int:
        """Return how many rows an array of the samples has, without reading them."""
        shape = self.store.open_array(f"samples/{name}").shape
        if len(shape) != 1 or shape[0] > MOST:
            raise CacheError(
                f"{self.url}: samples/{name}/zarr.json is damaged: its shape is {shape}; get that store anew"
            )
        return int(shape[0])

    def _as_counted(self, name: str, expected: np.ndarray) -> np.ndarray:
        """Return an array of the samples that follows from their counts of captions."""
        if not np.array_equal(self._numbers(name, len(expected)), expected):
            raise self._wrong(name)
        return expected

    def _wrong(self, name: str) -> CacheError:
        return CacheError(f"{self.url}: samples/{name} has numbers that cannot be; get that store anew")

    def _texts(self, name: str, first: int, last: int) -> list[str]:
        offsets = self.sample_array(f"{name}_offset", first, last + 1)
        ordered = len(offsets) == last - first + 1 and (np.diff(offsets) >= 0).all()
        if not ordered or offsets[0] < 0 or offsets[-1] > self._rows_of(name):
            raise self._wrong(f"{name}_offset")
        raw = self.sample_array(name, int(offsets[0]), int(offsets[-1])).tobytes()
        try:
            return [raw[a:b].decode() for a, b in itertools.pairwise(offsets - offsets[0])]
        except UnicodeDecodeError as error:
            raise CacheError(f"{self.url}: a text of samples/{name} is not UTF-8; extract it again") from error


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
