"""Samples: the images of a data set and their captions, in the order of the store."""

import hashlib
import json
import logging
import re
import unicodedata
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise

from ..errors import ManifestError
from ..wording import counted, printable, some_of
from .digests import NONE
from .manifest import SPLITS, Manifest
from .rows import SPLIT_NAMES, Entry, folder_split
from .sources import FOLDER, Place, Source, digests_of, open_pictures, read_source

log = logging.getLogger("xret")

Kept = Callable[[], Mapping[str, str]]  # gives splits by file name, where they were settled before

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


@dataclass(frozen=True, slots=True)
class Samples:
    """All of a data set."""

    dataset: str  # the manifest's name
    images: tuple[ImageSample, ...]  # by split as in `SPLITS`, inside a split as in the source
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
    entries: list[Entry],
    manifest: Manifest,
    source: Source = FOLDER,
    left_out: Sequence[str] = (),
    kept: Kept = dict,
) -> Samples:
    """Settle splits, ids and numbers of entries, and put them in the order of the store; errors of `read_samples`."""
    splits = _splits(entries, manifest, source, kept)
    _check_counts(Counter(splits), manifest)
    by_imgid = all(entry.imgid is not None for entry in entries)
    numbered = all(sentid is not None for entry in entries for _, sentid in entry.captions)
    images, number = [], 0
    for entry, split in zip(entries, splits, strict=True):
        captions = tuple(
            Caption(text, sentid if numbered and sentid is not None else running)
            for running, (text, sentid) in enumerate(entry.captions, number)
        )
        number += len(captions)
        identity = str(entry.imgid) if by_imgid else entry.file_name
        captions = captions[: manifest.captions_per_image]
        images.append(ImageSample(identity, entry.file_name, split, entry.cocoid, captions, entry.place))
    images.sort(key=lambda image: SPLITS.index(image.split))
    counts = Counter(splits)
    ends = accumulate((counts[split] for split in SPLITS), initial=0)
    ranges = {split: rows for split, rows in zip(SPLITS, pairwise(ends), strict=True) if counts[split]}
    digest = _digest(manifest, images)
    return Samples(manifest.name, tuple(images), ranges, digest, source, tuple(left_out[:_NOTED]))


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


def _splits(entries: list[Entry], manifest: Manifest, source: Source, kept: Kept) -> list[str]:
    """Return the split of each image, after merging; where the source has none, that of `_own_splits`."""
    without = [entry.file_name for entry in entries if entry.split is None]
    if without and len(without) < len(entries):
        raise ManifestError(
            f"{manifest.listing}: some images have a split and some, such as '{without[0]}', have none; "
            "give it to all or none."
        )
    folders = [split for name in without if (split := folder_split(name))]
    if len(folders) == len(without) and len({*folders}) > 1:
        shares = ", ".join(f"{folders.count(split)} {split}" for split in dict.fromkeys(folders))
        log.warning("%s names no splits: %s by the folders of the pictures.", manifest.listing, shares)
        return folders
    if without:
        splits = _own_splits(entries, manifest, source, kept())
        shares = ", ".join(f"{splits.count(split)} {split}" for split in SPLITS[:3])
        log.warning("%s names no splits: %s by SHA-256 of the file name.", manifest.listing, shares)
        return splits
    joins = {**SPLIT_NAMES, **manifest.merge_splits}
    merged = [joins.get(str(entry.split), str(entry.split)) for entry in entries]
    strange = Counter(split for split in merged if split not in SPLITS)
    if strange:
        found = printable(", ".join(f"{count} in '{split}'" for split, count in strange.items()))
        unwritten = manifest.path == manifest.captions  # an import has no manifest
        advice = "call them train, val or test" if unwritten else "map them to train, val or test with merge_splits"
        log.warning(
            "%s: images of unknown splits count as 'other' (%s); %s to use them.", manifest.listing, found, advice
        )
    return [split if split in SPLITS else "other" for split in merged]


def _own_splits(entries: list[Entry], manifest: Manifest, source: Source, kept: Mapping[str, str]) -> list[str]:
    """Return train, val or test for each image: those that are `kept`, by file name, and 80, 10 and 10% of the others.

    Files of equal bytes are in one split. The order is that of the names' SHA-256, but files that are there several
    times come first, so that they are in train as far as it goes.
    """
    names = [entry.file_name for entry in entries]
    splits = [kept.get(name, "") for name in names]
    if all(splits):
        return splits
    groups: dict[bytes | str, list[int]] = {}
    for row, key in enumerate(_contents(entries, manifest, source)):
        groups.setdefault(key, []).append(row)
    new: list[list[int]] = []
    for rows in groups.values():
        if known := next(filter(None, (splits[row] for row in rows)), None):
            for row in rows:
                splits[row] = splits[row] or known
        else:
            new.append(rows)
    hashes = [hashlib.sha256(name.encode("utf-8", "replace")).digest() for name in names]
    new.sort(key=lambda rows: (-len(rows), min(hashes[row] for row in rows)))
    images = sum(map(len, new))
    for split, count in (("test", images - images * 9 // 10), ("val", max(1, images * 9 // 10 - images * 8 // 10))):
        while count > 0 and len(new) > 1:
            for row in (rows := new.pop()):
                splits[row] = split
            count -= len(rows)
    return [split or "train" for split in splits]


def _contents(entries: list[Entry], manifest: Manifest, source: Source) -> list[bytes | str]:
    """Return for each image what is equal for files of equal bytes; only those of one size are read."""
    places = {entry.file_name: entry.place for entry in entries if entry.place is not None}
    pictures = open_pictures(source, manifest.images, places)
    # Bytes of each file; tables do not say them, and a file that is missing has none.
    sizes = {name: place[2] or -1 for name, place in places.items()}
    sizes = sizes or {entry.file_name: pictures.stamp(entry.file_name)[0] for entry in entries}
    times = Counter(sizes.values())
    alike = [name for name, size in sizes.items() if size and times[size] > 1]
    digests = dict(zip(alike, digests_of(pictures, alike), strict=True))
    return [found if (found := digests.get(name, NONE)) != NONE else name for name in sizes]


def _check_counts(found: Counter[str], manifest: Manifest) -> None:
    wrong = [
        f"{counted(found[split], f'{split} image')} where the manifest promises {promised:,}"
        for split, promised in (manifest.counts or {}).items()
        if found[split] != promised
    ]
    if wrong:
        advice = f"complete the file, or correct 'counts' in {manifest.path}"
        raise ManifestError(f"{manifest.listing}: it holds {', '.join(wrong)}; {advice}.")


def _digest(manifest: Manifest, images: list[ImageSample]) -> str:
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
