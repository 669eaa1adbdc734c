"""Images and their captions in columns, so that millions of them take next to no memory."""

import unicodedata
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain, islice, repeat
from typing import NamedTuple, overload

import numpy as np

from ..errors import ManifestError
from .manifest import SPLITS
from .texts import Column, Texts, blocks_of, grouped, ranges, repeated

NO_NUMBER = -(1 << 63)  # of a caption that its source does not number


class Caption(NamedTuple):
    """One caption: its text as the source has it, and its number; None until `Images.settle` if the source has none."""

    text: str
    sentid: int | None


@dataclass(slots=True)
class ImageSample:
    """One image; until `Images.settle`, as its source has it."""

    id: str | None  # distinct; None: the file name
    file_name: str  # normalised POSIX path below the image folder
    split: str | None  # in the end of `SPLITS`
    cocoid: int  # -1 where there is none
    captions: Sequence[Caption]
    place: tuple[int, int, int] | None = None  # of a picture that lies in a file with others, see `sources`


class Images(Sequence[ImageSample]):
    """Images in columns, which take a few bytes each beside their texts, and are given one by one.

    Attributes:
        names, ids, cocoids: of the images in the order of their source; numbers are int64.
        splits: likewise, as numbers of `kinds`, from `settle` on of `SPLITS`.
        places: likewise, int64 [I,3]; of a folder [0,3].
        texts, sentids: of all captions, as they were read.
        rows: which of these images each is, int32 [I].
        captions: which of the captions are those of the images, one image after the other, integers [M].
        edges: where in `captions` those of each image begin, and where all end, int64 [I + 1].
    """

    def __init__(self, samples: Iterable[ImageSample]) -> None:
        self.names, self.texts, self._ids, identified = Texts(), Texts(), Texts(), True
        edges, sentids, splits, cocoids, places = (Column("q") for _ in range(5))
        kinds: dict[str | None, int] = {}
        edges.append(0)
        for sample in samples:
            self.names.append(sample.file_name)
            identified = identified and sample.id is not None
            if identified:
                self._ids.append(sample.id or "")
            for text, sentid in sample.captions:
                self.texts.append(text)
                sentids.append(NO_NUMBER if sentid is None else sentid)
            edges.append(len(self.texts))
            splits.append(kinds.setdefault(sample.split, len(kinds)))
            cocoids.append(sample.cocoid)
            for number in sample.place or ():
                places.append(number)
        self.edges, self.sentids, self.splits, self.cocoids = (
            column.read() for column in (edges, sentids, splits, cocoids)
        )
        self.places, self.kinds = places.read().reshape(-1, 3), tuple(kinds)
        self.rows = np.arange(len(self.names), dtype=np.int32)
        self.captions = np.arange(len(self.texts), dtype=np.int32 if len(self.texts) < 2**31 else np.int64)
        self._ids = self._ids if identified else Texts()

    @classmethod
    def of(cls, samples: Sequence[ImageSample]) -> "Images":
        """Return images whose splits and numbers are settled, in their order, as columns."""
        images = cls(samples)
        images.splits = np.array([SPLITS.index(str(kind)) for kind in images.kinds], np.uint8)[images.splits]
        images.kinds = SPLITS
        return images

    @property
    def ids(self) -> Texts:
        """The ids of the images in the order of their source; their names, unless all have one."""
        return self._ids if len(self._ids) else self.names

    def names_of(self, images: Sequence[int]) -> Iterator[str]:
        """Yield the file names of some of the images."""
        return (self.names[row] for row in self.rows[np.asarray(images, np.int64)].tolist())

    def join(self, order: np.ndarray, edges: np.ndarray) -> None:
        """Make one image of those ``order[edges[i] : edges[i + 1]]`` of each i: the first, with the captions of all."""
        first, counts = order[edges[:-1]], np.diff(self.edges)[order]
        self.captions = self.captions[ranges(self.edges[order], counts)]
        self.edges = np.append(0, np.cumsum(counts))[edges]
        self.names, self._ids = (
            Texts(texts[row] for row in first.tolist() if len(texts)) for texts in (self.names, self._ids)
        )
        kinds, self.splits = np.unique(self.splits[first], return_inverse=True)
        self.kinds, self.cocoids = tuple(self.kinds[kind] for kind in kinds), self.cocoids[first]
        self.places = self.places[first] if len(self.places) else self.places
        self.rows = np.arange(len(first), dtype=np.int32)

    def settle(self, splits: np.ndarray, most: int | None = None) -> None:
        """Order images by their splits, uint8 [I]; number captions, unless all are; keep `most` of each image's."""
        if (self.sentids[self.captions] == NO_NUMBER).any():
            self.sentids = np.empty(len(self.texts), self.captions.dtype)
            self.sentids[self.captions] = np.arange(len(self.captions))
        self.splits, self.kinds = splits, SPLITS
        self.rows = np.argsort(splits, kind="stable").astype(np.int32)
        counts = np.diff(self.edges)[self.rows]
        counts = counts if most is None else np.minimum(counts, most)
        self.captions = self.captions[ranges(self.edges[self.rows], counts)]
        self.edges = np.append(0, np.cumsum(counts))

    def __len__(self) -> int:
        return len(self.rows)

    @overload
    def __getitem__(self, image: int) -> ImageSample: ...
    @overload
    def __getitem__(self, image: slice) -> list[ImageSample]: ...
    def __getitem__(self, image: int | slice) -> ImageSample | list[ImageSample]:
        if isinstance(image, slice):
            return [*self._samples(np.arange(*image.indices(len(self))))]
        return next(self._samples(np.array([image % len(self)])))

    def __iter__(self) -> Iterator[ImageSample]:
        return chain.from_iterable(map(self._samples, blocks_of(np.arange(len(self), dtype=np.int32))))

    def _samples(self, images: np.ndarray) -> Iterator[ImageSample]:
        rows, counts = self.rows[images], self.edges[images + 1] - self.edges[images]
        numbers = self.captions[ranges(self.edges[images], counts)]
        sentids = (None if sentid == NO_NUMBER else sentid for sentid in self.sentids[numbers].tolist())
        captions = map(Caption, map(self.texts.__getitem__, numbers.tolist()), sentids)
        places = map(tuple, self.places[rows].tolist()) if len(self.places) else repeat(None)
        columns = (column.tolist() for column in (rows, counts, self.splits[rows], self.cocoids[rows]))
        for row, count, split, cocoid, place in zip(*columns, places, strict=False):
            of_image = tuple(islice(captions, count))
            yield ImageSample(self.ids[row], self.names[row], self.kinds[split], cocoid, of_image, place)


def read_rows(
    rows: Iterable[tuple[str, ImageSample | None]], is_one: Callable[[str, str], bool] | None = None
) -> Images:
    """Return the images of rows with their places, None: none, each with all its captions, in the order of its first.

    `is_one` says whether names that differ in their normal form are of one file; None: an image has one row.
    ManifestError: it has several, or of several splits.
    """
    places = Texts()

    def samples() -> Iterator[ImageSample]:
        for where, sample in rows:
            if sample is not None:
                places.append(where)
                yield sample

    images = Images(samples())
    if is_one is None:
        if (pair := repeated(images.names)) is not None:
            before, here = (places[row] for row in pair)
            raise ManifestError(
                f"{here}: the file '{images.names[pair[1]]}' is in {before} already; remove one of them."
            )
        return images
    order, edges = grouped(_keys(images.names, is_one))
    first = np.repeat(order[edges[:-1]], np.diff(edges))
    if (wrong := images.splits[order] != images.splits[first]).any():
        at = np.flatnonzero(wrong)[np.argmin(order[wrong])]  # the first row that is
        now, then = (images.kinds[images.splits[row]] or "none" for row in (order[at], first[at]))
        both = f"'{now}' here and '{then}' before"
        where, name = places[order[at]], images.names[order[at]]
        raise ManifestError(f"{where}: the split of '{name}' is {both}; give it one split.")
    if len(edges) <= len(order):
        images.join(order, edges)
    return images


def _keys(names: Texts, is_one: Callable[[str, str], bool]) -> Texts:
    """Return a text for each name, equal for names of one image: those of one normal form are, unless of two files."""
    normal = {unicodedata.normalize("NFC", name) for name in names if not unicodedata.is_normalized("NFC", name)}
    begun: dict[str, str] = {}

    def key(name: str) -> str:
        form = unicodedata.normalize("NFC", name)
        first = begun.setdefault(form, name) if form in normal else name
        return first if name == first or is_one(first, name) else name

    return Texts(map(key, names)) if normal else names
