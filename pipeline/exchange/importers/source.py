"""What an importer offers: the ids of a source's images, and the features of one image at a time."""

import hashlib
from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from ...data.regions import Regions
from ...errors import XretError

UNREADABLE = -1  # the count of an image whose features a first look could not make sense of


class SourceError(XretError, ValueError):
    """Features that others extracted cannot be used as they are."""


class Source(Protocol):
    """A source that was looked through once. Its images are called entries and counted from 0.

    Attributes:
        ids: what the source calls each entry; the first of several with one id is used.
        splits: the split of the data set that each entry should be in; None: the source does not say.
        counts: regions of each entry, int32; `UNREADABLE` where only `read` can tell what is wrong.
        channels: width of a region's feature.
        extras: which of ``boxes``, ``classes``, ``scores`` the source has.
        identity: what decides the features: SHA-256 of the source's files, and how they are read.
    """

    ids: list[str]
    splits: list[str] | None
    counts: np.ndarray
    channels: int
    extras: tuple[str, ...]
    identity: dict[str, Any]

    def read(self, entry: int) -> Regions:
        """Return the features of one entry, from the disk.

        Raises:
            SampleError: they are damaged.
            SourceError: the whole source is not what it seemed.
        """


def sha256(path: Path) -> str:
    """Return the SHA-256 of a file in hexadecimal."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def shown(array: Any) -> str:
    """Return dtype and shape of an array, for messages: ``float32 10 x 36 x 2048``."""
    return f"{array.dtype} {' x '.join(map(str, array.shape))}".strip()


def usual_width(widths: Iterable[int], source: Path) -> int:
    """Return the width that most entries have; SourceError if no entry has features, that is, a positive width."""
    known = Counter(width for width in widths if width > 0)
    if not known:
        raise SourceError(f"{source}: no image in it has features that can be read; check --from and --source")
    return known.most_common(1)[0][0]
