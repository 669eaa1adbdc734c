"""A data set that has changed since its store was made: what changed, and the generation that holds what it is now."""

import os
import sys
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np

from ...cache import FeatureCache
from ...cache.storage.folder import GENERATIONS, home_of
from ...cache.storage.generations import current, make_current, numbers, store_of
from ...cache.storage.store import Store
from ...data.digests import NONE, digest_at
from ...data.manifest import Manifest
from ...data.samples import Samples
from ...errors import CacheError, StoreError
from ...progress import Progress
from ...wording import counted, printable


@dataclass(frozen=True)
class Changes:
    """How many samples of a data set are others than those of a store; pictures are matched by their file names."""

    pictures_new: int = 0
    pictures_gone: int = 0
    pictures_other: int = 0  # whose files have other bytes
    captions_new: int = 0
    captions_gone: int = 0
    captions_other: int = 0  # of a picture, with another text
    moved: int = 0  # pictures in another split

    def __str__(self) -> str:
        """Return it in words."""
        parts = [
            _said("picture", new=self.pictures_new, gone=self.pictures_gone, with_other_bytes=self.pictures_other),
            _said("caption", new=self.captions_new, gone=self.captions_gone, changed=self.captions_other),
            f"{counted(self.moved, 'picture')} in another split" if self.moved else "",
        ]
        return ", ".join(filter(None, parts)) or "only names, numbers or the order of rows differ"


def _said(what: str, **counts: int) -> str:
    found = [f"{count:,} {how.replace('_', ' ')}" for how, count in counts.items() if count]
    return f"{what}s: {', '.join(found)}" if found else ""


def changes(cache: FeatureCache, samples: Samples, folder: Path) -> Changes:
    """Compare a data set, whose manifest names `folder`, with the samples of a cache.

    The files are read where a feature set of the cache says of which files it is.
    """
    names, texts = cache.file_names(0, cache.images), cache.caption_texts(0, cache.captions)
    splits = np.repeat(list(cache.splits), [last - first for first, last in cache.splits.values()]).tolist()
    starts, counts = cache.caption_start.tolist(), cache.caption_count.tolist()
    before = {
        name: (split, texts[start : start + count])
        for name, split, start, count in zip(names, splits, starts, counts, strict=True)
    }
    there = {image.file_name for image in samples.images}
    found: Counter[str] = Counter(pictures_gone=sum(name not in there for name in before))
    found["captions_gone"] = sum(len(captions) for name, (_, captions) in before.items() if name not in there)
    for image in samples.images:
        split, old = before.get(image.file_name, (None, []))
        new, gone = (Counter(caption.text for caption in image.captions), Counter(old))
        more, less = (new - gone).total(), (gone - new).total()
        changed = min(more, less)
        found.update(captions_new=more - changed, captions_gone=less - changed, captions_other=changed)
        found.update(pictures_new=split is None, moved=split not in (None, image.split))
    found["pictures_other"] = len(_with_other_bytes(cache, samples, folder))
    return Changes(**found)


def _with_other_bytes(cache: FeatureCache, samples: Samples, folder: Path) -> list[str]:
    """Return the names of the pictures whose files are there and not those that features were made of."""
    known: dict[str, bytes] = {}
    names = cache.file_names(0, cache.images)
    for name in cache.set_names("images"):
        features = cache.image_set(name)
        if "digest" in features.attributes["arrays"]:
            digests = map(bytes, features.of_samples("digest"))
            known |= {file: digest for file, digest in zip(names, digests, strict=True) if digest != NONE}
    wanted = [image.file_name for image in samples.images if image.file_name in known]
    differing = []
    with ExitStack() as stack:
        pictures = stack.enter_context(closing(samples.open_pictures(folder, len(samples.images))))
        threads = stack.enter_context(ThreadPoolExecutor(os.cpu_count()))
        progress = stack.enter_context(Progress("compare files", len(wanted), "images"))
        for name, now in zip(wanted, threads.map(partial(digest_at, pictures), wanted), strict=True):
            if now not in (NONE, known[name]):
                differing.append(name)
            progress.update(1)
    return differing


@dataclass(frozen=True)
class Place:
    """Where an extraction writes: the URL of a store, or of the generation that an update makes."""

    url: str
    is_new: bool = False  # it becomes the current one when the extraction has ended


def place_of(url: str, samples: Samples, manifest: Manifest, update: bool) -> Place:
    """Return where the samples of a manifest are to be written in the store at `url`.

    Raises:
        CacheError: the store holds other samples, and `update` is not asked for; or `url` is damaged.
    """
    home_url, named = home_of(url)
    home = Store(home_url)
    if update and named is not None:
        raise CacheError(
            f"{url} is one generation of {home.url}, and --update makes another; name the whole as --store"
        )
    store = store_of(url)
    if not store.exists("zarr.json") or store.is_unfinished("") or store.is_unfinished("samples"):
        return Place(url)  # it is made, or made again
    root, damage = store.inspect_group("")
    same = root.get("manifest_sha256") == samples.digest
    if damage or (same and not update):  # what else is damaged may be repaired
        return Place(url)
    cache = FeatureCache.open(url)
    if not update:
        raise CacheError(_refusal(cache, samples, manifest))
    now, folder = current(home), f"{home.absolute_url}/{GENERATIONS}"
    for number in numbers(home):
        if number > now and _holds(f"{folder}/{number}", samples):
            return Place(f"{folder}/{number}", is_new=True)
    if same and cache.source == samples.source and not _with_other_bytes(cache, samples, manifest.images):
        return Place(url)
    return Place(f"{folder}/{max(numbers(home)) + 1}", is_new=True)


def _holds(url: str, samples: Samples) -> bool:
    """Return whether a generation that is being made holds these samples, in the files in which they are now."""
    store = Store(url)
    if store.is_unfinished("") or store.is_unfinished("samples"):
        return False
    try:
        cache = FeatureCache.open(url)
    except CacheError:  # it is removed when another becomes the current one
        return False
    return (cache.manifest_sha256, cache.source) == (samples.digest, samples.source)


def _refusal(cache: FeatureCache, samples: Samples, manifest: Manifest) -> str:
    try:
        changed = str(changes(cache, samples, manifest.images))
    except StoreError:
        raise
    except CacheError:  # where the way out is --update, as well
        changed = "as the store is damaged, what changed cannot be told"
    return printable(
        f"{cache.url} holds other samples: data set '{cache.dataset}', manifest {cache.manifest_sha256[:8]}, not"
        f" '{samples.dataset}', {samples.digest[:8]} ({changed}); go on with --update,"
        " which computes only what is new, or choose another store"
    )


def finish(cache: FeatureCache) -> None:
    """Make a generation the current one, and say which feature sets the last one had that are not in it."""
    before = FeatureCache.open(cache.url)
    make_current(cache.store)
    there = cache.set_paths()
    words = any(path.startswith("captions/words@") for path in there)
    for path in before.set_paths():
        if path in there or (words and path.startswith("captions/words@")):
            continue
        features = before.set_at(path)
        imported = "files" in features.identity
        way = "`xret import` with its options adds it"
        if not imported:
            way = "`xret extract` with its options adds it, and computes only what is new"
        note = f"Note: {path} is in generation {before.generation} of {cache.url}, not in {cache.generation}: {way}."
        print(printable(note), file=sys.stderr)
