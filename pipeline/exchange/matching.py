"""Which image and caption of the data set each entry of a source is.

A key of an image can be, in this order: the data set's own id (Karpathy's imgid, which SCAN's ``*_ids.txt`` hold for
Flickr30K), its COCO id (the TSV files of COCO; leading zeros do not count), its file name below the image folder, or
its file name without folder and suffix. All keys of a source are of one kind: the kind by which most of them are found.
A key that two images of the data set share finds neither. A caption is found by its image and text.
"""

import re
from collections.abc import Callable, Sequence
from pathlib import PurePosixPath

import numpy as np

from ..data.image_columns import ImageSample
from ..data.images import SUFFIXES
from ..data.samples import Samples, tokenize
from .importers.source import Imported, SourceError, Table

_AS_WELL = 0.9  # of the images that the best kind of key finds: with so many, another kind may be what is meant


def match(source: Imported, samples: Samples) -> tuple[dict[str, np.ndarray], str, int]:
    """Find the entries of a source in a data set.

    Returns, by modality, the entry of each image and caption, int64, -1 for one that the source lacks; the kind of key;
    and how many entries of images are not in the data set. SourceError if it is not clear which image an entry is.
    """
    rows, kind = match_images(source.images.keys, samples)
    _check_splits(source.images, rows, samples)
    images = np.full(len(samples.images), -1, dtype=np.int64)
    _check_captions(source.images, rows, samples)
    found = np.flatnonzero(rows >= 0)
    images[rows[found]] = found
    _pick(source.images, images, rows[found], found)
    entries = {"images": images}
    if source.captions is not None:
        row_of = dict(zip(source.images.keys, rows.tolist(), strict=True))
        known: dict[tuple[int, str], list[int]] = {}
        for entry, (owner, text) in enumerate(zip(source.owners, source.captions.keys, strict=True)):
            known.setdefault((row_of[owner], text.strip()), []).append(entry)
        captions = (
            known.get((row, caption.text.strip()), [-1])
            for row, image in enumerate(samples.images)
            for caption in image.captions
        )
        table = source.captions
        chosen = (own[0] if len(own) == 1 else table.pick(own) for own in captions)
        entries["captions"] = np.fromiter(chosen, np.int64)
    return entries, kind, int((rows < 0).sum())


def match_own(source: Imported, samples: Samples) -> dict[str, np.ndarray]:
    """Return the entries of the source's own images and captions, integers; captions are read in their order."""
    images = samples.images
    rows = images.rows if len(source.images.keys) == len(images) else images.captions[images.edges[:-1]]
    return {"images": rows, "captions": images.captions}


def match_images(keys: Sequence[str], samples: Samples) -> tuple[np.ndarray, str]:
    """Return the image row of each key, int64, -1 for one that is not in the data set; and the kind of key.

    SourceError if no key is found, two kinds find about as many and disagree, or two keys are of one image.
    """
    found = {kind: _rows(keys, samples, of_image, of_key) for kind, (of_image, of_key) in _KINDS.items()}
    best = max(found, key=lambda kind: int((found[kind] >= 0).sum()))
    rows = found[best]
    matched = int((rows >= 0).sum())
    if not matched:
        image, first = samples.images[0], ", ".join(f"'{key}'" for key in keys[:3])
        raise SourceError(
            f"none of the source's {len(keys)} images is in '{samples.dataset}': its first ids are {first}, the data"
            f" set's first image is '{image.file_name}', id '{image.id}', COCO id {image.cocoid}; choose the source of"
            " this data set"
        )
    for kind, others in found.items():
        odd = np.flatnonzero((rows >= 0) & (others >= 0) & (rows != others))
        if len(odd) and int((others >= 0).sum()) >= _AS_WELL * matched:
            raise SourceError(
                f"the source's ids fit by {best} as well as by {kind}, but to different images, the first of them"
                f" '{keys[int(odd[0])]}'; use file names as ids in the source"
            )
    owners: dict[int, str] = {}
    for key, row in zip(keys, rows.tolist(), strict=True):
        if row >= 0 and owners.setdefault(row, key) != key:
            raise SourceError(
                f"'{owners[row]}' and '{key}' in the source are both '{samples.images[row].file_name}' of"
                f" '{samples.dataset}' by {best}; use its file names as ids in the source"
            )
    return rows, best


def _rows(
    keys: Sequence[str], samples: Samples, of_image: Callable[[ImageSample], str], of_key: Callable[[str], str]
) -> np.ndarray:
    known: dict[str, int] = {}
    for row, image in enumerate(samples.images):
        key = of_image(image)
        known[key] = -1 if key in known or not key else row
    return np.array([known.get(of_key(key), -1) for key in keys], dtype=np.int64)


def _number(key: str) -> str:
    key = _whole(key)
    return str(int(key)) if key.isascii() and key.isdigit() and len(key) < 20 else ""


def _whole(key: str) -> str:
    """Return a key, of ``123.0``, which a table made of a number, ``123``."""
    return re.sub(r"^(\d+)\.0+$", r"\1", key)


def _stem(name: str) -> str:
    path = PurePosixPath(name)
    return path.stem if path.suffix.lower() in SUFFIXES else path.name


_KINDS: dict[str, tuple[Callable[[ImageSample], str], Callable[[str], str]]] = {
    "id": (lambda image: _whole(str(image.id)), _whole),
    "COCO id": (lambda image: str(image.cocoid) if image.cocoid >= 0 else "", _number),
    "file name": (lambda image: image.file_name, str),
    "file name without folder and suffix": (lambda image: _stem(image.file_name), _stem),
}


def _pick(table: Table, images: np.ndarray, rows: np.ndarray, entries: np.ndarray) -> None:
    order = np.argsort(rows, kind="stable")
    found, first, count = np.unique(rows[order], return_index=True, return_counts=True)
    for row, at, several in zip(found[count > 1], first[count > 1], count[count > 1], strict=True):
        images[row] = table.pick(entries[order[at : at + several]].tolist())


def _check_captions(table: Table, rows: np.ndarray, samples: Samples) -> None:
    """Refuse entries whose captions are not those of the image that their key means."""
    for row, (where, own) in zip(rows.tolist(), table.captions(), strict=False):
        theirs = [] if row < 0 else [caption.text for caption in samples.images[row].captions]
        if row < 0 or not own or not theirs or set(own) <= set(theirs):
            continue
        known, given = set(map(_words, theirs)), list(map(_words, own))
        # Others cut and spell some captions differently, and a manifest may hold a part of them.
        if 2 * len(known.intersection(given)) < min(len(known), len(set(given))):
            odd = next(text for text, words in zip(own, given, strict=True) if words not in known)
            image = samples.images[row]
            raise SourceError(
                f"{where}: a caption there is '{odd.strip()}', but the image '{image.file_name}', id '{image.id}', that"
                f" this entry was matched to, has '{theirs[0]}'; use file names as ids in the source, or the source of"
                f" '{samples.dataset}'"
            )


def _words(text: str) -> tuple[str, ...]:
    return tuple(tokenize(text)) or (text.strip(),)


def _check_splits(table: Table, rows: np.ndarray, samples: Samples) -> None:
    """Refuse keys that send most images of a file to another split: they are numbers of another kind."""
    named = np.array(table.splits)
    for split in dict.fromkeys(table.splits):
        here = [samples.images[row].split for row in rows[(named == split) & (rows >= 0)]]
        # Karpathy's restval is training data of the peers, and 'other' here unless the manifest merges it.
        fitting = sum(found == split or (split, found) == ("train", "other") for found in here)
        if 2 * fitting < len(here):
            raise SourceError(
                f"only {fitting} of {len(here)} images of the source's {split} files are in split '{split}' of"
                f" '{samples.dataset}'; its ids count something else, or it is of another data set"
            )
