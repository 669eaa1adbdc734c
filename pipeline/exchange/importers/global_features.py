"""From embeddings that others computed to two feature sets of kind ``global``: match, then a task a shard.

Without a manifest the samples are what the source names; otherwise images are found by their names, and captions by
their image and text.
"""

import re
from dataclasses import replace
from shlex import quote

import numpy as np

from ...data.caption_files import Entry
from ...data.manifest import Manifest
from ...data.samples import Samples, build_samples, read_samples
from ...errors import CacheError, SampleError
from ...extraction.options import choose_splits
from ...extraction.summary import Extraction, SetSummary
from ...store import CaptionSet, FeatureCache, ImageSet
from ...store.create import SetFacts, caption_set, image_set
from ...store.store import open_for_writing, require_place
from .embeddings import Embeddings, Matrix, open_clip_retrieval, open_folder
from .importing import Failed, ImportOptions, fill
from .matching import match
from .source import SourceError

OPENERS = {"clip-retrieval": open_clip_retrieval, "embeddings": open_folder}


def import_embeddings(manifest: Manifest | None, url: str, options: ImportOptions) -> Extraction:
    """Write embeddings that others computed into the cache at `url`; no picture is opened.

    Args:
        manifest: the data set; None: the source's images and captions are one.
        url: local path or fsspec URL of the cache.
        options: how; `encoder` names one model, or that of the images and that of the captions.

    Raises:
        ManifestError: the data set cannot be read.
        SourceError: the source is not of its format, lacks images or captions, and `on_error` is ``fail``; or the store
            has other embeddings of that name.
        SampleError: an embedding holds NaN, and `on_error` is ``fail``.
        OutputError: the store cannot be written.
        CacheError: the store holds something else, or a value does not fit the dtype.
    """
    options = replace(options, source=options.source.absolute())
    encoders = _encoders(options)
    if not options.source.exists():
        raise SourceError(f"{options.source} is not there; give the folder of the embeddings as --source")
    found = OPENERS[options.format_](options.source)
    facts = _facts(found, options, encoders)
    samples = _own_samples(found, options) if manifest is None else read_samples(manifest, options.on_error == "skip")
    splits = choose_splits(samples, options.splits)
    require_place(url, samples)
    images, captions, matched_by, unmatched = _match(found, samples, splits, options, own=manifest is None)
    with open_for_writing(url, samples, ("full",) if manifest is None else manifest.protocols) as cache:
        for modality, of_side in facts.items():
            _require_same(cache, modality, of_side)
        sets: tuple[tuple[ImageSet | CaptionSet, Matrix, np.ndarray], ...] = (
            (image_set(cache, facts["images"], 0, sizes=False), found.images, images),
            (caption_set(cache, facts["captions"], None), found.captions, captions),
        )
        filled = [_filled(features, matrix, rows, splits, options) for features, matrix, rows in sets]
        counts = cache.images, cache.captions
        return Extraction(cache.dataset, cache.url, *counts, tuple(filled), matched_by=matched_by, unmatched=unmatched)


def _filled(
    features: ImageSet | CaptionSet, matrix: Matrix, rows: np.ndarray, splits: list[str], options: ImportOptions
) -> SetSummary:
    def read(arrays: dict[str, np.ndarray], wanted: np.ndarray, at: np.ndarray) -> Failed:
        return _read_rows(features, matrix, rows[wanted], arrays, wanted, at, options)

    return fill(features, read, splits, options)


def _read_rows(
    features: ImageSet | CaptionSet,
    matrix: Matrix,
    entries: np.ndarray,
    arrays: dict[str, np.ndarray],
    rows: np.ndarray,
    at: np.ndarray,
    options: ImportOptions,
) -> Failed:
    """Fill a chunk's arrays with these rows of a matrix, -1 where it has none.

    Raises:
        SourceError: a file was changed since the import began.
        SampleError: an embedding is missing or holds NaN, and failures are not skipped.
        CacheError: a value does not fit the set's dtype.
    """
    there = np.flatnonzero(entries >= 0)
    values = np.full((len(rows), matrix.width), np.nan, dtype=np.float32)
    values[there] = matrix.read(entries[there])
    finite = np.isfinite(values).all(axis=1)
    failed: Failed = {}
    names_of = features.cache.file_names if isinstance(features, ImageSet) else features.cache.caption_texts
    for number in np.flatnonzero(~finite).tolist():
        entry, row = int(entries[number]), int(rows[number])
        why = f"{matrix.place(entry)} holds NaN or infinity" if entry >= 0 else "the source lacks it"
        (name,) = names_of(row, row + 1)
        if options.on_error == "fail":
            raise SampleError(name, f"{why}; repair the source, or record such samples with --on-error skip")
        failed[row] = f"{name}: {why}"
    peak = float(np.abs(values[finite]).max(initial=0))
    if peak > float(np.finfo(features.dtype).max):
        raise CacheError(f"a value of {peak:.3g} is beyond {features.dtype}; import with --dtype float32")
    arrays["global"][at[finite]] = values[finite]
    return failed


def _encoders(options: ImportOptions) -> tuple[str, str]:
    """Return what the user calls the encoder of the images and that of the captions."""
    names = options.encoder
    if options.arrays:
        raise SourceError(f"--arrays names the arrays of an HDF5 file, but --from is {options.format_}; leave it out")
    if not 1 <= len(names) <= 2:
        raise SourceError(
            f"--from {options.format_} needs the name of the model that made the embeddings, as --encoder ViT-B/32, or"
            " --encoder IMAGES,CAPTIONS of two models"
        )
    for name in names:
        if not _short(name):
            raise SourceError(
                f"--encoder '{name}' cannot name a feature set; use letters from a to z, digits, '.', '_', '-'"
            )
    return names[0], names[-1]


def _short(name: str) -> str:
    """Return a name as that of a feature set begins."""
    return re.sub(r"[^a-z0-9_.]+", "-", name.lower()).strip("-.")


def _facts(found: Embeddings, options: ImportOptions, encoders: tuple[str, str]) -> dict[str, SetFacts]:
    matrices = {"images": found.images, "captions": found.captions}
    one = len(options.encoder) == 1
    if one and found.images.width != found.captions.width:
        raise SourceError(
            f"{options.source}: the images' embeddings are {found.images.width} wide and the captions'"
            f" {found.captions.width}, which are not of one model; name both with --encoder IMAGES,CAPTIONS"
        )
    facts = {}
    for (modality, matrix), encoder in zip(matrices.items(), encoders, strict=True):
        files = {**found.digests[modality], **found.digests["index"]}
        identity = {"encoder": encoder, "imported": options.format_, "files": dict(sorted(files.items()))}
        space = encoder if one else None
        facts[modality] = SetFacts(_short(encoder), "global", identity, options.dtype, None, matrix.width, space=space)
    return facts


def _require_same(cache: FeatureCache, modality: str, facts: SetFacts) -> None:
    """Refuse a name under which the store has features from elsewhere."""
    for name in cache.set_names(modality):
        features = cache.set_at(f"{modality}/{name}")
        if features.attributes["encoder"] == facts.encoder and features.identity != facts.identity:
            raise SourceError(
                f"{cache.url} has '{name}' of other {modality} than these; name this model otherwise with --encoder, or"
                f" remove that set with `xret cache rm {quote(cache.url)} {modality}/{name}`"
            )


def _own_samples(found: Embeddings, options: ImportOptions) -> Samples:
    """Return the source's images and captions as a data set; captions are numbered by their rows."""
    entries = [Entry(name, split, []) for name, split in zip(found.names, found.splits, strict=True)]
    for row, (owner, text) in enumerate(zip(found.owners.tolist(), found.texts, strict=True)):
        entries[owner].captions.append((text, row))
    source = options.source
    return build_samples(entries, Manifest(options.format_, images=source, captions=source, path=source))


def _match(
    found: Embeddings, samples: Samples, splits: list[str], options: ImportOptions, *, own: bool
) -> tuple[np.ndarray, np.ndarray, str | None, int]:
    """Return the rows of images and captions, -1 where there is none, by what they matched, and how many are left.

    The source's own samples are matched by nothing.
    """
    if own:
        entries = {name: number for number, name in enumerate(found.names)}
        images = np.array([entries[image.file_name] for image in samples.images], dtype=np.int64)
        captions = [caption.sentid for image in samples.images for caption in image.captions]
        return found.image_rows[images], np.array(captions, dtype=np.int64), None, 0
    rows, matched_by = match(found.names, samples)
    known = {
        (int(rows[owner]), text.strip()): row
        for row, (owner, text) in enumerate(zip(found.owners.tolist(), found.texts, strict=True))
    }
    images = np.full(len(samples.images), -1, dtype=np.int64)
    images[rows[rows >= 0]] = found.image_rows[rows >= 0]
    captions = [
        known.get((number, caption.text.strip()), -1)
        for number, image in enumerate(samples.images)
        for caption in image.captions
    ]
    _check_missing(images, captions, splits, samples, options)
    return images, np.array(captions, dtype=np.int64), matched_by, int((rows < 0).sum())


def _check_missing(
    images: np.ndarray, captions: list[int], splits: list[str], samples: Samples, options: ImportOptions
) -> None:
    """Refuse a source that has nothing of a split, or unless failures are skipped, not all of it."""
    texts = [caption.text for image in samples.images for caption in image.captions]
    ends = np.cumsum([0, *(len(image.captions) for image in samples.images)])
    lacking: dict[str, list[str]] = {"images": [], "captions": []}
    for split in splits:
        first, last = samples.splits[split]
        of_captions = range(int(ends[first]), int(ends[last]))
        absent = [samples.images[row].file_name for row in range(first, last) if images[row] < 0]
        silent = [texts[row] for row in of_captions if captions[row] < 0]
        if len(absent) == last - first or len(silent) == len(of_captions):
            what = "image" if len(absent) == last - first else "caption"
            raise SourceError(f"{options.source} has no {what} of split '{split}'; choose others with --splits")
        lacking["images"] += absent
        lacking["captions"] += silent
    for what, names in lacking.items():
        if names and options.on_error == "fail":
            raise SourceError(
                f"{options.source} lacks {len(names):,} of the {what} of '{samples.dataset}', the first is"
                f" '{names[0]}'; --on-error skip records them as failed"
            )
