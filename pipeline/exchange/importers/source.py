"""What an importer offers: tables of features, read entry by entry, and what the source calls its entries."""

import hashlib
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from ...errors import CacheError, XretError
from ...extraction.options import Filling
from ...store.create import misfit, require_dtype
from ...store.regions import REGION_ARRAYS, Regions, lay_out

KINDS = ("roi", "frames")  # of features with rows
_SAME = 1e-2  # what one picture's features stay below where it was encoded twice, in other batches or on other devices
# Peaks of a row beyond which no network's are: float32 read in the wrong order of bytes is mostly beyond them.
_LARGEST, _SMALLEST = 1e15, 1e-30


class SourceError(XretError, ValueError):
    """Features that others extracted cannot be used as they are."""


class Unreadable(Exception):
    """The features of one entry are damaged; the message is a phrase that says how."""


@dataclass(frozen=True)
class ImportOptions(Filling):
    """How to import; the command line's options, with its defaults."""

    format_: str  # one of `FORMATS`
    source: Path  # file or folder of the features
    arrays: Mapping[str, str] = field(default_factory=dict)  # for ``hdf5``, the name in the file of each role
    kind: str = "roi"  # of features with rows: ``roi``, regions of a picture, or ``frames`` of a video
    encoder: tuple[str, ...] = ()  # the model that made embeddings, or that of the images and that of the captions
    dtype: str = "float16"  # ``float16`` or ``float32``

    def __post_init__(self) -> None:
        super().__post_init__()
        require_dtype(self.dtype)
        if self.kind not in KINDS:
            raise CacheError(f"kind is '{self.kind}'; give {' or '.join(KINDS)}")


class Table(ABC):
    """Features of a source that was looked through once. Entries are counted from 0."""

    keys: Sequence[str]  # what the source calls each entry; `pick` says which of several with one key is used
    splits: Sequence[str] = ()  # the split of each entry; empty where the source does not say
    rows: int = 0  # regions of an entry, the most that there are; 0: a vector each
    channels: int  # width of a feature
    extras: tuple[str, ...] = ()  # which of ``boxes``, ``classes``, ``scores`` there are
    identity: dict[str, Any]  # what decides the features: SHA-256 of the source's files, and how they are read

    @abstractmethod
    def put(self, arrays: dict[str, np.ndarray], at: np.ndarray, entries: np.ndarray) -> dict[int, str]:
        """Read `entries` into the arrays of a chunk, at the places `at`; return what is wrong, by place.

        SourceError if the whole source is not what it seemed, CacheError if a value does not fit the dtype.
        """

    @abstractmethod
    def arrays(self, entry: int) -> list[np.ndarray]:
        """Return the features [n,C] of an entry, and its boxes [n,4] if there are any; Unreadable if it is damaged."""

    def captions(self) -> Iterable[tuple[str, Sequence[str]]]:
        """Return where the source has the captions of each entry, and these; nothing where it has none."""
        return ()

    def pick(self, entries: Sequence[int]) -> int:
        """Return which of several entries of one sample counts: the first whole one.

        SourceError if two that are whole differ.
        """
        whole: list[tuple[int, list[np.ndarray]]] = []
        for entry in entries:
            with suppress(Unreadable):
                whole.append((entry, self.arrays(entry)))
        for entry, arrays in whole[1:]:
            if not all(map(_alike, whole[0][1], arrays)):
                raise SourceError(
                    f"the source has '{self.keys[entry]}' more than once, with different features (its entries"
                    f" {whole[0][0] + 1:,} and {entry + 1:,}); keep the right ones"
                )
        return whole[0][0] if whole else entries[0]


@dataclass(frozen=True)
class Imported:
    """What an importer found."""

    images: Table
    captions: Table | None = None  # whose keys are their texts; None where there are none
    owners: Sequence[str] = ()  # the key of the image of each caption
    left_out: Sequence[str] = ()  # rows that are no image and caption, and why

    @property
    def tables(self) -> dict[str, Table]:
        """The tables by modality, ``images`` first."""
        return {"images": self.images} | ({} if self.captions is None else {"captions": self.captions})


class RegionTable(Table):
    """Regions of images, one image after another."""

    @abstractmethod
    def read(self, entry: int) -> Regions:
        """Return the features of one entry, from the disk; Unreadable if they are damaged."""

    def put(self, arrays: dict[str, np.ndarray], at: np.ndarray, entries: np.ndarray) -> dict[int, str]:
        """Read images one by one, in the order of the source."""
        faults = {}
        for entry, place in sorted(zip(entries.tolist(), at.tolist(), strict=True)):
            try:
                regions = self._checked(entry)
            except Unreadable as error:
                faults[place] = str(error)
                continue
            require_fitting(regions.local, arrays["local"].dtype)
            lay_out(arrays, place, regions)
            arrays["size"][place] = regions.size
        return faults

    def arrays(self, entry: int) -> list[np.ndarray]:
        """Return features and boxes of an entry."""
        regions = self._checked(entry)
        return [regions.local] if regions.boxes is None else [regions.local, regions.boxes]

    def _checked(self, entry: int) -> Regions:
        """Return the features of an entry without the rows of zeros at its end, which fill up where lengths differ.

        Unreadable unless its arrays have the shapes and values that the set holds.
        """
        regions = self.read(entry)
        local = regions.local
        if not np.isfinite(local).all():
            raise Unreadable("its features hold NaN or infinity")
        if not local.any():
            raise Unreadable("its features are all zeros, as where nothing was written")
        count = int(np.flatnonzero(local.any(axis=1))[-1]) + 1
        kept = {"local": local[:count]}
        for key in self.extras:
            values, dtype = getattr(regions, key)[:count], REGION_ARRAYS[key][1]
            with np.errstate(over="ignore", invalid="ignore"):
                kept[key] = values.astype(dtype)
            if not np.isfinite(kept[key]).all() or (kept[key].dtype.kind == "i" and (kept[key] != values).any()):
                raise Unreadable(f"its {key} hold values that are no {dtype}")
        if not all(0 <= side < 2**31 for side in regions.size):
            raise Unreadable(f"its size is {regions.size[0]:.3g} x {regions.size[1]:.3g} pixels")
        if "boxes" in kept:
            self._check_boxes(entry, kept["boxes"], regions.size)
        return Regions(**kept, size=regions.size)

    def _check_boxes(self, entry: int, boxes: np.ndarray, size: tuple[int, int]) -> None:
        """Refuse boxes that are no corners in pixels of a picture of this size; zeros: of any.

        Unreadable where that is a fault of this image. SourceError where others of the same form could seem right.
        """
        if boxes.max() <= 1.5:  # rounded, or resized
            raise Unreadable("its boxes are shares of width and height; multiply them, boxes are in pixels")
        name = self.keys[entry]
        if (boxes[:, 2:] < boxes[:, :2] - 1).any():
            raise SourceError(
                f"the source's boxes are not x1, y1, x2, y2: a second corner of '{name}' lies before the first; if they"
                " are x, y, width, height, write corners instead"
            )
        if all(size) and _beyond(boxes, size):
            if not _beyond(boxes, size[::-1]):
                raise SourceError(
                    f"the boxes of '{name}' fit {size[1]} x {size[0]} pixels, but its size is {size[0]} x {size[1]};"
                    " width and height, or x and y, changed places in the source"
                )
            raise Unreadable(f"its boxes reach beyond its {size[0]} x {size[1]} pixels; correct boxes or size")


def _beyond(boxes: np.ndarray, size: tuple[int, int]) -> bool:
    return bool((boxes < -1).any() or (boxes[:, 2:] > np.add(size, 1)).any())


def _alike(one: np.ndarray, other: np.ndarray) -> bool:
    return one.shape == other.shape and np.allclose(one, other, _SAME, _SAME * np.abs(one).max())


def require_fitting(values: np.ndarray, dtype: np.dtype[Any]) -> None:
    """Raise CacheError where the dtype of a set cannot hold values [n,C], SourceError where they are no features."""
    peaks = np.abs(values).max(axis=-1, initial=0).astype(np.float64)  # float16 cannot hold the bounds
    if (absurd := peaks[(peaks > _LARGEST) | ((peaks > 0) & (peaks < _SMALLEST))]).size:
        raise SourceError(
            f"values of {absurd[0]:.3g} are no features: the bytes are in another order, or of another type, than the"
            " source says; write it again"
        )
    if (found := misfit(peaks, values.__getitem__, dtype)) is not None:
        raise CacheError(f"{found[1]}; import with --dtype float32")


def map_floats(path: Path, *dimensions: int) -> np.ndarray:
    """Map an array of floats into memory; a mapping that is let go frees what was read through it."""
    try:
        values: np.ndarray = np.load(path, mmap_mode="r", allow_pickle=False)
    except Exception as error:  # a damaged header may make NumPy raise anything
        raise SourceError(f"{path} is no array of numbers, or was cut off; copy it again") from error
    if not isinstance(values, np.ndarray):
        raise SourceError(f"{path} holds several arrays; save the one that counts with numpy.save")
    if values.ndim not in dimensions or 0 in values.shape or values.dtype.kind != "f":
        expected = " or ".join(map(str, dimensions))
        raise SourceError(f"{path} is {shown(values)}, not floats in {expected} dimensions; check --source")
    return values


def sha256(path: Path) -> str:
    """Return the SHA-256 of a file in hexadecimal."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def shown(array: Any) -> str:
    """Return dtype and shape of an array, for messages: ``float32 10 x 36 x 2048``."""
    return f"{array.dtype} {' x '.join(map(str, array.shape))}".strip()
