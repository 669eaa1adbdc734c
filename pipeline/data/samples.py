"""Samples: the images of a data set and their captions, in the order of the store."""

import hashlib
import json
import logging
import re
import unicodedata
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate, chain, pairwise, repeat
from typing import overload

import numpy as np

from ..errors import ManifestError
from ..wording import counted, printable, some_of
from .images import NO_DIGEST
from .manifest import SPLITS, Manifest
from .rows import SPLIT_NAMES, Entry, folder_split
from .sources import FOLDER, Place, Source, digests_of, open_pictures, read_source
from .texts import Column, Texts, blocks_of

log = logging.getLogger("xret")

Kept = Callable[[], Mapping[str, str]]  # gives splits by file name, where they were settled before

_NUMBERS: dict[str | None, int] = {split: number for number, split in enumerate(SPLITS)}
_NOTED = 1000  # samples that are left out, of which a store keeps the reasons


@dataclass(frozen=True, slots=True)
class Caption:
    """One caption: its text as the source has it, and the source's number for it (else a running one)."""

    text: str
    sentid: int


@dataclass(frozen=True, slots=True)
class ImageSample:
    """One image: `file_name` is a POSIX path below the image folder, `cocoid` is -1 where there is none."""

    id: str
    file_name: str
    split: str
    cocoid: int
    captions: tuple[Caption, ...]
    place: Place | None = None  # where it lies in the files of its source; None in a folder


class Images(Sequence[ImageSample]):
    """Images in columns, which take a few bytes each beside their texts, and are given one by one.

    Attributes:
        rows: the columns' rows in the order of the images, int64 [I].
        names, ids, texts: of the images, and of all captions.
        edges: the first caption of each row, and the number of all, int64.
        splits: as numbers of `SPLITS`, uint8.
        cocoids, sentids: int64.
        places: int64 [I,3]; of a folder [0,3].
    """

    def __init__(self, entries: Iterable[Entry], most: int | None = None) -> None:
        """Take images as their source gives them, with so many captions of each at `most`; splits come later."""
        self.names, self.texts, imgids = Texts(), Texts(), Texts()
        edges, cocoids, places, numbers, running = (Column("q") for _ in range(5))
        kinds: dict[str | None, int] = {}
        kind, by_imgid, numbered, number = Column("i"), True, True, 0
        edges.append(0)
        for entry in entries:
            self.names.append(entry.file_name)
            by_imgid = by_imgid and entry.imgid is not None
            if by_imgid:
                imgids.append(entry.imgid or "")
            for place, (text, sentid) in enumerate(entry.captions[:most]):
                self.texts.append(text)
                numbers.append(-1 if sentid is None else sentid)
                running.append(number + place)
            numbered = numbered and all(sentid is not None for _, sentid in entry.captions)
            number += len(entry.captions)
            edges.append(len(self.texts))
            cocoids.append(entry.cocoid)
            for part in entry.place or ():
                places.append(part)
            kind.append(kinds.setdefault(entry.split, len(kinds)))
        self.ids = imgids if by_imgid else self.names
        self.edges, self.cocoids, self.sentids = edges.read(), cocoids.read(), (numbers if numbered else running).read()
        self.given, self.kinds = kind.read(), list(kinds)
        self.places = places.read().reshape(-1, 3)
        self.splits = np.zeros(len(self.names), np.uint8)
        self.rows = np.arange(len(self.names), dtype=np.int32)

    @classmethod
    def of(cls, samples: Sequence[ImageSample]) -> "Images":
        """Return images whose splits are settled, in their order, as columns."""
        entries = (
            Entry(one.file_name, one.split, [(c.text, c.sentid) for c in one.captions], one.id, one.cocoid, one.place)
            for one in samples
        )
        images = cls(entries)
        images.splits = np.array([SPLITS.index(one.split) for one in samples], np.uint8)
        return images

    def settle(self, splits: np.ndarray) -> None:
        """Give each row its split, and order the images by them."""
        self.splits, end = splits, 0
        for split in np.unique(splits).tolist():
            rows = np.flatnonzero(splits == split)
            self.rows[end : end + len(rows)] = rows
            end += len(rows)

    def caption_count(self, first: int = 0, last: int | None = None) -> np.ndarray:
        """Return the captions of each of the images [first, last), int32."""
        parts = blocks_of(self.rows[first:last])
        counts = [(self.edges[part + 1] - self.edges[part]).astype(np.int32) for part in parts]
        return np.concatenate([np.zeros(0, np.int32), *counts])

    def __len__(self) -> int:
        return len(self.rows)

    @overload
    def __getitem__(self, image: int) -> ImageSample: ...
    @overload
    def __getitem__(self, image: slice) -> list[ImageSample]: ...
    def __getitem__(self, image: int | slice) -> ImageSample | list[ImageSample]:
        if isinstance(image, slice):
            return [*self._samples(self.rows[image])]
        return next(self._samples(self.rows[[image]]))

    def __iter__(self) -> Iterator[ImageSample]:
        return chain.from_iterable(map(self._samples, blocks_of(self.rows)))

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Images) and len(self) == len(other) and all(map(ImageSample.__eq__, self, other))

    __hash__ = None  # type: ignore[assignment]

    def _samples(self, rows: np.ndarray) -> Iterator[ImageSample]:
        numbers = (self.edges[rows], self.edges[rows + 1], self.splits[rows], self.cocoids[rows])
        places = map(tuple, self.places[rows].tolist()) if len(self.places) else repeat(None)
        columns = zip(rows.tolist(), *(column.tolist() for column in numbers), places, strict=False)
        for row, first, last, split, cocoid, place in columns:
            captions = tuple(map(Caption, self.texts[first:last], self.sentids[first:last].tolist()))
            yield ImageSample(self.ids[row], self.names[row], SPLITS[split], cocoid, captions, place)


@dataclass(frozen=True, slots=True)
class Samples:
    """All of a data set."""

    dataset: str  # the manifest's name
    images: Images  # by split as in `SPLITS`, inside a split as in the source
    splits: dict[str, tuple[int, int]]  # rows [first, last) of each split that has any
    digest: str  # SHA-256 over name and rows in hexadecimal; where the pictures lie does not matter
    source: Source = FOLDER  # where they lie
    left_out: tuple[str, ...] = ()  # why samples are not among them that the source has; the first of many


def read_samples(manifest: Manifest, skip: bool = False, kept: Kept = dict) -> Samples:
    """Read the captions of a manifest; images are opened only where xret has to split them, see `_own_splits`.

    With `skip`, pictures without captions are left out, with a note. ManifestError: the file cannot be read, something
    in it is wrong or contradicts itself, or the manifest's counts are not met; the message names the place.
    """
    entries, source, left_out = read_source(manifest, skip)
    if left_out:
        log.warning("%s left out: %s.", counted(len(left_out), "sample"), printable("; ".join(some_of(left_out))))
    return build_samples(entries, manifest, source, left_out, kept)


def build_samples(
    entries: Iterable[Entry],
    manifest: Manifest,
    source: Source = FOLDER,
    left_out: Sequence[str] = (),
    kept: Kept = dict,
) -> Samples:
    """Settle splits, ids and numbers of entries, and put them in the order of the store; errors of `read_samples`."""
    images = Images(entries, manifest.captions_per_image)
    images.settle(_splits(images, manifest, source, kept))
    counts = dict(zip(SPLITS, np.bincount(images.splits, minlength=len(SPLITS)).tolist(), strict=True))
    _check_counts(counts, manifest)
    ends = accumulate(counts.values(), initial=0)
    ranges = {split: rows for split, rows in zip(SPLITS, pairwise(ends), strict=True) if counts[split]}
    digest = _digest(manifest, images)
    return Samples(manifest.name, images, ranges, digest, source, tuple(left_out[:_NOTED]))


# Vowel signs and accents are not letters to `re`, yet they belong to the word around them.
_MARKS = "".join(chr(c) for c in range(0x300, 0x10000) if unicodedata.category(chr(c)).startswith("M"))
# So do U+200C and U+200D inside a word of Persian or Bengali; other signs that nobody sees, as U+00AD, are dropped.
_INSIDE = rf"(?:[^\W_]|[{_MARKS}]|[\u200c\u200d]+(?=[^\W_]|[{_MARKS}]))*"
_WORD = re.compile(rf"[^\W_]{_INSIDE}(?:['’-][^\W_]{_INSIDE})*")
_UNSEEN = [c for c in map(chr, range(0x10000)) if unicodedata.category(c) == "Cf" and c not in "\u200b\u200c\u200d"]
_UNSEEN_SIGN = re.compile(f"[{''.join(_UNSEEN)}]")


def tokenize(text: str) -> list[str]:
    """Split a caption into lower-case words.

    A word is a run of letters and digits of any script; an apostrophe, a hyphen or a joiner inside stays.

    >>> tokenize("The dog's T-shirt, in 2 colours .")
    ['the', "dog's", 't-shirt', 'in', '2', 'colours']
    >>> tokenize(" . ")
    []
    """
    seen = text if text.isascii() else _UNSEEN_SIGN.sub("", text)
    return _WORD.findall(unicodedata.normalize("NFC", seen.lower()).replace("’", "'"))


def _splits(images: Images, manifest: Manifest, source: Source, kept: Kept) -> np.ndarray:
    """Return the split of each image, after merging; where the source has none, that of `_own_splits`."""
    kinds, given = images.kinds, images.given
    if None in kinds and len(kinds) > 1:
        first = images.names[int(np.argmax(given == kinds.index(None)))]
        raise ManifestError(
            f"{manifest.listing}: some images have a split and some, such as '{first}', have none; "
            "give it to all or none."
        )
    if None in kinds:
        named, by = [*dict.fromkeys(map(folder_split, images.names))], "the folders of the pictures"
        if None in named or len(named) == 1:
            named, by = [*SPLITS[:3]], "SHA-256 of the file name"
            splits = _own_splits(images, manifest, source, kept())
        else:
            splits = np.fromiter((_NUMBERS[folder_split(name)] for name in images.names), np.uint8)
        counts = np.bincount(splits, minlength=len(SPLITS)).tolist()
        shares = ", ".join(f"{counts[_NUMBERS[split]]} {split}" for split in named)
        log.warning("%s names no splits: %s by %s.", manifest.listing, shares, by)
        return splits
    joins = {**SPLIT_NAMES, **manifest.merge_splits}
    merged, strange = [joins.get(str(kind), str(kind)) for kind in kinds], Counter[str]()
    for split, count in zip(merged, np.bincount(given, minlength=len(merged)).tolist(), strict=True):
        if split not in SPLITS:
            strange[split] += count
    if strange:
        found = printable(", ".join(f"{count} in '{split}'" for split, count in strange.items()))
        unwritten = manifest.path == manifest.captions  # an import has no manifest
        advice = "call them train, val or test" if unwritten else "map them to train, val or test with merge_splits"
        log.warning(
            "%s: images of unknown splits count as 'other' (%s); %s to use them.", manifest.listing, found, advice
        )
    numbers = [_NUMBERS.get(split, _NUMBERS["other"]) for split in merged]
    return np.asarray(np.array(numbers, np.uint8)[given])


def _own_splits(images: Images, manifest: Manifest, source: Source, kept: Mapping[str, str]) -> np.ndarray:
    """Return train, val or test for each image: those that are `kept`, by file name, and 80, 10 and 10% of the others.

    Files of equal bytes are in one split. The order is that of the names' SHA-256, but files that are there several
    times come first, so that they are in train as far as it goes.
    """
    names = images.names
    splits = np.fromiter((_NUMBERS.get(kept.get(name), -1) for name in names), np.int64, len(names))
    if (splits >= 0).all():
        return splits.astype(np.uint8)
    group = np.unique(_contents(images, manifest, source), return_inverse=True)[1]
    known = np.flatnonzero(splits >= 0)[::-1]  # so that the first row of a group counts
    size, of_group = np.bincount(group), np.full(group.max() + 1, -1)
    of_group[group[known]] = splits[known]
    least = np.full(len(size), np.iinfo(np.uint64).max)
    hashes = (hashlib.sha256(name.encode("utf-8", "replace")).digest()[:8] for name in names)
    np.minimum.at(least, group, np.fromiter((int.from_bytes(one) for one in hashes), np.uint64, len(names)))
    new = np.flatnonzero(of_group < 0)
    new, total = new[np.lexsort((least[new], -size[new]))], int(size[new].sum())
    of_group[new], left = _NUMBERS["train"], len(new)
    for split, count in (("test", total - total * 9 // 10), ("val", max(1, total * 9 // 10 - total * 8 // 10))):
        while count > 0 and left > 1:
            left -= 1
            of_group[new[left]] = _NUMBERS[split]
            count -= size[new[left]]
    return np.where(splits < 0, of_group[group], splits).astype(np.uint8)


def _contents(images: Images, manifest: Manifest, source: Source) -> np.ndarray:
    """Return a number for each image, equal for files of equal bytes; only those of one size are read."""
    # Bytes of each file; tables do not say them, and a file that is missing has none.
    if len(images.places):
        sizes = np.where(images.places[:, 2] == 0, -1, images.places[:, 2])
    else:
        folder = open_pictures(source, manifest.images, {})
        sizes = np.fromiter((folder.stamp(name)[0] for name in images.names), np.int64, len(images.names))
    _, which, times = np.unique(sizes, return_inverse=True, return_counts=True)
    alike = np.flatnonzero((sizes != 0) & (times[which] > 1)).tolist()
    places: dict[str, Place] = {}
    if len(images.places):
        places = {images.names[row]: tuple(images.places[row].tolist()) for row in alike}
    digests = digests_of(open_pictures(source, manifest.images, places), [images.names[row] for row in alike])
    first: dict[bytes, int] = {}
    contents = np.arange(len(sizes))
    for row, digest in zip(alike, digests, strict=True):
        if digest != NO_DIGEST:
            contents[row] = first.setdefault(digest, row)
    return contents


def _check_counts(found: Mapping[str, int], manifest: Manifest) -> None:
    wrong = [
        f"{counted(found[split], f'{split} image')} where the manifest promises {promised:,}"
        for split, promised in (manifest.counts or {}).items()
        if found[split] != promised
    ]
    if wrong:
        advice = f"complete the file, or correct 'counts' in {manifest.path}"
        raise ManifestError(f"{manifest.listing}: it holds {', '.join(wrong)}; {advice}.")


def _digest(manifest: Manifest, images: Iterable[ImageSample]) -> str:
    """Hash name and rows, each a line of JSON, which is unambiguous whatever the texts contain."""
    encode = json.JSONEncoder(ensure_ascii=False).encode
    digest = hashlib.sha256(encode(manifest.name).encode())
    for image in images:
        captions = [(caption.sentid, caption.text) for caption in image.captions]
        row = encode([image.id, image.file_name, image.split, image.cocoid, captions])
        try:
            digest.update(b"\n" + row.encode())
        except UnicodeEncodeError as error:
            where = f"{manifest.listing}: image {image.file_name!r}"
            raise ManifestError(f"{where} has half of a character pair in a text; correct it.") from error
    return digest.hexdigest()
