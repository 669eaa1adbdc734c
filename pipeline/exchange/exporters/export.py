"""A feature set leaves the cache in files that the code of others reads: SCAN's arrays, or one HDF5 file.

Both are streamed, some images at a time, under a temporary name that becomes the real one when everything is there.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from ...cache import OK, CaptionSet, FeatureCache, ImageSet
from ...cache.layout import DEFAULT_SPLITS
from ...cache.rows import ranges
from ...cache.upkeep import choose_set
from ...errors import CacheError
from ...files import require_new, writing
from ...progress import Progress
from ...wording import counted

FORMATS = ("npy", "hdf5")
SCAN_NAMES = {"train": "train", "val": "dev", "test": "test"}
_IMAGES = 64  # read and written at once
_PEERS_CAPTIONS = 5  # of an image, where SCAN's readers find as many rows as images


@dataclass(frozen=True)
class Selection:
    """What is exported.

    Attributes:
        cache: from where.
        images: the image set, if one is exported.
        captions: the caption set, if one is exported.
        rows: the image rows of each split, without those that failed.
    """

    cache: FeatureCache
    images: ImageSet | None
    captions: CaptionSet | None
    rows: dict[str, np.ndarray]

    def batches(self, split: str) -> Iterator[np.ndarray]:
        """Yield the image rows of a split, some at a time."""
        rows = self.rows[split]
        for first in range(0, len(rows), _IMAGES):
            yield rows[first : first + _IMAGES]

    def image_array(self, name: str, rows: np.ndarray) -> np.ndarray:
        """Read one array of the image set at these image rows."""
        assert self.images is not None
        return self.take(f"{self.images.path}/{name}", self.images.blocks.array_rows(rows))

    def take(self, path: str, at: np.ndarray) -> np.ndarray:
        """Read the rows `at` of an array, some that ascend and lie close together; checksums are checked."""
        return self.cache.store.read_array(path, int(at[0]), int(at[-1]) + 1)[at - at[0]]

    def caption_rows(self, rows: np.ndarray) -> np.ndarray:
        """Return the caption rows of these image rows."""
        return ranges(self.cache.caption_start[rows], self.cache.caption_count[rows])


def export(
    url: str, to: str, out: Path, sets: Sequence[str] = (), splits: Sequence[str] = DEFAULT_SPLITS
) -> dict[str, Any]:
    """Write feature sets of the cache at `url` for the code of others.

    ``npy``: a folder of ``{train,dev,test}_{ims.npy,caps.txt,ids.txt}``; float32, a row an image where each has five
    captions, as SCAN's readers assume, else a row a caption. ``hdf5``: one file, described in `export_hdf5`.
    Images that could not be extracted, and their captions, are left out.

    Args:
        url: the cache.
        to: one of `FORMATS`.
        out: what to write, a folder or a file; it must not be there yet.
        sets: prefixes of the sets, at most one of images and one of captions; empty: the only ones there.
        splits: which, each complete.

    Returns:
        store, out, format, ``sets`` (names), ``splits`` {name: {images, captions, left_out}}, and bytes.

    Raises:
        OutputError: `out` exists or cannot be written.
        CacheError: the cache, a set or a split is not there, not complete or damaged; or the sets do not fit the
            format.
    """
    require_new(out, folder=to == "npy")
    selection = _select(FeatureCache.open(url), to, sets, splits)
    if to == "npy":
        _check_npy(selection)
    with writing(out) as partial:
        if to == "npy":
            _write_npy(selection, partial)
        else:
            from .hdf5 import write_hdf5

            write_hdf5(selection, partial)
    files = [out] if out.is_file() else list(out.iterdir())
    return {
        "store": str(url),
        "out": str(out),
        "format": to,
        "sets": [features.name for features in (selection.images, selection.captions) if features],
        "splits": {split: _counts(selection, split) for split in selection.rows},
        "bytes": sum(file.stat().st_size for file in files),
    }


def _select(cache: FeatureCache, to: str, prefixes: Sequence[str], splits: Sequence[str]) -> Selection:
    paths = _choose(cache, to, prefixes)
    images = next((cache.image_set(path.partition("/")[2]) for path in paths if path.startswith("images/")), None)
    captions = next((cache.caption_set(path.partition("/")[2]) for path in paths if path.startswith("captions/")), None)
    unknown = [split for split in splits if split not in cache.splits]
    wanted = [split for split in cache.splits if split in splits]
    if not wanted or (unknown and tuple(splits) != DEFAULT_SPLITS):
        there = ", ".join(cache.splits)
        raise CacheError(f"{cache.url} has no split {', '.join(unknown)}; it has {there}: choose with --splits")
    for features in filter(None, (images, captions)):
        for split in wanted:
            marks = features.done()[features.blocks.of_split(split)]
            if not marks.all():
                raise CacheError(
                    f"'{features.path}' of {cache.url} has {marks.sum()} of {counted(len(marks), 'shard')} of split"
                    f" '{split}'; extract it completely, or choose others with --splits"
                )
    rows = {split: np.arange(*cache.splits[split]) for split in wanted}
    if images is not None:
        rows = {split: every[images.status[every] == OK] for split, every in rows.items()}
    if empty := [split for split, kept in rows.items() if not len(kept)]:
        raise CacheError(f"{cache.url}: every image of split '{empty[0]}' failed; choose others with --splits")
    return Selection(cache, images, captions, rows)


def _choose(cache: FeatureCache, to: str, prefixes: Sequence[str]) -> list[str]:
    """Return the paths of the sets to export, at most one of each modality."""
    modalities = ("images",) if to == "npy" else ("images", "captions")
    there = [f"{modality}/{name}" for modality in ("images", "captions") for name in cache.set_names(modality)]
    chosen = [choose_set(cache.url, prefix, there) for prefix in prefixes]
    if not prefixes:
        chosen = [path for path in there if path.split("/")[0] in modalities]
    for modality in ("images", "captions"):
        several = sorted({path for path in chosen if path.startswith(f"{modality}/")})
        if len(several) > 1:
            raise CacheError(
                f"{cache.url}: only one set of {modality} fits in an export; choose with --set: {', '.join(several)}"
            )
    if to == "npy" and (not chosen or any(path.startswith("captions/") for path in chosen)):
        raise CacheError(
            f"{cache.url}: SCAN's layout holds the features of one set of images and the captions' texts, but"
            f" {', '.join(chosen) or 'no set of images'} is there to export; use --to hdf5 or another --set"
        )
    if not chosen:
        raise CacheError(f"{cache.url}: there is no feature set to export; run `xret extract`")
    return chosen


def _counts(selection: Selection, split: str) -> dict[str, int]:
    first, last = selection.cache.splits[split]
    rows = selection.rows[split]
    captions = int(selection.cache.caption_count[rows].sum())
    return {"images": len(rows), "captions": captions, "left_out": last - first - len(rows)}


def _check_npy(selection: Selection) -> None:
    images = selection.images
    assert images is not None
    nameless = [split for split in selection.rows if split not in SCAN_NAMES]
    if nameless:
        raise CacheError(f"SCAN's layout has no name for split '{nameless[0]}'; leave it out of --splits")
    lengths = images.length[np.concatenate(list(selection.rows.values()))]
    if lengths.min() < lengths.max():
        raise CacheError(
            f"'{images.path}' has {lengths.min()} to {lengths.max()} local features an image, and an array of SCAN's"
            " layout as many for each; use --to hdf5"
        )


def _write_npy(selection: Selection, folder: Path) -> None:
    folder.mkdir()
    total = sum(map(len, selection.rows.values()))
    with Progress("export", total, "images") as progress:
        for split in selection.rows:
            _write_scan_split(selection, split, folder, progress)


def _write_scan_split(selection: Selection, split: str, folder: Path, progress: Progress) -> None:
    cache, images, rows = selection.cache, selection.images, selection.rows[split]
    assert images is not None
    # SCAN's readers tell an array with a row a caption from one with a row an image by its length, and take the
    # latter to have five captions an image.
    counts = cache.caption_count[rows]
    every = np.ones_like(counts) if (counts == _PEERS_CAPTIONS).all() else counts
    regions = int(images.length[rows[0]])
    shape = (int(every.sum()), regions, images.channels)
    begin = folder / SCAN_NAMES[split]
    # Plain writing, not a memory map: on a full disk a map kills the process, and this ends in a sentence.
    with (
        Path(f"{begin}_ims.npy").open("wb") as ims,
        Path(f"{begin}_caps.txt").open("wb") as caps,
        Path(f"{begin}_ids.txt").open("wb") as ids,
    ):
        np.lib.format.write_array_header_1_0(ims, {"descr": "<f4", "fortran_order": False, "shape": shape})
        done = 0
        for batch in selection.batches(split):
            repeat = every[done : done + len(batch)]
            done += len(batch)
            local = selection.image_array("local", batch)[:, :regions].astype("<f4")
            ims.write(np.repeat(local, repeat, axis=0).tobytes())
            caps.writelines(f"{_line(text)}\n".encode() for text in caption_texts(selection, batch))
            keys = zip(image_texts(selection, "id", batch), repeat.tolist(), strict=True)
            ids.writelines(f"{_line(key)}\n".encode() * count for key, count in keys)
            progress.update(len(batch))


def image_texts(selection: Selection, name: str, rows: np.ndarray) -> list[str]:
    """Return ``id`` or ``file_name`` of these image rows."""
    first, last = int(rows[0]), int(rows[-1]) + 1
    texts = selection.cache.ids(first, last) if name == "id" else selection.cache.file_names(first, last)
    return [texts[row - first] for row in rows]


def caption_texts(selection: Selection, rows: np.ndarray) -> list[str]:
    """Return the captions of these image rows."""
    captions = selection.caption_rows(rows)
    texts = selection.cache.caption_texts(int(captions[0]), int(captions[-1]) + 1)
    return [texts[row - captions[0]] for row in captions]


def _line(text: str) -> str:
    """Put a text on one line, whatever its reader takes for a line's end."""
    return " ".join(text.splitlines())
