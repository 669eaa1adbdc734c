"""Feature sets are written to files that other people's code reads: SCAN's arrays, or one HDF5 file.

Both are streamed, some images at a time, under a temporary name that becomes the real one when everything is there.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from ...errors import OutputError
from ...files import making, making_file, require_new
from ...store import FeatureCache
from ...store.layout import DEFAULT_SPLITS
from . import hdf5, npy
from .selection import Selection, select


@dataclass(frozen=True)
class ExportedSplit:
    """What was written of a split."""

    images: int
    captions: int
    left_out: int  # images that failed


@dataclass(frozen=True)
class Export:
    """What was exported."""

    store: str  # from where
    out: str  # the folder or file
    format: str  # ``npy`` or ``hdf5``
    sets: tuple[str, ...]  # names of the feature sets
    splits: Mapping[str, ExportedSplit]  # what was written of each split
    bytes: int  # of all files


def export(url: str, to: str, out: Path, sets: Sequence[str] = (), splits: Sequence[str] = DEFAULT_SPLITS) -> Export:
    """Write feature sets of the cache at `url` for other people's code.

    ``npy``: a folder of ``{train,dev,test}_{ims.npy,caps.txt,ids.txt}``; float32, a row an image where each has five
    captions, as SCAN's readers assume, else a row a caption. ``hdf5``: one file, described in `hdf5`.
    Images that could not be extracted are left out with their captions, and so are captions that could not.

    Args:
        url: the cache.
        to: ``npy`` or ``hdf5``.
        out: what to write, a folder or a file; it must not be there yet.
        sets: prefixes of the sets, at most one of images and one of captions; empty: the only ones there are.
        splits: which; each must be complete.

    Raises:
        OutputError: `out` exists or cannot be written.
        CacheError: the cache, a set or a split is missing, incomplete or damaged; or the sets do not fit the format.
    """
    require_new(out, folder=to == "npy")
    cache = FeatureCache.open(url)
    selection = select(cache, sets, splits, ("images",) if to == "npy" else ("images", "captions"))
    if to == "npy":
        npy.check(selection)
    write = npy.write if to == "npy" else hdf5.write
    appearing = making if to == "npy" else making_file
    with appearing(out, OutputError, "make room, or take another --out") as partial:
        write(selection, partial)
    files = [out] if out.is_file() else list(out.iterdir())
    return Export(
        store=url,
        out=str(out),
        format=to,
        sets=tuple(features.name for features in (selection.images, selection.captions) if features),
        splits={split: _counts(selection, split) for split in selection.rows},
        bytes=sum(file.stat().st_size for file in files),
    )


def _counts(selection: Selection, split: str) -> ExportedSplit:
    first, last = selection.cache.splits[split]
    rows = selection.rows[split]
    left_out = last - first - len(rows)
    return ExportedSplit(len(rows), len(selection.caption_rows(rows)), left_out)
