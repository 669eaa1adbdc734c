"""From a source to a feature set: match, then write chunk after chunk.

An import that was stopped resumes, and one that is complete writes nothing. A source is looked through and hashed each
time, because its SHA-256 decides which set it belongs to.
"""

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from ...data.manifest import Manifest
from ...data.regions import REGION_ARRAYS, Regions, lay_out
from ...data.samples import Samples, read_samples
from ...errors import CacheError, SampleError
from ...extraction.extraction import require_some
from ...extraction.options import DEFAULT_SPLITS, choose_splits
from ...extraction.summary import Extraction, SetSummary
from ...progress import Progress
from ...store import FAILED, NOT_DONE, OK, CaptionSet, ImageSet
from ...store.create import SetFacts, image_set, require_dtype
from ...store.inspect import broken_chunks
from ...store.store import open_for_writing, require_place
from ...wording import printable
from . import open_source
from .matching import match
from .source import Source, SourceError, shown

_KINDS = {"f": "floats", "iu": "whole numbers", "fiu": "numbers"}  # of NumPy's dtypes
Failed = dict[int, str]  # by row of the store, what is wrong


@dataclass(frozen=True)
class ImportOptions:
    """How to import; the command line's options, with its defaults."""

    format_: str  # one of `FORMATS` or `EMBEDDINGS`
    source: Path  # file or folder of the features
    arrays: Mapping[str, str] = field(default_factory=dict)  # for ``hdf5``, the name in the file of each role
    dtype: str = "float16"  # ``float16`` or ``float32``
    splits: tuple[str, ...] = DEFAULT_SPLITS  # which splits to write now
    on_error: str = "fail"  # ``fail`` or ``skip``
    repair: bool = False  # write chunks again that are damaged or hold samples that failed
    encoder: tuple[str, ...] = ()  # of `EMBEDDINGS`, the model that made them, or that of images and that of captions

    def __post_init__(self) -> None:
        require_dtype(self.dtype)
        if self.on_error not in ("fail", "skip"):
            raise CacheError(f"on_error is '{self.on_error}'; give fail or skip")


def import_features(manifest: Manifest, url: str, options: ImportOptions) -> Extraction:
    """Write features that others extracted into the store at `url`, as a set of kind ``roi``; no picture is opened.

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
    source = open_source(options.format_, options.source.absolute(), samples.dataset, options.arrays)
    entries, matched_by, unmatched = _match(source, samples, splits, options)
    identity = {"encoder": options.format_, **source.identity}
    facts = SetFacts(options.format_, "roi", identity, options.dtype, source.channels, source.channels)
    with open_for_writing(url, samples, manifest.protocols) as cache:
        regions = int(source.counts[entries[entries >= 0]].max())
        features = image_set(cache, facts, regions, extras=source.extras)

        def read(arrays: dict[str, np.ndarray], rows: np.ndarray, at: np.ndarray) -> Failed:
            return _read_regions(source, entries[rows], features, arrays, rows, at, options)

        filled = fill(features, read, splits, options)
        counts = cache.images, cache.captions
        return Extraction(cache.dataset, cache.url, *counts, (filled,), matched_by=matched_by, unmatched=unmatched)


def fill(
    features: ImageSet | CaptionSet,
    read: Callable[[dict[str, np.ndarray], np.ndarray, np.ndarray], Failed],
    splits: list[str],
    options: ImportOptions,
) -> SetSummary:
    """Write the chunks of these splits that are missing.

    Args:
        features: the set.
        read: fills a chunk's arrays with the samples of these rows of the store, at these places of the chunk, and
            returns what is wrong with those that cannot be read.
        splits: which; the samples of others stay undone.
        options: of the import.
    """
    wanted = {chunk for split in splits for chunk in features.chunks_of(split)}
    if options.repair:
        for chunk in wanted.intersection(broken_chunks(features)):
            features.forget(chunk)
        features = features.reopened()
    missing = features.missing(splits)
    of_splits = np.zeros(features.samples, dtype=bool)
    for split in splits:
        of_splits[features.rows_of(split)] = True
    samples, began, seconds = 0, time.monotonic(), {"read": 0.0, "encode": 0.0, "write": 0.0}
    total = sum(last - first for first, last in map(features.rows_in, missing))
    with Progress(printable(features.name), total, features.modality) as progress:
        for chunk in missing:
            first, last = features.rows_in(chunk)
            arrays = features.begun(chunk)
            at = np.flatnonzero((arrays["status"] == NOT_DONE) & of_splits[first:last])
            started = time.monotonic()
            failed = read(arrays, first + at, at)
            seconds["read"] += time.monotonic() - started
            arrays["status"][at] = OK
            places = [row - first for row in failed]
            arrays["status"][places] = FAILED
            if "length" in arrays:
                arrays["length"][places] = 0
            started = time.monotonic()
            features.write(chunk, arrays, failed)
            seconds["write"] += time.monotonic() - started
            samples += len(at) - len(failed)
            progress.update(last - first)
    filled = features.reopened()
    require_some(filled, splits)
    return SetSummary(
        name=features.name,
        samples=samples,
        chunks=len(missing),
        chunks_before=len(wanted) - len(missing),
        failed=int((filled.status == FAILED).sum()),
        reasons=tuple(reason for _, reason in filled.failures),
        seconds=time.monotonic() - began,
        shares=seconds,
    )


def _read_regions(
    source: Source,
    entries: np.ndarray,
    features: ImageSet,
    arrays: dict[str, np.ndarray],
    rows: np.ndarray,
    at: np.ndarray,
    options: ImportOptions,
) -> Failed:
    """Fill a chunk's arrays with the regions of these entries."""
    failed: Failed = {}
    first = int(rows[0] - at[0])
    names = features.cache.file_names(first, first + len(arrays["status"]))
    for number in np.argsort(entries, kind="stable").tolist():  # in the source's order: a disk likes that
        place = int(at[number])
        try:
            regions = _read(source, int(entries[number]), features, names[place])
        except SampleError as error:
            if options.on_error == "fail":
                advice = "repair the source, or record such images with --on-error skip"
                raise SampleError(names[place], f"{error.reason}; {advice}") from error
            failed[int(rows[number])] = f"{names[place]}: {error.reason}"
            continue
        lay_out(arrays, place, regions)
        arrays["size"][place] = regions.size
    return failed


def _read(source: Source, entry: int, features: ImageSet, name: str) -> Regions:
    """Return the regions of an entry if they fit the set; refuse them otherwise."""
    if entry < 0:
        raise SampleError(name, "the source has no features of it")
    regions = source.read(entry)
    local = regions.local
    if local.ndim != 2 or local.shape[1] != source.channels or not 1 <= len(local) <= features.rows:
        found = " x ".join(map(str, local.shape))
        expected = f"1 to {features.rows} regions x {source.channels} channels"
        raise SampleError(name, f"its features are {found}, not {expected}")
    shapes: dict[str, tuple[int, ...]] = {key: (len(local), *REGION_ARRAYS[key][0]) for key in source.extras}
    for key, shape in {"local": local.shape, **shapes}.items():
        values, kinds = getattr(regions, key), {"local": "f", "classes": "iu"}.get(key, "fiu")
        if values is None or values.shape != shape or values.dtype.kind not in kinds:
            found = "missing" if values is None else shown(values)
            expected = f"{' x '.join(map(str, shape))} {_KINDS[kinds]}"
            raise SampleError(name, f"its {key} are {found}, not {expected}")
        if not np.isfinite(values).all():
            raise SampleError(name, f"its {key} hold NaN or infinity")
        if key != "local":
            kept = np.dtype(REGION_ARRAYS[key][1])
            largest = np.iinfo(kept).max if kept.kind == "i" else np.finfo(kept).max
            if ((values > largest) | (values < -largest)).any():
                raise SampleError(name, f"its {key} hold values beyond {kept}")
    if not all(0 <= side < 2**31 for side in regions.size):
        raise SampleError(name, f"its size is {regions.size[0]:.3g} x {regions.size[1]:.3g} pixels")
    peak = float(np.abs(local).max())
    if peak > float(np.finfo(features.dtype).max):
        raise CacheError(f"'{name}': a value of {peak:.3g} is beyond {features.dtype}; import with --dtype float32")
    return regions


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
