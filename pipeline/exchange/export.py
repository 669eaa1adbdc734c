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
from collections.abc import Iterator, Mapping, Sequence
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
_LEFT_OUT = ("status", "digest")  # arrays of a set that say nothing to others


@dataclass(frozen=True)
class ExportedSplit:
    """What was written of a split; `left_out` counts images that failed."""

    images: int
    captions: int
    left_out: int


@dataclass(frozen=True)
class Export:
    """What was exported: from where, to which file, which sets and splits, and the file's bytes."""

    store: str
    out: str
    sets: tuple[str, ...]
    splits: Mapping[str, ExportedSplit]
    bytes: int


def export(url: str, out: Path, sets: Sequence[str] = (), splits: Sequence[str] = DEFAULT_SPLITS) -> Export:
    """Write feature sets of the store at `url` to one HDF5 file, some images at a time.

    Images that failed are left out with their captions, and so are captions that failed. Of several views of an image
    the first is written, the image as it is.

    Args:
        url: the store.
        out: the file; it must not be there yet.
        sets: prefixes of the sets, at most one of images and one of captions; empty: the only ones there are.
        splits: which; each must be complete.

    Raises:
        OutputError: `out` exists or cannot be written.
        CacheError: the store, a set or a split is missing, incomplete or damaged, or there are several sets.
    """
    require_new(out, folder=False)
    selection = _Selection(FeatureCache.open(url), sets, splits)
    with making_file(out, OutputError, "make room, or take another --out") as partial:
        _write(selection, partial)
    return Export(
        store=url,
        out=str(out),
        sets=tuple(features.name for features in (selection.images, selection.captions) if features),
        splits={split: selection.counts(split) for split in selection.rows},
        bytes=out.stat().st_size,
    )


class _Selection:
    """What is exported.

    Attributes:
        cache: from where.
        images, captions: the sets, None where there is none.
        rows: the image rows of each split, without those that failed.
    """

    def __init__(self, cache: FeatureCache, prefixes: Sequence[str], splits: Sequence[str]) -> None:
        chosen = _choose(cache, prefixes)
        self.cache = cache
        self.images = ImageSet(cache, chosen["images"]) if "images" in chosen else None
        self.captions = CaptionSet(cache, chosen["captions"]) if "captions" in chosen else None
        unknown = [split for split in splits if split not in cache.splits]
        wanted = [split for split in cache.splits if split in splits]
        if not wanted or (unknown and tuple(splits) != DEFAULT_SPLITS):
            there = ", ".join(cache.splits)
            raise CacheError(f"{cache.url} has no split {', '.join(unknown)}; it has {there}: choose with --splits")
        for features in filter(None, (self.images, self.captions)):
            for split in wanted:
                require_complete(features, split)
        self.rows = {split: np.arange(*cache.splits[split]) for split in wanted}
        if self.images is not None:
            self.rows = {split: rows[self.images.status[rows] == OK] for split, rows in self.rows.items()}
        if empty := [split for split, kept in self.rows.items() if not len(kept)]:
            raise CacheError(f"{cache.url}: every image of split '{empty[0]}' failed; choose others with --splits")

    def batches(self, split: str) -> Iterator[np.ndarray]:
        """Yield the image rows of a split, some at a time."""
        rows = self.rows[split]
        return (rows[first : first + _IMAGES] for first in range(0, len(rows), _IMAGES))

    def caption_rows(self, rows: np.ndarray) -> np.ndarray:
        """Return the rows of the captions of these image rows, without captions that failed."""
        captions = ranges(self.cache.caption_start[rows], self.cache.caption_count[rows])
        return captions if self.captions is None else captions[self.captions.status[captions] == OK]

    def counts(self, split: str) -> ExportedSplit:
        """Return how much is exported of a split."""
        (first, last), rows = self.cache.splits[split], self.rows[split]
        return ExportedSplit(len(rows), len(self.caption_rows(rows)), last - first - len(rows))

    def totals(self) -> dict[str, int]:
        """Return how many images, captions and tokens are exported."""
        rows = np.concatenate(list(self.rows.values()))
        captions = self.caption_rows(rows)
        tokens = int(self.captions.length[captions].sum()) if self.captions else 0
        return {"image": len(rows), "caption": len(captions), "token": tokens}

    def image_arrays(self, rows: np.ndarray, split: str, first_caption: int) -> dict[str, np.ndarray]:
        """Return what the file holds of these image rows."""
        cache, features = self.cache, self.images
        counts = np.searchsorted(self.cache.caption_image[self.caption_rows(rows)], [rows, rows + 1])
        counts = (counts[1] - counts[0]).astype(np.int32)
        arrays = {
            "id": _texts(texts_of(cache.ids, rows)),
            "file_name": _texts(texts_of(cache.file_names, rows)),
            "split": _texts([split] * len(rows)),
            "cocoid": cache.sample_array("cocoid")[rows],
            "caption_start": first_caption + np.cumsum(counts, dtype=np.int64) - counts,
            "caption_count": counts,
        }
        if features is not None:
            views = {"local": features.local, "global": features.global_}
            for name in features.array_names:
                if name not in _LEFT_OUT:
                    arrays[name] = views[name](rows) if name in views else features.array(name, rows)
        return arrays

    def caption_arrays(
        self, rows: np.ndarray, first_image: int, first_token: int
    ) -> tuple[dict[str, np.ndarray], dict[str, np.ndarray]]:
        """Return what the file holds of the captions of these image rows: a row a caption, and a row a token."""
        cache, features, captions = self.cache, self.captions, self.caption_rows(rows)
        if not len(captions):  # all of them failed
            return {}, {}
        arrays = {
            "text": _texts(texts_of(cache.caption_texts, captions)),
            "sentid": cache.sample_array("sentid")[captions],
            "image": first_image + np.searchsorted(rows, cache.caption_image[captions]),
        }
        if features is None:
            return arrays, {}
        if features.global_channels is not None:
            arrays["global"] = features.global_(captions)
        if "token" not in features.array_names:
            return arrays, {}
        lengths = features.length[captions]
        arrays |= {"length": lengths, "start": first_token + np.cumsum(lengths, dtype=np.int64) - lengths}
        of_tokens = {"token": features.token(captions)}
        if features.channels is not None:
            of_tokens["local"] = features.local(captions)
        return arrays, of_tokens


def _choose(cache: FeatureCache, prefixes: Sequence[str]) -> dict[str, str]:
    """Return the name of the set to export by modality, at most one of each and one at least."""
    there = cache.set_paths()
    chosen = {
        choose_set(cache.url, prefix, there, [path for path in there if cache.fits(path, prefix)], " with --set")
        for prefix in prefixes
    } or set(there)
    for modality in MODALITIES:
        several = sorted(path for path in chosen if path.startswith(f"{modality}/"))
        if len(several) > 1:
            raise CacheError(
                f"{cache.url}: only one set of {modality} fits in an export; choose with --set: {', '.join(several)}"
            )
    if not chosen:
        raise CacheError(f"{cache.url}: there is no feature set to export; run `xret extract`")
    return dict(path.split("/", 1) for path in chosen)


def _write(selection: _Selection, out: Path) -> None:
    disk = _Disk(out, "w+")
    with disk, h5py.File(disk, "w") as file:
        cache, splits = selection.cache, {}
        images, captions = file.create_group("images"), file.create_group("captions")
        for group, features in ((images, selection.images), (captions, selection.captions)):
            _describe(group, features)
        totals, at = selection.totals(), dict.fromkeys(("image", "caption", "token"), 0)
        with Progress("export", totals["image"], "images") as progress:
            for split in selection.rows:
                first = at["image"]
                for rows in selection.batches(split):
                    if disk.failure:
                        break
                    of_images = selection.image_arrays(rows, split, at["caption"])
                    of_captions, of_tokens = selection.caption_arrays(rows, at["image"], at["token"])
                    for kind, group, arrays in (
                        ("image", images, of_images),
                        ("caption", captions, of_captions),
                        ("token", captions, of_tokens),
                    ):
                        for name, values in arrays.items():
                            _append(group, name, values, at[kind], totals[kind])
                        at[kind] += max(map(len, arrays.values()), default=0)
                    progress.update(len(rows))
                splits[split] = [first, at["image"]]
        file.attrs.update(dataset=cache.dataset, manifest_sha256=cache.manifest_sha256, splits=json.dumps(splits))
    if disk.failure:
        raise disk.failure


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


def _describe(group: h5py.Group, features: ImageSet | CaptionSet | None) -> None:
    if features is not None:
        facts = {"set": features.name, "kind": features.kind, "fingerprint": features.fingerprint}
        group.attrs.update(facts, identity=json.dumps(features.identity))
    if isinstance(features, CaptionSet) and features.vocabulary is not None:
        group.create_dataset("vocabulary", data=list(features.vocabulary), dtype=_TEXT)


def _append(group: h5py.Group, name: str, values: np.ndarray, first: int, total: int) -> None:
    """Write rows from `first` on of a dataset of `total` rows, which is made when its first rows come."""
    if name not in group:
        rows = 1 if values.ndim == 3 and name == "local" else max(min(_ROWS, total), 1)  # images are read at random
        dtype = _TEXT if values.dtype == object else values.dtype
        group.create_dataset(name, (total, *values.shape[1:]), dtype, chunks=(rows, *values.shape[1:]))
    group[name][first : first + len(values)] = values


def _texts(texts: list[str]) -> np.ndarray:
    return np.array(texts, dtype=object)
