"""Samples: the images of a data set and their captions, in the order of the store."""

import hashlib
import json
import logging
import re
import unicodedata
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise

import numpy as np

from ..errors import ManifestError
from ..wording import counted, printable, some_of
from .image_columns import Images, ImageSample
from .images import NO_DIGEST
from .manifest import SPLITS, Manifest
from .rows import SPLIT_NAMES, folder_split
from .sources import FOLDER, Place, Source, digests_of, open_pictures, read_source

log = logging.getLogger("xret")

Kept = Callable[[], Mapping[str, str]]  # gives splits by file name, where they were settled before

_NUMBERS: dict[str | None, int] = {split: number for number, split in enumerate(SPLITS)}
_NOTED = 1000  # samples that are left out, of which a store keeps the reasons


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
    images, source, left_out = read_source(manifest, skip)
    if left_out:
        log.warning("%s left out: %s.", counted(len(left_out), "sample"), printable("; ".join(some_of(left_out))))
    return build_samples(images, manifest, source, left_out, kept)


def build_samples(
    images: Images,
    manifest: Manifest,
    source: Source = FOLDER,
    left_out: Sequence[str] = (),
    kept: Kept = dict,
) -> Samples:
    """Settle splits and numbers of images, and put them in the order of the store; errors as of `read_samples`."""
    images.settle(_splits(images, manifest, source, kept), manifest.captions_per_image)
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
    kinds, given = images.kinds, images.splits
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
