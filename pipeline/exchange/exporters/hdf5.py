"""One HDF5 file with the samples of the exported splits, in the store's order, and their features.

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
from pathlib import Path
from typing import Any

import h5py
import numpy as np

from ...progress import Progress
from ...reading.split import texts_of
from ...store import CaptionSet, ImageSet
from .selection import Selection

_TEXT = h5py.string_dtype()
_ROWS = 1024  # rows in a chunk of an array of small rows


def write(selection: Selection, out: Path) -> None:
    """Write the selection to an empty file.

    Raises:
        OSError: the file cannot be written.
        CacheError: something in the cache is damaged.
    """
    disk = _Disk(out, "w+")
    with disk, h5py.File(disk, "w") as file:
        cache, splits = selection.cache, {}
        images, captions = file.create_group("images"), file.create_group("captions")
        for group, features in ((images, selection.images), (captions, selection.captions)):
            _describe(group, features)
        totals, at = _totals(selection), dict.fromkeys(("image", "caption", "token"), 0)
        with Progress("export", totals["image"], "images") as progress:
            for split in selection.rows:
                first = at["image"]
                for rows in selection.batches(split):
                    if disk.failure:
                        break
                    of_images = _image_arrays(selection, rows, split, at["caption"])
                    of_captions, of_tokens = _caption_arrays(selection, rows, at["image"], at["token"])
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


def _totals(selection: Selection) -> dict[str, int]:
    """Return how many images, captions and tokens the file will hold."""
    every = np.concatenate(list(selection.rows.values()))
    captions = selection.caption_rows(every)
    lengths = selection.captions.length[captions] if selection.captions else np.zeros(0)
    return {"image": len(every), "caption": len(captions), "token": int(lengths.sum())}


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


def _image_arrays(selection: Selection, rows: np.ndarray, split: str, first_caption: int) -> dict[str, np.ndarray]:
    """Return what the file holds of these image rows."""
    cache = selection.cache
    counts = selection.caption_counts(rows)
    arrays = {
        "id": _texts(texts_of(cache.ids, rows)),
        "file_name": _texts(texts_of(cache.file_names, rows)),
        "split": _texts([split] * len(rows)),
        "cocoid": cache.sample_array("cocoid")[rows],
        "caption_start": first_caption + np.cumsum(counts, dtype=np.int64) - counts,
        "caption_count": counts,
    }
    names = [name for name in selection.images.array_names() if name != "status"] if selection.images else []
    return arrays | {name: selection.image_array(name, rows) for name in names}


def _caption_arrays(
    selection: Selection, rows: np.ndarray, first_image: int, first_token: int
) -> tuple[dict[str, np.ndarray], dict[str, np.ndarray]]:
    """Return what the file holds of the captions of these image rows: a row a caption, and a row a token."""
    cache, features, captions = selection.cache, selection.captions, selection.caption_rows(rows)
    if not len(captions):  # all of them failed
        return {}, {}
    arrays = {
        "text": _texts(texts_of(cache.caption_texts, captions)),
        "sentid": cache.sample_array("sentid")[captions],
        "image": first_image + np.repeat(np.arange(len(rows)), selection.caption_counts(rows)),
    }
    if features is None:
        return arrays, {}
    if features.global_channels is not None:
        arrays["global"] = features.global_(captions)
    if "token" not in features.array_names():
        return arrays, {}
    lengths = features.length[captions]
    arrays |= {"length": lengths, "start": first_token + np.cumsum(lengths, dtype=np.int64) - lengths}
    of_tokens = {"token": features.token(captions)}
    if features.channels is not None:
        of_tokens["local"] = features.local(captions)
    return arrays, of_tokens


def _texts(texts: list[str]) -> np.ndarray:
    return np.array(texts, dtype=object)
