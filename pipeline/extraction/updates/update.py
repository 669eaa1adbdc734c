"""A data set that has changed since its store was made: what changed, and the generation that holds what it is now."""

import os
import sys
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from shlex import join

import numpy as np

from ...cache import FAILED, FeatureCache, FeatureSet
from ...cache.known_samples import require_same_files
from ...cache.storage.folder import GENERATIONS, home_of
from ...cache.storage.generations import current, make_current, numbers, store_of
from ...cache.storage.store import Store
from ...data.digests import NONE, digest_at
from ...data.manifest import Manifest
from ...data.samples import Samples
from ...data.sources import FOLDER
from ...errors import CacheError, ManifestError, StoreError
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
    """Return the names of the pictures whose files can be read and are not those that every set was made of.

    A picture that failed because its file could not be read is among them as soon as it can be.
    """
    known = _known_digests(cache)
    wanted = [image for image in samples.images if image.file_name in known]
    threads = os.cpu_count()
    if samples.source != FOLDER:  # one after the other: to go back in a group of rows is to read it again
        wanted, threads = sorted(wanted, key=lambda image: image.place or (0, 0, 0)), 1
    names = [image.file_name for image in wanted]
    differing = []
    with ExitStack() as stack:
        pictures = stack.enter_context(closing(samples.open_pictures(folder, len(samples.images))))
        pool = stack.enter_context(ThreadPoolExecutor(threads))
        progress = stack.enter_context(Progress("compare files", len(names), "images"))
        for name, now in zip(names, pool.map(partial(digest_at, pictures), names), strict=True):
            if now != NONE and known[name] != {now}:
                differing.append(name)
            progress.update(1)
    return differing


def _known_digests(cache: FeatureCache) -> dict[str, set[bytes]]:
    """Return the digests of each picture that the sets of a cache tell, by its name; `NONE`: it could not be read."""
    known: dict[str, set[bytes]] = {}
    names = cache.file_names(0, cache.images)
    for set_name in cache.set_names("images"):
        features = cache.image_set(set_name)
        if "digest" not in features.attributes["arrays"]:
            continue
        digests, failed = map(bytes, features.of_samples("digest")), (features.status == FAILED).tolist()
        for name, digest, has_failed in zip(names, digests, failed, strict=True):
            if digest != NONE or has_failed:
                known.setdefault(name, set()).add(digest)
    return known


def _note_without_digests(cache: FeatureCache) -> None:
    for name in cache.set_names("images"):
        features = cache.image_set(name)
        if "digest" not in features.attributes["arrays"] and "files" not in features.identity:  # of an import
            note = f"Note: '{name}' does not say of which files it is, so pictures that have changed are not noticed;"
            advice = f"if some have, remove it with `xret cache rm {cache.url} {name}` and extract it again."
            print(printable(f"{note} {advice}"), file=sys.stderr)


@dataclass(frozen=True)
class Place:
    """Where an extraction writes: the URL of a store, or of the generation that an update makes."""

    url: str
    is_new: bool = False  # it becomes the current one when the extraction has ended


def place_of(url: str, samples: Samples, manifest: Manifest, update: bool) -> Place:
    """Return where the samples of a manifest are to be written in the store at `url`.

    Raises:
        CacheError: the store holds other samples, and `update` is not asked for; or `url` is damaged.
        ManifestError: the files that hold the samples have changed, and `update` is not asked for.
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
    if same and not damage and not update:
        _require_same_source(url, samples, manifest)
    if damage or (same and not update):  # what else is damaged may be repaired
        return Place(url)
    cache = FeatureCache.open(url)
    if not update:
        raise CacheError(_refusal(cache, samples, manifest))
    now, folder = current(home), f"{home.absolute_url}/{GENERATIONS}"
    for number in numbers(home):
        if number > now and _holds(f"{folder}/{number}", samples, manifest.images):
            return Place(f"{folder}/{number}", is_new=True)
    if same:
        _note_without_digests(cache)
    if same and cache.source == samples.source and not _with_other_bytes(cache, samples, manifest.images):
        return Place(url)
    return Place(f"{folder}/{max(numbers(home)) + 1}", is_new=True)


def _require_same_source(url: str, samples: Samples, manifest: Manifest) -> None:
    """Refuse the samples of a store in other files than those that its features are of."""
    try:
        known = FeatureCache.open(url).source
    except StoreError:
        raise
    except (CacheError, ManifestError):  # this is what is repaired
        return
    require_same_files(manifest.images, known, samples.source, url)
    if known.column != samples.source.column:
        raise ManifestError(
            f"{manifest.path}: the pictures of {url} are those of column '{known.column}', not"
            f" '{samples.source.column}'; name that one as image_column, or go on with --update."
        )


def _holds(url: str, samples: Samples, folder: Path) -> bool:
    """Return whether a generation that is being made holds these samples, of the files that they are in now."""
    store = Store(url)
    if store.is_unfinished("") or store.is_unfinished("samples"):
        return False
    try:
        cache = FeatureCache.open(url)
        if (cache.manifest_sha256, cache.source) != (samples.digest, samples.source):
            return False
        return not _with_other_bytes(cache, samples, folder)
    except StoreError:
        raise
    except CacheError:  # it is removed when another becomes the current one
        return False


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
    """Make a generation the current one, and say which feature sets and splits the last one had that are not in it."""
    before = FeatureCache.open(cache.url)
    make_current(cache.store)
    there = cache.set_paths()
    words = [path for path in there if path.startswith("captions/words@")]  # the vocabulary is another
    for path in before.set_paths():
        now = [path] if path in there else words if path.startswith("captions/words@") else []
        if now:
            _note_splits(before, path, cache.set_at(now[0]))
            continue
        try:
            imported = "files" in before.set_at(path).identity
        except CacheError:  # it is damaged, and its generation no longer the current one
            continue
        way = "`xret import` with its options adds it"
        if not imported:
            way = "`xret extract` with its options adds it, and computes only what is new"
        note = f"Note: {path} is in generation {before.generation} of {cache.url}, not in {cache.generation}: {way}."
        print(printable(note), file=sys.stderr)


def _note_splits(before: FeatureCache, path: str, features: FeatureSet) -> None:
    """Say which splits the set at `path` had in the last generation that it has not in this one, and what adds them."""
    cache = features.cache
    try:
        done = [split for split in before.splits if before.set_at(path).complete(split)]
    except StoreError:
        raise
    except CacheError:  # it is damaged, and its generation no longer the current one
        return
    if lost := [split for split in done if split in cache.splits and not features.complete(split)]:
        words = [*features.attributes.get("command", []), "--store", cache.url, "--splits", ",".join(lost)]
        note = f"Note: {features.path} has lost {', '.join(lost)}, which it had in generation {before.generation}:"
        print(printable(f"{note} `{join(['xret', 'extract', *words])}` adds what is missing."), file=sys.stderr)
