"""SCAN's folder of arrays: ``{train,dev,test}_ims.npy`` with ``_caps.txt``, a caption a line, and ``_ids.txt``."""

from pathlib import Path

import numpy as np

from ...errors import CacheError
from ...progress import Progress
from ...reading.split import texts_of
from .selection import Selection

SCAN_NAMES = {"train": "train", "val": "dev", "test": "test"}
_PEERS_CAPTIONS = 5  # of an image, where SCAN's readers find as many rows as images


def check(selection: Selection) -> None:
    """Refuse what has no place in SCAN's layout.

    Raises:
        CacheError: a split has no name there, or the images have no local features, or different numbers of them.
    """
    images = selection.images
    assert images is not None
    nameless = [split for split in selection.rows if split not in SCAN_NAMES]
    if nameless:
        raise CacheError(f"SCAN's layout has no name for split '{nameless[0]}'; leave it out of --splits")
    if images.channels is None:
        raise CacheError(f"'{images.path}' has global features alone, and SCAN's layout holds regions; use --to hdf5")
    lengths = images.length[np.concatenate(list(selection.rows.values()))]
    if lengths.min() < lengths.max():
        raise CacheError(
            f"'{images.path}' has {lengths.min()} to {lengths.max()} local features an image, but SCAN's layout needs"
            " the same number for each; use --to hdf5"
        )


def write(selection: Selection, out: Path) -> None:
    """Write the selection to an empty folder.

    Raises:
        OSError: the files cannot be written.
        CacheError: something in the cache is damaged.
    """
    total = sum(map(len, selection.rows.values()))
    with Progress("export", total, "images") as progress:
        for split in selection.rows:
            _write_split(selection, split, out, progress)


def _write_split(selection: Selection, split: str, folder: Path, progress: Progress) -> None:
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
            texts = texts_of(cache.caption_texts, selection.caption_rows(batch))
            caps.writelines(f"{_line(text)}\n".encode() for text in texts)
            keys = zip(texts_of(cache.ids, batch), repeat.tolist(), strict=True)
            ids.writelines(f"{_line(key)}\n".encode() * count for key, count in keys)
            progress.update(len(batch))


def _line(text: str) -> str:
    """Put a text on one line, whatever its reader takes for a line's end."""
    return " ".join(text.splitlines())
