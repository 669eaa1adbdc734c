"""Several feature sets of a store, read side by side: a sample has the features of each."""

from collections.abc import Sequence
from functools import cached_property
from hashlib import sha256
from itertools import combinations, product
from typing import Any, Generic, TypeVar, overload

import numpy as np

from ..encoders.base import turns_upright
from ..errors import CacheError
from ..store import FAILED, OK, CaptionSet, ImageSet
from ..wording import counted

S = TypeVar("S", ImageSet, CaptionSet)
_AT_ONCE = 1 << 16  # rows whose digests are read together


class JoinedSets(Generic[S]):
    """Two or more sets of images of one store, or of captions; `joined` makes them."""

    def __init__(self, parts: Sequence[S]) -> None:
        self.parts: tuple[S, ...] = tuple(parts)
        self.cache = parts[0].cache
        self.name: str = " + ".join(part.name for part in parts)
        self.chunk_rows: int = parts[0].chunk_rows

    @cached_property
    def status(self) -> np.ndarray:
        """Of each sample, u8: 0 where it is ok in every set, else 1."""
        good = np.logical_and.reduce([part.status == OK for part in self.parts])
        return np.where(good, OK, FAILED).astype(np.uint8)

    @property
    def views(self) -> int:
        """Of an image, the most that one of the sets has."""
        return max(part.views if isinstance(part, ImageSet) else 1 for part in self.parts)

    @property
    def vocabulary(self) -> tuple[str, ...] | None:
        """By token id, of the set of words; None where there is none."""
        found = (part.vocabulary for part in self.parts if isinstance(part, CaptionSet))
        return next((words for words in found if words is not None), None)

    def rows_of(self, split: str) -> slice:
        """Return the rows of a split's samples."""
        return self.parts[0].rows_of(split)


Images = ImageSet | JoinedSets[ImageSet]
Captions = CaptionSet | JoinedSets[CaptionSet]


def joined(parts: Sequence[S]) -> S | JoinedSets[S]:
    """Return several sets as one; a single one stays what it is.

    CacheError: two have features of different pictures, which were replaced under their names in between.
    """
    for one, other in combinations([part for part in parts if isinstance(part, ImageSet)], 2):
        if len(rows := one.differing(other)):
            name = one.cache.file_names(int(rows[0]), int(rows[0]) + 1)[0]
            raise CacheError(
                f"{one.cache.url}: '{one.name}' and '{other.name}' have features of different pictures"
                f" ({counted(len(rows), 'file')}, such as '{name}'): `xret cache rm` one, and extract it again"
            )
    return parts[0] if len(parts) == 1 else JoinedSets(parts)


def digest_of_pictures(images: Images, rows: np.ndarray | slice) -> str:
    """Return the SHA-256 of the digests of the files that the features in some image rows are of, in hexadecimal."""
    rows, digest = np.arange(images.cache.images)[rows], sha256()
    known = [part for part in parts_of(images) if "digest" in part.array_names]  # imports have none
    for part, first in product(known, range(0, len(rows), _AT_ONCE)):
        some = rows[first : first + _AT_ONCE]
        digest.update(np.where(part.status[some, None] == OK, part.array("digest", some), 0).tobytes())
    return digest.hexdigest()


def are_upright(features: Images) -> bool:
    """Return whether the pictures of a set were turned as their EXIF orientations say; of several sets, of one."""
    return any(turns_upright(part.identity) for part in parts_of(features))


@overload
def parts_of(features: Images) -> tuple[ImageSet, ...]: ...
@overload
def parts_of(features: Captions) -> tuple[CaptionSet, ...]: ...
def parts_of(features: Any) -> Any:
    """Return the sets that features are of: one, or several."""
    return features.parts if isinstance(features, JoinedSets) else (features,)
