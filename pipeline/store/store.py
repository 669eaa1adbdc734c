"""The feature store: one Zarr v3 group a data set, with its samples and any number of feature sets.

Layout (format "xret", version 2):

- ``/`` attributes: format, version, dataset, manifest_sha256, splits {name: [first, last)} in image rows, protocols;
  where pictures lie in files with others also source, the files; where samples were left out also left_out, why.
  Written last, so that a store that has them is whole.
- ``/samples/``: id, file_name, caption (UTF-8 bytes, with ``*_offset``), split, cocoid, sentid, caption_count;
  text_hash i64[M], equal for equal captions, which older stores lack; where pictures lie in files with others also
  place i64[I,3], the number of the file and where in it.
- ``/images/SET/``: local [I,N,C], global [I,C], length i32[I], size i32[I,2] (w, h), digest u8[I,16] of the picture's
  file, stamp i64[I,2] (its bytes, ns of its last change), status u8[I]; of V views of an image local [I,V,N,C] and
  global [I,V,C]; of regions also boxes f32[I,N,4] (x1, y1, x2, y2 in pixels), classes i32[I,N], scores f32[I,N].
  After an image's length its rows are zero; a failed image holds NaN.
- ``/captions/SET/``: token i32[T], local [T,C], start i64[M], length i32[M], global [M,C], status u8[M].

Values are uncompressed, a crc32c at the end of each chunk. All arrays have ``dimension_names``.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import numpy as np
import zarr

from ..data.images import DIGEST_BYTES
from ..data.samples import Samples
from ..errors import CacheError, OutputError, nearest
from ..files import no_store
from .folder import LOCK, Folder, write_group
from .samples import FORMAT, MODALITIES, VERSION, StoredSamples, create_store
from .sets import NOT_DONE, CaptionSet, ImageSet


class UnfinishedError(CacheError):
    """The creation of a store was stopped."""


class FeatureCache(StoredSamples):
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

    @classmethod
    def open(cls, url: str | Path) -> "FeatureCache":
        """Open the store at a local path or fsspec URL.

        CacheError: there is none, or it is of another format, unfinished or damaged. StoreError: an object store does
        not answer.
        """
        folder = Folder(url)
        if not folder.exists("zarr.json"):
            raise no_store(url)
        with folder.reading("zarr.json", "extract into another --store"):
            group = zarr.open_group(folder.zarr, mode="r", zarr_format=3)
            attributes = dict(group.attrs)
            if not attributes:
                raise UnfinishedError(f"{url} is unfinished; run the same `xret extract` again")
            if attributes.get("format") != FORMAT:
                raise CacheError(f"{url} is a Zarr group, but not a feature store of xret; choose another --store")
            if attributes.get("version") != VERSION:
                raise CacheError(
                    f"{url} is a feature store of version {attributes.get('version')}, and this xret reads version"
                    f" {VERSION}; extract into another --store"
                )
            return cls(folder, group)

    def __reduce__(self) -> tuple[Any, ...]:
        return FeatureCache.open, (self.absolute_url,)

    # Feature sets

    def known_digests(self) -> np.ndarray:
        """Return the digest of each picture that a set has features of now, uint8 [I,16]; zeros of the others."""
        known = np.zeros((self.images, DIGEST_BYTES), np.uint8)
        for path in self.set_paths("images"):
            with suppress(CacheError):  # it is damaged, and may be repaired later
                features = ImageSet(self, path.partition("/")[2])
                if "digest" in features.array_names:  # zeros that nobody writes take no memory
                    np.maximum(known, features.digests, out=known)
        return known

    def set_paths(self, *modalities: str) -> list[str]:
        """Return ``images/NAME`` and ``captions/NAME`` of the feature sets, or those of some modalities only."""
        paths = []
        for path in (f"{side}/{name}" for side in modalities or MODALITIES for name in self.folder.names(side)):
            with suppress(CacheError), self.folder.reading(path):
                if not path.endswith("/zarr.json") and "fingerprint" in self.group[path].attrs:  # it is finished
                    paths.append(path)
        return paths

    def set_names(self, modality: str) -> list[str]:
        """Return the names of the feature sets of `modality`, ``images`` or ``captions``."""
        return [path.partition("/")[2] for path in self.set_paths(modality)]

    def set_at(self, path: str) -> ImageSet | CaptionSet:
        """Return the feature set at ``images/NAME`` or ``captions/NAME``."""
        modality, _, name = path.partition("/")
        return ImageSet(self, name) if modality == "images" else CaptionSet(self, name)

    def image_set(self, prefix: str = "auto", key: str = "image") -> ImageSet:
        """Return the image feature set that `fits` the prefix; ``auto``: the only one there.

        CacheError: none or several fit; the message lists what is there, and the `key` by which the user names one.
        """
        return ImageSet(self, self._find("images", prefix, key))

    def caption_set(self, prefix: str = "auto", key: str = "text") -> CaptionSet:
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


@contextmanager
def open_for_writing(url: str | Path, samples: Samples, protocols: Sequence[str] | None) -> Iterator[FeatureCache]:
    """Open the store of these samples at `url`, or create it without feature sets; nobody else writes meanwhile.

    It takes the `protocols`; None: it keeps its own.
    CacheError: something else is there, or another process is writing. OutputError: nothing can be written there.
    """
    find_store(url, samples)  # before a lock lies in something else
    with Folder(url).one_writer() as folder:
        if (cache := find_store(url, samples)) is None:
            create_store(folder, samples, protocols or ("full",))
            cache = FeatureCache.open(url)
        elif protocols is not None and cache.protocols != tuple(protocols):
            write_group(folder, "", {**cache.group.attrs, "protocols": list(protocols)})
            cache = FeatureCache.open(url)
        yield cache


def find_store(url: str | Path, samples: Samples) -> FeatureCache | None:
    """Return the store of these samples at `url`; None: there is none yet, or its creation was stopped.

    CacheError or OutputError: something else is there.
    """
    if not may_be_store(url):
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


def may_be_store(url: str | Path) -> bool:
    """Return whether a store is there, perhaps; CacheError or OutputError: a file, or a folder with other things."""
    folder = Folder(url)
    if folder.is_local and folder.fs.isfile(folder.root):
        raise OutputError(f"{url} is a file, and a store is a folder; choose another store")
    names = folder.names("")  # at one moment, as another process may be creating the store
    if "zarr.json" not in names and set(names) - {LOCK}:
        raise CacheError(f"{url} is not empty and holds no feature store; choose another store")
    return "zarr.json" in names


def splits_at(*urls: str | None) -> dict[str, str]:
    """Return the split of each picture, by file name, in the first of these that is a store; none if there is none.

    CacheError: it is damaged.
    """
    for url in filter(may_be_store, filter(None, urls)):
        with suppress(UnfinishedError):
            cache = FeatureCache.open(url)
            return {name: split for split, rows in cache.splits.items() for name in cache.file_names(*rows)}
    return {}


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
