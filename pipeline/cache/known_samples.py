"""The samples of a cache, as those of its manifest: what was looked through once need not be looked through again."""

from pathlib import Path

from ..data.manifest import Manifest
from ..data.samples import Caption, ImageSample, Samples, read_samples
from ..data.sources import FOLDER, Source, find_source, require_same
from ..errors import CacheError, ManifestError
from .feature_cache import FeatureCache
from .storage.generations import store_of


def find_samples(manifest: Manifest, url: str, *, skip: bool = False, anew: bool = False) -> Samples:
    """Return the samples of a manifest: of files that hold pictures with others from the cache at `url`, if it is one.

    Args:
        manifest: the data set.
        url: where its cache is, or will be.
        skip: see `read_samples`.
        anew: read them in any case.

    Raises:
        ManifestError: the data set cannot be read, or files have changed since the cache was begun.
        CacheError: the cache is damaged.
    """
    source = find_source(manifest)
    known = None if anew or source == FOLDER else _known(url)
    if known is None or known.dataset != manifest.name or known.source.keys != source.keys:
        return read_samples(manifest, skip)
    require_same_files(manifest.images, known.source, source, url)
    return samples_of(known)


def samples_of(cache: FeatureCache) -> Samples:
    """Return the samples that a cache was made of."""
    texts, sentids = cache.caption_texts(0, cache.captions), cache.sentids(0, cache.captions).tolist()
    captions = [Caption(text, sentid) for text, sentid in zip(texts, sentids, strict=True)]
    splits = [split for split, (first, last) in cache.splits.items() for _ in range(first, last)]
    ids, names = cache.ids(0, cache.images), cache.file_names(0, cache.images)
    cocoids = cache.sample_array("cocoid").tolist()
    ranges = zip(cache.caption_start.tolist(), cache.caption_count.tolist(), strict=True)
    images = tuple(
        ImageSample(key, name, split, cocoid, tuple(captions[start : start + count]), place)
        for key, name, split, cocoid, (start, count), place in zip(
            ids, names, splits, cocoids, ranges, cache.places(0, cache.images), strict=True
        )
    )
    return Samples(cache.dataset, images, cache.splits, cache.manifest_sha256, cache.source, cache.left_out)


def _known(url: str) -> FeatureCache | None:
    """Return the cache at `url`; None where there is none that was ever finished."""
    store = store_of(url)
    if not store.was_finished():
        return None
    try:
        return FeatureCache.open(url)
    except CacheError:  # said when it is opened to be written
        return None


def require_same_files(folder: Path, known: Source, now: Source, url: str) -> None:
    """Refuse files that have changed since a cache was begun.

    Args:
        folder: where their names start.
        known: the files that the cache was made of.
        now: the files as they are.
        url: the cache.

    Raises:
        ManifestError: one of them is another, or new, or gone.
    """
    names = [{file.name: file for file in source.files} for source in (known, now)]
    before, after = names
    for name in before | after:
        if name not in before or name not in after:
            what = "is gone" if name in before else "is new"
            raise ManifestError(f"{name} {what} since {url} was begun; put it back as it was, or go on with --update.")
        require_same(folder, before[name], after[name])
