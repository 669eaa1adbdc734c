"""What an importer offers: the ids of a source's images, and the features of one image at a time."""

import hashlib
import math
from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from typing import IO, Any, Protocol

import numpy as np

from ...data.regions import Regions
from ...errors import XretError
from ...progress import Progress

_CHUNK = 1 << 20  # bytes hashed at once
UNREADABLE = -1  # the count of an image whose features a first look could not make sense of


class SourceError(XretError, ValueError):
    """Features that others extracted cannot be used as they are."""


class Source(Protocol):
    """A source that was looked through once. Its images are called entries and counted from 0."""

    ids: list[str]  # what the source calls each entry; the first of several with one id is used
    splits: list[str] | None  # the split of the data set that each entry should be in; None: the source does not say
    counts: np.ndarray  # regions of each entry, int32; `UNREADABLE` where only `read` can tell what is wrong
    channels: int  # width of a region's feature
    extras: tuple[str, ...]  # which of ``boxes``, ``classes``, ``scores`` the source has
    identity: dict[str, Any]  # what decides the features: SHA-256 of the source's files, and how they are read

    def read(self, entry: int) -> Regions:
        """Return the features of one entry, from the disk.

        Raises:
            SampleError: they are damaged.
            SourceError: the whole source is not what it seemed.
        """


def sha256(path: Path) -> str:
    """Return the SHA-256 of a file in hexadecimal; reading it shows progress."""
    digest = hashlib.sha256()
    with path.open("rb") as file, Progress(f"read {path.name}", path.stat().st_size, "bytes") as progress:
        while chunk := file.read(_CHUNK):
            digest.update(chunk)
            progress.update(len(chunk))
    return digest.hexdigest()


def npy_header(file: IO[bytes], size: int) -> tuple[tuple[int, ...], bool, np.dtype]:
    """Read the header of an array in NumPy's format; return its shape, whether in Fortran's order, and its dtype.

    Args:
        file: at the beginning of the header; afterwards at its end.
        size: bytes of header and array.

    Raises:
        ValueError: it is no such array, holds pickled objects, or says that it is larger than it is; NumPy itself
            raises other errors on other damage.
    """
    if np.lib.format.read_magic(file) != (1, 0):  # later ones may say that their header has 4 GB
        raise ValueError("not of version 1.0 of NumPy's format")
    shape, fortran, dtype = np.lib.format.read_array_header_1_0(file)
    if dtype.hasobject or min(shape, default=0) < 0 or math.prod(shape) * dtype.itemsize > size - file.tell():
        raise ValueError("it holds objects, or was cut off")
    return shape, fortran, dtype


def shown(array: Any) -> str:
    """Return dtype and shape of an array, for messages: ``float32 10 x 36 x 2048``."""
    return f"{array.dtype} {' x '.join(map(str, array.shape))}".strip()


def usual_width(widths: Iterable[int], source: Path) -> int:
    """Return the width that most entries have; those with another one are damaged.

    Raises:
        SourceError: no entry has features, that is, a positive width.
    """
    known = Counter(width for width in widths if width > 0)
    if not known:
        raise SourceError(f"{source}: no image in it has features that can be read; check --from and --source")
    return known.most_common(1)[0][0]
