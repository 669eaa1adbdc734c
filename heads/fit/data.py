"""Reading and encoding: from pictures and captions, a manifest or a store to a store that can be fitted."""

import logging
import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from ...pipeline.data.manifest import SUFFIXES, Manifest, bundled_manifests, load_manifest
from ...pipeline.data.samples import read_samples
from ...pipeline.errors import EncoderError, ManifestError, RunError, nearest
from ...pipeline.extraction.extraction import extract
from ...pipeline.extraction.options import build_options
from ...pipeline.store import FeatureCache
from ...pipeline.store.store import splits_at
from ...pipeline.wording import counted, in_time
from ..evaluation.scoring import is_store
from ..runs.features import Sets

ENCODER = "hf:openai/clip-vit-base-patch32"
SPLITS = ("train", "val", "test")
ENOUGH = 50  # pictures, below which the numbers say next to nothing
_SMALL = 500  # pictures that are encoded at once; of more, those of `val` come first and give the rate
_log = logging.getLogger("xret")


@dataclass(frozen=True)
class Source:
    """What is fitted: pictures with captions, by a manifest, or a store that has their features."""

    name: str  # what messages call it
    manifest: Manifest | None  # None: a store
    store: str
    pictures: Path | None  # the folder that their names start from, if it is known


def find_source(
    data: str | Path, captions: str | Path | None, out: Path, data_root: str | Path | None, encoder: str | None
) -> Source:
    """Tell what `data` is.

    ManifestError, RunError: it is nothing of that kind, or options are for something else.
    """
    url, path, root = str(out / "features.zarr"), Path(data), None if data_root is None else Path(data_root)
    if is_store(data):
        for given, what in ((captions, "captions"), (encoder, "--encoder")):
            if given is not None:
                raise RunError(f"{data} is a store, which has features and captions already; leave {what} out")
        return Source(str(data), None, str(data), root)
    if captions is None:
        _require_manifest(data)
        manifest = load_manifest(data, root)
        return Source(str(data), manifest, url, manifest.images)
    if root is not None:
        raise ManifestError(f"--data-root is for the paths of a manifest, and {data} is none; leave it out")
    file = Path(captions)
    for there, what in ((path.is_dir(), f"folder {data}"), (file.is_file(), f"file {captions}")):
        if not there:
            raise ManifestError(
                f"there is no {what}; name a folder of pictures and the file of their captions, or a manifest alone"
            )
    if file.suffix not in SUFFIXES:
        raise ManifestError(f"{captions} is no file of captions; give one that ends in {', '.join(SUFFIXES)}")
    name = re.sub(r"[^a-z0-9_-]+", "-", path.resolve().name.lower()).strip("-") or "pictures"
    return Source(str(captions), Manifest(name, path.resolve(), file, path=file), url, path.resolve())


def _require_manifest(data: str | Path) -> None:
    """Raise ManifestError, or RunError for a run, that says what to name in the place of something else."""
    path, bundled = Path(data), list(bundled_manifests())
    if str(data) in bundled:
        return
    if (path / "run.json").is_file():
        raise RunError(f"{data} is a run; name the store or the pictures that it was made of")
    if path.is_dir():
        raise ManifestError(f"{data} is a folder without features; name the file of captions behind it")
    if not path.exists():
        known = f"{nearest(str(data), bundled)}; correct the path, or name one of {', '.join(bundled)}"
        raise ManifestError(f"there is no store, manifest or data set '{data}'{known}")
    if path.suffix in SUFFIXES:
        raise ManifestError(f"{data} is a file of captions; name the folder of their pictures before it")


def require_contrast(name: str, splits: dict[str, int], texts: Sequence[str]) -> None:
    """Refuse what nothing can be learnt from, and warn of what tells too little.

    ManifestError: there is nothing to choose or to judge by, or all captions are one text.
    """
    total = sum(splits.values())
    if missing := [split for split in SPLITS if not splits.get(split)]:
        raise ManifestError(
            f"{name}: {counted(total, 'picture')} in {', '.join(splits)} leave none for {' and '.join(missing)}; a"
            " model learns from train, is chosen by val and judged by test: give each pictures in a column 'split', or"
            " at least four different pictures without one"
        )
    if len(set(texts)) == 1:
        raise ManifestError(
            f"{name}: all {counted(len(texts), 'caption')} are '{texts[0]}', by which no picture can be told from"
            " another; write captions that say what is in each picture"
        )
    if total < ENOUGH:
        _log.warning(
            f"{name}: {counted(total, 'picture')}, {splits['test']:,} of them to judge by, can show that all works, and"
            f" not how good a model is or which is the best; take {ENOUGH} or more, better a few hundred."
        )


def read(source: Source, on_error: str) -> tuple[dict[str, int], int]:
    """Read the samples; return how many images each split has, and how many captions there are.

    Errors are those of `require_contrast` and of the data set.
    """
    if source.manifest is None:
        cache = FeatureCache.open(source.store)
        splits = {split: last - first for split, (first, last) in cache.splits.items()}
        require_contrast(source.name, splits, cache.caption_texts(0, cache.captions))
        return splits, cache.captions
    samples = read_samples(source.manifest, on_error == "skip", kept=partial(splits_at, source.store))
    splits = {split: last - first for split, (first, last) in samples.splits.items()}
    texts = [one.text for image in samples.images for one in image.captions]
    require_contrast(source.name, splits, texts)
    return splits, len(texts)


def encode(source: Source, splits: dict[str, int], encoder: str | None, **how: Any) -> None:
    """Fill the store; after the pictures of `val`, say how long the others take. `how` and errors as of `extract`."""
    if source.manifest is None:
        return
    try:
        options = build_options(encoder=encoder or ENCODER, **how)
        total = sum(splits[split] for split in SPLITS)
        if total > _SMALL:
            done = extract(source.manifest, source.store, replace(options, splits=("val",)))
            seconds = sum(one.seconds for one in done.sets if one.samples)
            if seconds:
                _log.info(f"about {in_time(seconds * (total / splits['val'] - 1))} for the other pictures")
        extract(source.manifest, source.store, options)
    except EncoderError as error:
        if encoder is not None:
            raise
        raise EncoderError(
            f"{str(error).rstrip('.')}; without a network give --encoder hf:DIR, a folder with the files"
            " of a CLIP or SigLIP model, or a store of `xret extract` with other encoders in the place of the pictures"
        ) from error


def require_different_pictures(cache: FeatureCache) -> None:
    """Raise ManifestError where all pictures are one file."""
    digests = {digest.tobytes() for digest in cache.known_digests()}
    if len(digests) == 1 and any(next(iter(digests))):
        raise ManifestError(
            f"{cache.dataset}: all {counted(cache.images, 'picture')} are the same file, which no caption can"
            " tell apart; take different ones"
        )


def choose_sets(cache: FeatureCache, features: str) -> Sets:
    """Return the image set and the caption set whose names begin as ``IMAGE,TEXT``; CacheError: none or several do."""
    image, _, text = features.partition(",")
    key = "--features IMAGE,TEXT"
    return cache.image_set(image.strip() or "auto", key), cache.caption_set(text.strip() or "auto", key)
