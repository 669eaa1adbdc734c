"""Which image of the data set each entry of a source is.

An id can be, in this order: the data set's own id (Karpathy's imgid, which SCAN's ``*_ids.txt`` hold for Flickr30K),
its COCO id (the TSV files of COCO; leading zeros do not count), its file name below the image folder, its file name
without folder and suffix, or that up to the first dot (what detectron's ``.npz`` are called). All ids of a source are
of one kind: the kind by which most of them are found. A key that two images of the data set share finds neither.
"""

from collections.abc import Callable, Sequence
from pathlib import PurePosixPath

import numpy as np

from ...data.samples import ImageSample, Samples
from .source import SourceError

_SUFFIXES = {".jpg", ".jpeg", ".png", ".bmp", ".gif", ".tif", ".tiff", ".webp"}


def match(ids: Sequence[str], samples: Samples) -> tuple[np.ndarray, str]:
    """Find the image of each id.

    Args:
        ids: of the entries of a source.
        samples: the data set.

    Returns:
        The image row of each entry, int64 [S], -1 for an entry that is not in the data set; and the kind of key.

    Raises:
        SourceError: no id is found, two kinds find as many and disagree, or two ids are of one image.
    """
    found = {kind: _rows(ids, samples, of_image, of_id) for kind, (of_image, of_id) in _KINDS.items()}
    best = max(found, key=lambda kind: int((found[kind] >= 0).sum()))
    rows = found[best]
    matched = int((rows >= 0).sum())
    if not matched:
        image, first = samples.images[0], [f"'{key}'" for key in ids[:3]]
        raise SourceError(
            f"none of the source's {len(ids)} images is in '{samples.dataset}': its first ids are {', '.join(first)},"
            f" the data set's first image is '{image.file_name}', id '{image.id}', COCO id {image.cocoid}; choose the"
            " source of this data set"
        )
    for kind, others in found.items():
        both = (rows >= 0) & (others >= 0)
        if int((others >= 0).sum()) == matched and (rows[both] != others[both]).any():
            odd = int(np.flatnonzero(both & (rows != others))[0])
            raise SourceError(
                f"the source's ids fit by {best} as well as by {kind}, but to different images, the first of them"
                f" '{ids[odd]}'; use file names as ids in the source"
            )
    _require_one_each(ids, rows, best, samples)
    return rows, best


def _require_one_each(ids: Sequence[str], rows: np.ndarray, kind: str, samples: Samples) -> None:
    """Refuse two ids of one image: nobody knows whose features it has."""
    owners: dict[int, str] = {}
    for key, row in zip(ids, rows.tolist(), strict=True):
        if row >= 0 and owners.setdefault(row, key) != key:
            raise SourceError(
                f"'{owners[row]}' and '{key}' in the source are both '{samples.images[row].file_name}' of"
                f" '{samples.dataset}' by {kind}; use its file names as ids in the source"
            )


def _rows(
    ids: Sequence[str], samples: Samples, of_image: Callable[[ImageSample], str], of_id: Callable[[str], str]
) -> np.ndarray:
    known: dict[str, int] = {}
    for row, image in enumerate(samples.images):
        key = of_image(image)
        known[key] = -1 if key in known or not key else row
    return np.array([known.get(of_id(key), -1) for key in ids], dtype=np.int64)


def _number(key: str) -> str:
    return str(int(key)) if key.isascii() and key.isdigit() and len(key) < 20 else ""


def _stem(name: str) -> str:
    path = PurePosixPath(name)
    return path.stem if path.suffix.lower() in _SUFFIXES else path.name


_KINDS: dict[str, tuple[Callable[[ImageSample], str], Callable[[str], str]]] = {
    "id": (lambda image: image.id, str),
    "COCO id": (lambda image: str(image.cocoid) if image.cocoid >= 0 else "", _number),
    "file name": (lambda image: image.file_name, str),
    "file name without folder and suffix": (lambda image: _stem(image.file_name), _stem),
    "file name up to its first dot": (
        lambda image: PurePosixPath(image.file_name).name.split(".")[0],
        lambda key: PurePosixPath(key).name.split(".")[0],
    ),
}
