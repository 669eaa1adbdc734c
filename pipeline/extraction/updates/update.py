"""A data set that has changed since its store was made: what changed, and the generation that holds what it is now."""

import sys
from collections import Counter
from dataclasses import dataclass
from shlex import join, quote

import numpy as np

from ...cache import FAILED, FeatureCache, FeatureSet
from ...cache.known_samples import require_same_files
from ...cache.storage.folder import GENERATIONS, home_of
from ...cache.storage.generations import WORDS, current, make_current, numbers, store_of
from ...cache.storage.store import Store
from ...data.digests import NONE, Digests
from ...data.manifest import Manifest
from ...data.samples import Samples
from ...errors import CacheError, ManifestError
from ...wording import counted, printable


@dataclass(frozen=True)
class Changes:
    """How many samples of a data set are others than those of a store; pictures are matched by their file names."""

    pictures_new: int = 0
    pictures_gone: int = 0
    captions_new: int = 0
    captions_gone: int = 0
    captions_other: int = 0  # of a picture, with another text
    moved: int = 0  # pictures in another split

    def __str__(self) -> str:
        """Return it in words."""
        parts = [
            _said("picture", new=self.pictures_new, gone=self.pictures_gone),
            _said("caption", new=self.captions_new, gone=self.captions_gone, changed=self.captions_other),
            f"{counted(self.moved, 'picture')} in another split" if self.moved else "",
        ]
        return ", ".join(filter(None, parts)) or "only names, numbers or the order of rows differ"


def _said(what: str, **counts: int) -> str:
    found = [f"{count:,} {how}" for how, count in counts.items() if count]
    return f"{what}s: {', '.join(found)}" if found else ""


def changes(cache: FeatureCache, samples: Samples) -> Changes:
    """Compare a data set with the samples of a cache; no picture is read."""
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
    return Changes(**found)


def _files_differ(cache: FeatureCache, samples: Samples, digests: Digests) -> bool:
    """Return whether a picture's file can be read and is not the one that every set of the cache was made of.

    So does that of a picture that failed, because its file could not be read, as soon as it can be.
    """
    known = _known_digests(cache)
    wanted = [image for image in samples.images if image.file_name in known]
    found = zip(wanted, digests.of(wanted), strict=True)
    return any(now != NONE and known[image.file_name] != {now} for image, now in found)


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
            advice = f"if some have, remove it with `xret cache rm {quote(cache.url)} {name}` and extract it again."
            print(printable(f"{note} {advice}"), file=sys.stderr)


@dataclass(frozen=True)
class Target:
    """Where an extraction writes: the URL of a store, or of the generation that an update makes."""

    url: str
    is_new: bool = False  # it becomes the current one when the extraction has ended


def choose_target(url: str, samples: Samples, manifest: Manifest, digests: Digests, update: bool) -> Target:
    """Return where samples are to be written in the store at `url`; nothing is written yet.

    Args:
        url: of the store.
        samples: of the manifest.
        manifest: the data set.
        digests: of its pictures.
        update: whether a new generation may be made.

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
    if not store.was_finished():
        return Target(url)  # it is made, or made again
    root, damage = store.inspect_group("")
    same = root.get("manifest_sha256") == samples.digest
    if same and not damage and not update:
        _require_same_source(url, samples, manifest)
    if damage or (same and not update):  # what else is damaged may be repaired
        return Target(url)
    cache = FeatureCache.open(url)
    if not update:
        raise CacheError(_refusal(cache, samples))
    now, folder = current(home), f"{home.absolute_url}/{GENERATIONS}"
    for number in numbers(home):
        if number > now and _holds(f"{folder}/{number}", samples, digests):
            return Target(f"{folder}/{number}", is_new=True)
    if same:
        _note_without_digests(cache)
    if same and cache.source == samples.source and not _files_differ(cache, samples, digests):
        return Target(url)
    return Target(f"{folder}/{max(numbers(home)) + 1}", is_new=True)


def _require_same_source(url: str, samples: Samples, manifest: Manifest) -> None:
    """Refuse the samples of a store in other files than those that its features are of."""
    try:
        known = FeatureCache.open(url).source
    except (CacheError, ManifestError):  # this is what is repaired
        return
    require_same_files(manifest.images, known, samples.source, url)
    if known.column != samples.source.column:
        raise ManifestError(
            f"{manifest.path}: the pictures of {url} are those of column '{known.column}', not"
            f" '{samples.source.column}'; name that one as image_column, or go on with --update."
        )


def _holds(url: str, samples: Samples, digests: Digests) -> bool:
    """Return whether a generation that is being made holds these samples, of the files that they are in now."""
    store = Store(url)
    if store.is_unfinished("") or store.is_unfinished("samples"):
        return False
    try:
        cache = FeatureCache.open(url)
        if (cache.manifest_sha256, cache.source) != (samples.digest, samples.source):
            return False
        return not _files_differ(cache, samples, digests)
    except CacheError:  # it is removed when another becomes the current one
        return False


def _refusal(cache: FeatureCache, samples: Samples) -> str:
    try:
        changed = f"{changes(cache, samples)}; the pictures themselves were not compared"
    except CacheError:  # where the way out is --update, as well
        changed = "as the store is damaged, what changed cannot be told"
    return printable(
        f"{cache.url} holds other samples: data set '{cache.dataset}', manifest {cache.manifest_sha256[:8]}, not"
        f" '{samples.dataset}', {samples.digest[:8]} ({changed}); go on with --update,"
        " which computes only what is new, or choose another store"
    )


def finish(cache: FeatureCache) -> None:
    """Make a generation the current one, and say which feature sets and splits the last one had that are not in it."""
    before, there = FeatureCache.open(cache.url), cache.set_paths()
    make_current(cache.store)
    for path in before.set_paths():
        # The vocabulary of words is another, and so is their name.
        now = [path] if path in there else [one for one in there if path.startswith(WORDS) and one.startswith(WORDS)]
        try:
            note = _lost_splits(before.set_at(path), cache.set_at(now[0])) if now else _lost_set(before, path, cache)
        except CacheError:  # the set is damaged, and its generation no longer the current one
            continue
        if note:
            print(printable(f"Note: {note}."), file=sys.stderr)


def _lost_set(before: FeatureCache, path: str, cache: FeatureCache) -> str:
    """Say that the set at `path` of the last generation is not in this one, and what adds it."""
    imported = "files" in before.set_at(path).identity
    way = "`xret import` with its options adds it"
    if not imported:
        way = "`xret extract` with its options adds it, and computes only what is new"
    return f"{path} is in generation {before.generation} of {cache.url}, not in {cache.generation}: {way}"


def _lost_splits(before: FeatureSet, now: FeatureSet) -> str:
    """Say which splits a set had in the last generation that it has not in this one, and what adds them, if any."""
    cache, done = now.cache, [split for split in before.cache.splits if before.complete(split)]
    lost = ",".join(split for split in done if split in cache.splits and not now.complete(split))
    words = join(["xret", "extract", *now.attributes.get("command", []), "--store", cache.url, "--splits", lost])
    had = f"{now.path} has lost {lost.replace(',', ', ')}, which it had in generation {before.cache.generation}"
    return f"{had}: `{words}` adds what is missing" if lost else ""
