"""From a source to a feature set: match, then shard by shard read, check and write, then the mark.

The rules are those of an extraction: a shard is written whole and once, and marked as done behind that, so that an
import that was stopped goes on where it was, and one that is complete computes nothing. A source is looked through
and hashed each time, because its SHA-256 decides which set it belongs to.
"""

import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from ...cache import FAILED, Blocks, FeatureCache, ImageSet
from ...cache.layout import (
    DEFAULT_SPLITS,
    SetFacts,
    choose_splits,
    create_image_set,
    find_set,
    open_for_writing,
    record_failures,
    require_place,
)
from ...data.manifest import Manifest
from ...data.regions import REGION_ARRAYS, Regions, lay_out, shard_arrays
from ...data.samples import Samples, read_samples
from ...errors import CacheError, SampleError
from ...progress import Progress
from . import open_source
from .matching import match
from .source import Source, SourceError

_KINDS = {"f": "floats", "iu": "whole numbers", "fiu": "numbers"}  # of NumPy's dtypes


@dataclass(frozen=True)
class ImportOptions:
    """How to import; the command line's options, with its defaults.

    Attributes:
        format_: one of `FORMATS`.
        source: file or folder of the features.
        arrays: for ``hdf5``, the name in the file of each role.
        dtype: ``float16`` or ``float32``.
        splits: which splits to write now.
        on_error: ``fail`` or ``skip``.
    """

    format_: str
    source: Path
    arrays: Mapping[str, str] = field(default_factory=dict)
    dtype: str = "float16"
    splits: tuple[str, ...] = DEFAULT_SPLITS
    on_error: str = "fail"


def import_features(manifest: Manifest, url: str, options: ImportOptions) -> dict[str, Any]:
    """Write features that others extracted into the cache at `url`, as a set of kind ``roi``.

    Args:
        manifest: the data set; its pictures are not opened.
        url: local path or fsspec URL of the cache.
        options: from where, and how.

    Returns:
        data set, store, images, captions; ``matched_by``, which key of the images the source's ids were;
        ``unmatched``, how many images of the source are not in the data set; ``sets``, a mapping of name, samples
        (without those that failed) and shards written now, shards before, failed, the reasons, seconds and rate.

    Raises:
        ManifestError: the data set cannot be read.
        SourceError: the source is not of its format, or lacks images, and `on_error` is ``fail``.
        SampleError: the features of an image are damaged, and `on_error` is ``fail``.
        OutputError: the store cannot be written.
        CacheError: the store holds something else, or a value does not fit the dtype.
    """
    samples = read_samples(manifest)
    splits = choose_splits(samples, options.splits)
    require_place(url, samples)
    source = open_source(options.format_, options.source, samples.dataset, options.arrays)
    rows, matched_by = match(source.ids, samples)
    _check_splits(source, rows, samples)
    entries = np.full(len(samples.images), -1, dtype=np.int64)
    found = np.flatnonzero(rows >= 0)[::-1]  # backwards, so that the first of equal ids is the one that stays
    entries[rows[found]] = found
    _check_missing(entries, splits, samples, options)
    if source.counts[entries[entries >= 0]].max() < 1:
        raise SourceError(f"{options.source}: no image of the data set has features that can be read in it")
    with open_for_writing(url, samples, manifest.protocols) as cache:
        features = _image_set(cache, source, entries, options)
        return {
            "dataset": samples.dataset,
            "store": str(url),
            "images": cache.images,
            "captions": cache.captions,
            "matched_by": matched_by,
            "unmatched": int((rows < 0).sum()),
            "sets": [_fill(features, source, entries, splits, skip=options.on_error == "skip")],
        }


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
        first, last = samples.splits[split]
        absent = [row for row in range(first, last) if entries[row] < 0]
        if len(absent) == last - first:
            raise SourceError(f"{options.source} has no image of split '{split}'; choose others with --splits")
        missing += absent
    if missing and options.on_error == "fail":
        raise SourceError(
            f"{options.source} lacks {len(missing)} of the images of '{samples.dataset}', the first is"
            f" '{samples.images[missing[0]].file_name}'; --on-error skip records them as failed"
        )


def _image_set(cache: FeatureCache, source: Source, entries: np.ndarray, options: ImportOptions) -> ImageSet:
    identity = {"encoder": options.format_, **source.identity}
    width = source.channels
    facts = SetFacts(options.format_, "roi", identity, options.dtype, width, width, {})
    if find_set(cache, "images", facts.name) is None:
        regions = int(source.counts[entries[entries >= 0]].max())
        create_image_set(cache, facts, regions, Blocks.choose(cache.splits), source.extras)
    return cache.image_set(facts.name)


def _fill(features: ImageSet, source: Source, entries: np.ndarray, splits: list[str], *, skip: bool) -> dict[str, Any]:
    """Write the shards of these splits that are not done; return what was done."""
    wanted = [shard for split in splits for shard in features.blocks.of_split(split)]
    done = features.done()
    missing = [shard for shard in wanted if not done[shard]]
    total, left = (sum(features.samples_in(shard) for shard in shards) for shards in (wanted, missing))
    marks = features.cache.store.open_array(f"{features.path}/done", writable=True)
    began, samples = time.monotonic(), left
    with Progress(features.name, total, "images", done=total - left) as progress:
        for shard in missing:
            arrays, failed = _read_shard(features, source, entries, shard, skip)
            samples -= len(failed)
            _write_shard(features, arrays, shard)
            record_failures(features, features.cache.ids(*features.blocks.images(shard)), failed)
            marks[shard] = 1
            progress.update(features.samples_in(shard))
    seconds = time.monotonic() - began
    filled = ImageSet(features.cache, features.name)
    for split in splits:
        if (filled.status[features.rows_of(split)] == FAILED).all():
            url = features.cache.url
            raise CacheError(f"no image of split '{split}' could be read; `xret cache verify {url}` lists the reasons")
    return {
        "name": features.name,
        "samples": samples,
        "shards": len(missing),
        "shards_before": len(wanted) - len(missing),
        "failed": int((filled.status == FAILED).sum()),
        "reasons": list(filled.failed.values()),
        "seconds": seconds,
        "per_second": samples / max(seconds, 1e-9),
    }


def _read_shard(
    features: ImageSet, source: Source, entries: np.ndarray, shard: int, skip: bool
) -> tuple[dict[str, np.ndarray], dict[str, str]]:
    """Return the arrays of one shard, and {id: reason} of the images in it that failed."""
    first, last = features.blocks.images(shard)
    names, ids = features.cache.file_names(first, last), features.cache.ids(first, last)
    arrays = shard_arrays(
        features.blocks.length, features.rows, source.channels, source.channels, features.dtype, source.extras
    )
    failed = {}
    for row in np.argsort(entries[first:last], kind="stable").tolist():  # in the source's order: a disk likes that
        entry = int(entries[first + row])
        try:
            if entry < 0:
                raise SampleError(names[row], "the source has no features of it")
            lay_out(arrays, row, _checked(source.read(entry), features, source, names[row]))
        except SampleError as error:
            if not skip:
                advice = "mend the source, or record such images with --on-error skip"
                raise SampleError(names[row], f"{error.reason}; {advice}") from error
            failed[ids[row]] = f"{names[row]}: {error.reason}"
            arrays["status"][row] = FAILED
    return arrays, failed


def _checked(regions: Regions, features: ImageSet, source: Source, name: str) -> Regions:
    """Return the regions if they fit the set; refuse them otherwise."""
    local = regions.local
    if local.ndim != 2 or local.shape[1] != source.channels or not 1 <= len(local) <= features.rows:
        found = " x ".join(map(str, local.shape))
        expected = f"1 to {features.rows} regions x {source.channels} channels"
        raise SampleError(name, f"its features are {found}, not {expected}")
    shapes: dict[str, tuple[int, ...]] = {key: (len(local), *REGION_ARRAYS[key][0]) for key in source.extras}
    for key, shape in {"local": local.shape, **shapes}.items():
        values, kinds = getattr(regions, key), {"local": "f", "classes": "iu"}.get(key, "fiu")
        if values is None or values.shape != shape or values.dtype.kind not in kinds:
            found = "missing" if values is None else f"{values.dtype} {' x '.join(map(str, values.shape))}"
            expected = f"{' x '.join(map(str, shape))} {_KINDS[kinds]}"
            raise SampleError(name, f"its {key} are {found}, not {expected}")
        if not np.isfinite(values).all():
            raise SampleError(name, f"its {key} hold NaN or infinity")
    peak = float(np.abs(local).max())
    if peak > float(np.finfo(features.dtype).max):
        raise CacheError(f"'{name}': a value of {peak:.3g} is beyond {features.dtype}; import with --dtype float32")
    return regions


def _write_shard(features: ImageSet, arrays: dict[str, np.ndarray], shard: int) -> None:
    for name, values in arrays.items():
        features.cache.store.write_shard(f"{features.path}/{name}", shard, values)
