"""From a source to a feature set: match, then the tasks of an extraction, a shard each.

An import that was stopped goes on where it was, and one that is complete writes nothing. A source is looked through
and hashed each time, because its SHA-256 decides which set it belongs to.
"""

from dataclasses import replace

import numpy as np

from ...cache.facts import SetFacts
from ...cache.layout import choose_splits, image_set_to_fill, open_for_writing, require_place
from ...data.manifest import Manifest
from ...data.samples import Samples, read_samples
from ...extraction.filling import fill
from ...extraction.summary import Extraction
from .matching import match
from .source import Source, SourceError
from .tasks import ImportJob, ImportOptions, looked_through, write_imported_shard


def import_features(manifest: Manifest, url: str, options: ImportOptions) -> Extraction:
    """Write features that others extracted into the cache at `url`, as a set of kind ``roi``; no picture is opened.

    Raises:
        ManifestError: the data set cannot be read.
        SourceError: the source is not of its format, or lacks images, and `on_error` is ``fail``.
        SampleError: the features of an image are damaged, and `on_error` is ``fail``.
        OutputError: the store cannot be written.
        CacheError: the store holds something else, or a value does not fit the dtype.
    """
    samples = read_samples(manifest, options.on_error == "skip")
    splits = choose_splits(samples, options.splits)
    require_place(url, samples)
    options = replace(options, source=options.source.absolute())
    job = ImportJob(options, samples.dataset)
    with looked_through(job) as source:
        entries, matched_by, unmatched = _match(source, samples, splits, options)
        identity = {"encoder": options.format_, **source.identity}
        facts = SetFacts(options.format_, "roi", identity, options.dtype, source.channels, source.channels, {})
        with open_for_writing(url, samples, manifest.protocols) as cache:
            regions = int(source.counts[entries[entries >= 0]].max())
            features = image_set_to_fill(cache, facts, regions, extras=source.extras)
            job = replace(job, url=cache.address, set_name=features.name, writer=cache.store.writer)

            def job_of(shard: int) -> ImportJob:
                return replace(job, entries=tuple(entries[slice(*features.rows_in(shard))].tolist()))

            filled = fill(
                features, write_imported_shard, job_of, splits, workers=options.workers, scheduler=options.scheduler
            )
            counts = cache.images, cache.captions
            return Extraction(cache.dataset, cache.url, *counts, (filled,), matched_by=matched_by, unmatched=unmatched)


def _match(source: Source, samples: Samples, splits: list[str], options: ImportOptions) -> tuple[np.ndarray, str, int]:
    """Return the source's entry of each image, -1 where it has none, the kind of key, and how many entries are left."""
    rows, matched_by = match(source.ids, samples)
    _check_splits(source, rows, samples)
    entries = np.full(len(samples.images), -1, dtype=np.int64)
    found = np.flatnonzero(rows >= 0)[::-1]  # backwards, so that the first of equal ids is the one that stays
    entries[rows[found]] = found
    _check_missing(entries, splits, samples, options)
    if source.counts[entries[entries >= 0]].max() < 1:
        raise SourceError(f"{options.source}: no image of the data set has features that can be read in it")
    return entries, matched_by, int((rows < 0).sum())


def _check_splits(source: Source, rows: np.ndarray, samples: Samples) -> None:
    """Refuse ids that send most images of a file to another split: they are numbers of another kind."""
    if source.splits is None:
        return
    named = np.array(source.splits)
    for split in dict.fromkeys(source.splits):
        here = [samples.images[row].split for row in rows[(named == split) & (rows >= 0)]]
        # Karpathy's restval is training data of the peers, and 'other' here unless the manifest merges it.
        fitting = sum(found == split or (split, found) == ("train", "other") for found in here)
        if 2 * fitting < len(here):
            raise SourceError(
                f"only {fitting} of {len(here)} images of the source's {split} files are in split '{split}' of"
                f" '{samples.dataset}'; its ids count something else, or it is of another data set"
            )


def _check_missing(entries: np.ndarray, splits: list[str], samples: Samples, options: ImportOptions) -> None:
    missing: list[int] = []
    for split in splits:
        rows = range(*samples.splits[split])
        absent = [row for row in rows if entries[row] < 0]
        if len(absent) == len(rows):
            raise SourceError(f"{options.source} has no image of split '{split}'; choose others with --splits")
        missing += absent
    if missing and options.on_error == "fail":
        raise SourceError(
            f"{options.source} lacks {len(missing)} of the images of '{samples.dataset}', the first is"
            f" '{samples.images[missing[0]].file_name}'; --on-error skip records them as failed"
        )
