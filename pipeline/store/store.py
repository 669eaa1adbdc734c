"""The feature store: one Zarr v3 group a data set, with its samples and any number of feature sets.

Layout (format "xret", version 2):

- ``/`` attributes: format, version, dataset, manifest_sha256, splits {name: [first, last)} in image rows, protocols;
  where pictures lie in files with others also source, the files; where samples were left out also left_out, why.
  Written last, so that a store that has them is whole.
- ``/samples/``: id, file_name, caption (UTF-8 bytes, with ``*_offset``), split, cocoid, sentid, caption_count; where
  pictures lie in files with others also place i64[I,3], the number of the file and where in it.
- ``/images/SET/``: local [I,N,C], global [I,C], length i32[I], size i32[I,2] (w, h), digest u8[I,16] of the picture's
  file, stamp i64[I,2] (its bytes, ns of its last change), status u8[I]; of V views of an image local [I,V,N,C] and
  global [I,V,C]; of regions also boxes f32[I,N,4] (x1, y1, x2, y2 in pixels), classes i32[I,N], scores f32[I,N].
  After an image's length its rows are zero; a failed image holds NaN.
- ``/captions/SET/``: token i32[T], local [T,C], start i64[M], length i32[M], global [M,C], status u8[M].

Values are uncompressed, a crc32c at the end of each chunk. All arrays have ``dimension_names``.
"""

import itertools
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from functools import cached_property
from pathlib import Path
from typing import Any

import google_crc32c
import numpy as np
import zarr
from zarr.codecs import Crc32cCodec

from ..data.digests import BYTES
from ..data.manifest import SPLITS
from ..data.samples import Samples
from ..data.sources import FOLDER, PictureReader, Place, Source, open_pictures
from ..errors import CacheError, OutputError, nearest
from ..files import no_store
from .folder import DAMAGED, LOCK, Folder
from .sets import NOT_DONE, CaptionSet, ImageSet

FORMAT, VERSION = "xret", 2
MODALITIES = ("images", "captions")
_SAMPLES_BYTES = 64 << 20  # of a chunk of the samples, which are read whole


class UnfinishedError(CacheError):
    """The creation of a store was stopped."""


class FeatureCache:
    """A store of one data set's samples and any number of feature sets.

    Attributes:
        folder: where it lies; `url` is the same, as given.
        dataset: the manifest's name.
        manifest_sha256: of the samples.
        protocols: what ``--protocol auto`` evaluates.
        splits: rows of images [first, last) of each split.
        source: the files that the pictures lie in.
        left_out: samples of the source that are not in the store, and why.
    """

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

    @classmethod
    def open(cls, url: str | Path, *, writable: bool = False) -> "FeatureCache":
        """Open the store at a local path or fsspec URL.

        CacheError: there is none, or it is of another format, unfinished or damaged. StoreError: an object store does
        not answer.
        """
        folder = Folder(url)
        if not folder.exists("zarr.json"):
            raise no_store(url)
        try:
            with folder.answering():
                group = zarr.open_group(folder.zarr(writable=writable), mode="r+" if writable else "r", zarr_format=3)
                attributes = dict(group.attrs)
        except (*DAMAGED, FileNotFoundError) as error:
            raise CacheError(f"{url}/zarr.json is damaged; extract into another --store") from error
        if not attributes:
            raise UnfinishedError(f"{url} is unfinished; run the same `xret extract` again")
        if attributes.get("format") != FORMAT:
            raise CacheError(f"{url} is a Zarr group, but not a feature store of xret; choose another --store")
        if attributes.get("version") != VERSION:
            raise CacheError(
                f"{url} is a feature store of version {attributes.get('version')}, and this xret reads version"
                f" {VERSION}; extract into another --store"
            )
        try:
            return cls(folder, group)
        except DAMAGED as error:
            raise CacheError(f"{url}/zarr.json is damaged ({error}); extract into another --store") from error

    def __reduce__(self) -> tuple[Any, ...]:
        return FeatureCache.open, (self.absolute_url,)

    @property
    def absolute_url(self) -> str:
        """The URL, valid in any working folder."""
        return self.folder.absolute_url

    # Samples, read when they are first used

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

    def known_digests(self) -> np.ndarray:
        """Return the digest of each picture that a set has features of now, uint8 [I,16]; zeros of the others."""
        known = np.zeros((self.images, BYTES), np.uint8)
        for name in self.set_names("images"):
            with suppress(CacheError):  # it is damaged, and may be repaired later
                known = np.maximum(known, ImageSet(self, name).digests)
        return known

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
            # Zarr would take fill values for a file that is missing, as where a store was copied in part.
            if sum(file.startswith("c.") for file in self.folder.names(array.path)) < array.nchunks:
                raise CacheError(
                    f"{self.url}: 'samples/{name}' has lost a file; copy it again, or extract into another --store"
                )
            self._samples[name] = self.read_array(array)
        return self._samples[name]

    def _texts(self, name: str, first: int, last: int) -> list[str]:
        if first >= last:
            return []
        offsets, data = self.sample_array(f"{name}_offset")[first : last + 1].tolist(), self.sample_array(name)
        try:
            return [data[a:b].tobytes().decode() for a, b in itertools.pairwise(offsets)]
        except UnicodeDecodeError as error:
            raise CacheError(f"{self.url}: samples/{name} is damaged; extract into another --store") from error

    def array(self, path: str) -> "zarr.Array[Any]":
        """Return an array of the store; CacheError if it is missing, or its metadata is damaged."""
        with self.folder.answering():
            try:
                found = self.group[path]
                assert isinstance(found, zarr.Array)
                return found
            except DAMAGED as error:
                raise CacheError(f"{self.url}: '{path}' is missing or damaged") from error

    def read_array(self, array: "zarr.Array[Any]") -> np.ndarray:
        """Read an array whole; CacheError if a checksum does not fit."""
        try:
            with self.folder.answering():
                return np.asarray(array[:])
        except ValueError as error:  # what the checksum's codec raises
            raise CacheError(f"{self.url}: '{array.path}' is damaged; run `xret cache verify`") from error

    # Feature sets

    def set_paths(self, *modalities: str) -> list[str]:
        """Return ``images/NAME`` and ``captions/NAME`` of the feature sets, or those of some modalities only."""
        paths = [f"{modality}/{name}" for modality in modalities or MODALITIES for name in self.folder.names(modality)]
        return [path for path in paths if not path.endswith("/zarr.json") and self._fingerprint(path)]

    def set_names(self, modality: str) -> list[str]:
        """Return the names of the feature sets of `modality`, ``images`` or ``captions``."""
        return [path.partition("/")[2] for path in self.set_paths(modality)]

    def set_at(self, path: str) -> ImageSet | CaptionSet:
        """Return the feature set at ``images/NAME`` or ``captions/NAME``."""
        modality, _, name = path.partition("/")
        return ImageSet(self, name) if modality == "images" else CaptionSet(self, name)

    def image_set(self, prefix: str = "auto", key: str = "data.image") -> ImageSet:
        """Return the image feature set that `fits` the prefix; ``auto``: the only one there.

        CacheError: none or several fit; the message lists what is there, and the `key` by which the user names one.
        """
        return ImageSet(self, self._find("images", prefix, key))

    def caption_set(self, prefix: str = "auto", key: str = "data.text") -> CaptionSet:
        """Return the caption feature set that `fits` the prefix; otherwise like `image_set`."""
        return CaptionSet(self, self._find("captions", prefix, key))

    def ragged(self, name: str, split: str) -> tuple[np.ndarray, np.ndarray]:
        """Return the rows of a split's samples, one sample after the other, and where each begins, int64 [S + 1].

        Sample i of the split has ``rows[offsets[i] : offsets[i + 1]]``: local features [R,C] of an image, in its first
        view, or of a caption; of a set of ``words`` their ids, int32 [R].

            rows, offsets = cache.ragged("captions/bert", "test")

        Args:
            name: how the name of the set begins, with ``images/`` or ``captions/`` where both have such a set.
            split: one of the store's, all of it done.

        Raises:
            CacheError: there is no such set or split, it is not done, or the set has global features alone.
        """
        paths = self.set_paths()
        fitting = [name] if name in paths else [path for path in paths if self.fits(path, name)]
        features = self.set_at(choose_set(self.url, name, paths, fitting))
        if split not in self.splits:
            raise CacheError(f"{self.url} has no split '{split}'; it has {', '.join(self.splits)}")
        if not features.complete(split):
            raise CacheError(f"{self.url}: split '{split}' of '{features.name}' is not done; extract it first")
        if features.kind == "global":
            raise CacheError(f"{self.url}: '{features.name}' has one vector a sample and no rows; read its `global`")
        within = features.rows_of(split)
        offsets = np.concatenate([[0], np.cumsum(features.length[within], dtype=np.int64)])
        return features.packed(np.arange(within.start, within.stop)), offsets

    def fits(self, path: str, prefix: str) -> bool:
        """Return whether the set at ``images/NAME`` or ``captions/NAME`` is meant by `prefix`.

        Its name begins with it, after ``images/`` or ``captions/`` if need be; or it is the kind of its encoder, as
        ``bert`` is of any model of that family.
        """
        modality, slash, begin = prefix.rpartition("/")
        if slash and not path.startswith(f"{modality}/"):
            return False
        if begin and path.partition("/")[2].startswith(begin):
            return True
        return begin != "" and self.set_at(path).identity.get("encoder") == begin

    def _find(self, modality: str, prefix: str, key: str) -> str:
        paths = self.set_paths(modality)
        if not paths:
            left_out = f" without --{'visual' if modality == 'images' else 'text'} none" if self.set_paths() else ""
            raise CacheError(f"{self.url} has no features of {modality}; run `xret extract` on it{left_out}")
        fitting = paths
        if prefix == "auto":  # a set of which nothing is done is in nobody's way
            begun = [path for path in paths if (self.set_at(path).status != NOT_DONE).any()] if paths[1:] else []
            fitting = begun or paths
        elif f"{modality}/{prefix}" in paths:
            fitting = [f"{modality}/{prefix}"]
        else:
            fitting = [path for path in paths if self.fits(path, prefix)]
        return choose_set(self.url, prefix, paths, fitting, f" with {key}").partition("/")[2]

    def _fingerprint(self, path: str) -> str | None:
        """Return the fingerprint of a set; None of an unfinished one."""
        with self.folder.answering():
            try:
                return str(self.group[path].attrs["fingerprint"])
            except DAMAGED:
                return None

    # Writing

    def create_set(self, path: str, attributes: Mapping[str, Any], arrays: Mapping[str, tuple[Any, ...]]) -> None:
        """Create an empty feature set at ``images/NAME`` or ``captions/NAME``; what lies there is replaced.

        Of the `attributes` ``fingerprint`` marks it as whole; of the `arrays`, each as `create_array` takes it,
        ``status`` is the last.
        """
        self.folder.remove(path)
        with self.folder.answering():
            group = self.group.create_group(path, overwrite=True)
            for name, how in arrays.items():
                create_array(group, name, *how)
        seal(self.folder, group, {**attributes, "arrays": list(arrays)})

    def remove_set(self, path: str) -> None:
        """Delete a feature set, its attributes first, so that a stopped removal leaves an unfinished set."""
        self.folder.remove(f"{path}/zarr.json")
        self.folder.remove(path)


@contextmanager
def open_for_writing(url: str | Path, samples: Samples, protocols: Iterable[str]) -> Iterator[FeatureCache]:
    """Open the store of these samples at `url`, or create it without feature sets; nobody else writes meanwhile.

    CacheError: something else is there, or another process is writing. OutputError: nothing can be written there.
    """
    known, folder = find_store(url, samples), Folder(url)
    with folder.one_writer():
        if known is None and find_store(url, samples) is None:  # another process may have created it meanwhile
            _create(folder, samples, list(protocols))
        yield FeatureCache.open(url, writable=True)


def find_store(url: str | Path, samples: Samples) -> FeatureCache | None:
    """Return the store of these samples at `url`; None: there is none yet, or its creation was stopped.

    CacheError or OutputError: something else is there.
    """
    folder = Folder(url)
    if folder.is_local and folder.fs.isfile(folder.root):
        raise OutputError(f"{url} is a file, and a store is a folder; choose another store")
    names = folder.names("")  # at one moment, as another process may be creating the store
    if "zarr.json" not in names:
        if set(names) - {LOCK}:
            raise CacheError(f"{url} is not empty and holds no feature store; choose another store")
        return None
    try:
        cache = FeatureCache.open(url)
    except UnfinishedError:
        return None
    if cache.manifest_sha256 != samples.digest:
        raise CacheError(
            f"{url} holds other samples (data set '{cache.dataset}', {cache.manifest_sha256[:8]}, not"
            f" '{samples.dataset}', {samples.digest[:8]}); extract into another store with --reuse {url}"
        )
    if cache.source != samples.source:
        raise CacheError(
            f"{url} was made of other files with the same samples; put the files back as they were, or extract into"
            f" another store with --reuse {url}"
        )
    return cache


def splits_at(*urls: str | None) -> dict[str, str]:
    """Return the split of each picture, by file name, in the first of these that is a store; none if there is none."""
    for url in filter(None, urls):
        with suppress(CacheError):
            cache = FeatureCache.open(url)
            return {name: split for split, rows in cache.splits.items() for name in cache.file_names(*rows)}
    return {}


def create_array(
    group: zarr.Group,
    name: str,
    dimensions: tuple[str, ...],
    shape: tuple[int, ...],
    rows: int,
    dtype: str,
    fill: float = 0,
) -> "zarr.Array[Any]":
    """Create an array, uncompressed, each chunk of so many rows with a crc32c."""
    return group.create_array(
        name,
        shape=shape,
        chunks=(max(1, rows), *shape[1:]),
        dtype=dtype,
        fill_value=fill,
        filters=None,
        compressors=[Crc32cCodec()],
        chunk_key_encoding={"name": "default", "separator": "."},
        dimension_names=dimensions,
        config={"write_empty_chunks": True},
        overwrite=True,
    )


def seal(folder: Folder, group: zarr.Group, attributes: Mapping[str, Any]) -> None:
    """Write a group's attributes, which mark it as whole, with a checksum of its metadata and its arrays'."""
    arrays = list(attributes.get("arrays", ()))
    folder.sync([group.path, *(f"{group.path}/{name}".lstrip("/") for name in arrays)])
    with folder.answering():
        group.attrs.put({**attributes, "checksum": 0})
    name = f"{group.path}/zarr.json".lstrip("/")
    number = checksum(folder, group.path, arrays)
    folder.write(name, (folder.read(name) or b"").replace(b'"checksum": 0', b'"checksum": %d' % number))


def checksum(folder: Folder, path: str, arrays: Sequence[str]) -> int:
    """Return the crc32c of the metadata of a group, its own checksum blanked, and of these arrays of its."""
    files = [folder.read("/".join(filter(None, (path, name, "zarr.json")))) or b"" for name in ("", *arrays)]
    files[0] = re.sub(rb'"checksum": \d+', b'"checksum": 0', files[0])
    return int(google_crc32c.value(b"\0".join(files)))


def _create(folder: Folder, samples: Samples, protocols: list[str]) -> None:
    with folder.answering():
        for name in (*MODALITIES, "samples", "zarr.json"):  # what a stopped creation left
            folder.remove(name)
        root = zarr.create_group(folder.zarr(writable=True), zarr_format=3)
        for name in MODALITIES:
            seal(folder, root.create_group(name), {})
        group = root.create_group("samples")
        arrays = _sample_arrays(samples)
        for name, (dimensions, values) in arrays.items():
            rows = min(len(values), _SAMPLES_BYTES // max(1, values.itemsize * values[:1].size))
            array = create_array(group, name, dimensions, values.shape, rows, values.dtype.name)
            if len(values):
                array[:] = values
    seal(folder, group, {"arrays": list(arrays)})
    attributes: dict[str, Any] = {
        "format": FORMAT,
        "version": VERSION,
        "dataset": samples.dataset,
        "manifest_sha256": samples.digest,
        "splits": {name: list(rows) for name, rows in samples.splits.items()},
        "protocols": protocols,
    }
    if samples.source != FOLDER:
        attributes["source"] = samples.source.to_json()
    if samples.left_out:
        attributes["left_out"] = list(samples.left_out)
    seal(folder, root, attributes)


def _sample_arrays(samples: Samples) -> dict[str, tuple[tuple[str, ...], np.ndarray]]:
    """Return the arrays of the samples by name, with their dimension names."""
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


def choose_set(url: str, prefix: str, paths: list[str], fitting: list[str], remedy: str = "") -> str:
    """Return the only one of the `fitting` sets; one whose encoder is called exactly so goes before the others.

    CacheError: there are none or several; the message lists what is there.
    """
    begin = prefix.rpartition("/")[2]
    exact = [path for path in fitting if path.partition("/")[2].partition("@")[0] == begin]
    if len(exact or fitting) == 1:
        return (exact or fitting)[0]
    if fitting:
        raise CacheError(f"{url}: several feature sets fit '{prefix}': {', '.join(fitting)}; choose one{remedy}")
    names = [*paths, *(path.partition("/")[2] for path in paths)]
    there = f"; there are {', '.join(paths)}" if paths else "; there are none: run `xret extract`"
    raise CacheError(f"{url}: no feature set fits '{prefix}'{nearest(prefix, names)}{there}")
