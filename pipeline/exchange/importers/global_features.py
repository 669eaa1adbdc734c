"""From embeddings that others computed to two feature sets of kind ``global``: match, then a task a shard.

Without a manifest the samples are what the source names; otherwise images are found by their names, and captions by
their image and text.
"""

import re
import time
from dataclasses import dataclass, replace
from shlex import quote
from typing import Any

import numpy as np

from ...cache import FAILED, OK, Blocks, CaptionSet, FeatureCache, ImageSet
from ...cache.facts import SetFacts
from ...cache.layout import caption_set_to_fill, choose_splits, image_set_to_fill, open_for_writing, require_place
from ...data.caption_files import Entry
from ...data.manifest import Manifest
from ...data.samples import Samples, build_samples, read_samples
from ...errors import CacheError, SampleError
from ...extraction.filling import fill
from ...extraction.shards import Receipt, tell, write_shard
from ...extraction.summary import Extraction, SetSummary
from .clip_retrieval import open_clip_retrieval
from .embeddings import Embeddings, Matrix, open_folder
from .matching import match
from .source import SourceError
from .tasks import ImportOptions

OPENERS = {"clip-retrieval": open_clip_retrieval, "embeddings": open_folder}


@dataclass(frozen=True)
class RowsJob:
    """What the task of a shard is told."""

    url: str  # the cache
    path: str  # of the feature set, ``images/NAME`` or ``captions/NAME``
    matrix: Matrix
    rows: tuple[int, ...]  # the row of each sample of the shard; -1 for one that the source lacks
    skips: bool  # whether a sample without good features is recorded, and the others are written
    writer: str | None  # on an object store, whose lease it is to write under


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
    require_place(url, samples, updates=manifest is not None)
    images, captions, matched_by, unmatched = _match(found, samples, splits, options, own=manifest is None)
    with open_for_writing(url, samples, ("full",) if manifest is None else manifest.protocols) as cache:
        for modality, of_side in facts.items():
            _require_same(cache, modality, of_side)
        sets: tuple[tuple[ImageSet | CaptionSet, Matrix, np.ndarray], ...] = (
            (image_set_to_fill(cache, facts["images"], 0), found.images, images),
            (caption_set_to_fill(cache, facts["captions"], None, _nothing_counted), found.captions, captions),
        )
        filled = [_filled(features, matrix, rows, splits, options) for features, matrix, rows in sets]
        counts = cache.images, cache.captions
        return Extraction(cache.dataset, cache.url, *counts, tuple(filled), matched_by=matched_by, unmatched=unmatched)


def _filled(
    features: ImageSet | CaptionSet, matrix: Matrix, rows: np.ndarray, splits: list[str], options: ImportOptions
) -> SetSummary:
    cache, skips = features.cache, options.on_error == "skip"
    job = RowsJob(cache.address, features.path, matrix, (), skips, cache.store.writer)

    def job_of(shard: int) -> RowsJob:
        return replace(job, rows=tuple(rows[slice(*features.rows_in(shard))].tolist()))

    return fill(features, write_rows, job_of, splits, workers=options.workers, scheduler=options.scheduler)


def write_rows(job: RowsJob, shard: int) -> Receipt:
    """Read the embeddings of one shard and write it.

    Raises:
        SourceError: a file was changed since the import began.
        SampleError: an embedding is missing or holds NaN, and the job does not skip.
        CacheError: a value does not fit the set's dtype.
    """
    features = FeatureCache.open(job.url, job.writer).set_at(job.path)
    began, rows = time.perf_counter(), np.array(job.rows, dtype=np.int64)
    receipt = Receipt(shard, len(rows))
    arrays = features.blank_shard()
    there = np.flatnonzero(rows >= 0)
    values = np.full((len(rows), job.matrix.width), np.nan)
    values[there] = job.matrix.read(rows[there])
    finite = np.isfinite(values).all(axis=1)
    if not finite.all():
        names = _names(features, shard)
        for at in np.flatnonzero(~finite).tolist():
            why = f"{job.matrix.place(job.rows[at])} holds NaN or infinity" if rows[at] >= 0 else "the source lacks it"
            key, name = names[at]
            if not job.skips:
                raise SampleError(name, f"{why}; repair the source, or record such samples with --on-error skip")
            receipt.fail(key, f"{name}: {why}")
    peak = float(np.abs(values[finite]).max(initial=0))
    if peak > float(np.finfo(features.dtype).max):
        raise CacheError(f"a value of {peak:.3g} is beyond {features.dtype}; import with --dtype float32")
    arrays["global"][: len(rows)][finite] = values[finite]
    arrays["status"][: len(rows)] = np.where(finite, OK, FAILED)
    tell(job.url, features.name, len(rows))
    receipt.timed("read", began)
    write_shard(features, shard, arrays, receipt)
    return receipt


def _names(features: ImageSet | CaptionSet, shard: int) -> list[tuple[str, str]]:
    """Return of each sample of a shard the id of its image, and the image's file name, or the caption's text."""
    cache, (first, last) = features.cache, features.blocks.images(shard)
    ids = cache.ids(first, last)
    if isinstance(features, ImageSet):
        return list(zip(ids, cache.file_names(first, last), strict=True))
    rows = features.rows_in(shard)
    owners = cache.caption_image[slice(*rows)] - first
    return [(ids[owner], text) for owner, text in zip(owners.tolist(), cache.caption_texts(*rows), strict=True)]


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
        facts[modality] = SetFacts(
            _short(encoder), "global", identity, options.dtype, None, matrix.width, {}, space=space
        )
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


def _nothing_counted(_: Blocks) -> tuple[list[int], dict[str, Any]]:
    return [], {}
