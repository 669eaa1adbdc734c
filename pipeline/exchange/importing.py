"""From a source to feature sets: match, then write chunk after chunk; no picture is opened.

An import that was stopped resumes, and one that is complete writes nothing. A source is looked through and hashed each
time, because its SHA-256 decides which set it belongs to.
"""

import logging
import re
import time
from collections.abc import Mapping, Sequence
from functools import partial
from pkgutil import resolve_name

import numpy as np

from ..data.image_columns import Caption, ImageSample, read_rows
from ..data.manifest import Manifest
from ..data.samples import Kept, Samples, build_samples, read_samples
from ..errors import SampleError
from ..extraction.extraction import summary_of
from ..extraction.options import choose_splits
from ..extraction.summary import Extraction, SetSummary
from ..progress import Progress
from ..store import FAILED, OK, CaptionSet, ImageSet
from ..store.create import SetFacts, caption_set, image_set
from ..store.inspect import damaged_chunks
from ..store.leaks import find_leaks
from ..store.store import may_be_store, open_for_writing, splits_at
from ..wording import counted, printable, some_of
from . import FORMATS
from .importers.source import Imported, ImportOptions, SourceError, Table
from .matching import match, match_own

log = logging.getLogger("xret")


def import_features(manifest: Manifest | None, url: str, options: ImportOptions) -> Extraction:
    """Write features that others extracted into the store at `url`, a local path or fsspec URL.

    Regions of images become a set of kind ``roi``, frames of videos one of kind ``frames``; embeddings of images and
    captions two of kind ``global``, whose images and captions are the data set if `manifest` is None.

    Raises:
        ManifestError: the data set cannot be read.
        SourceError: the source is not of its format, or lacks images or captions, and `on_error` is ``fail``.
        SampleError: the features of a sample are damaged, and `on_error` is ``fail``.
        OutputError, CacheError: the store cannot be written, holds something else, or a value does not fit the dtype.
    """
    encoders = _encoders(options, manifest)
    may_be_store(url)  # before the source is read
    source = _open_source(options, encoders)
    kept = partial(splits_at, url)
    if manifest is None:
        samples, matched_by, unmatched = _own_samples(source, options, kept), None, 0
        entries = match_own(source, samples)
    else:
        samples = read_samples(manifest, options.on_error == "skip", kept)
        entries, matched_by, unmatched = match(source, samples)
    splits = choose_splits(samples, options.splits)
    _require_all(entries, splits, samples, options)
    with open_for_writing(url, samples, None if manifest is None else manifest.protocols) as cache:
        filled = []
        for (modality, table), encoder in zip(source.tables.items(), (encoders[0], encoders[-1]), strict=False):
            facts = _facts(table, encoder, options, one_model=len(encoders) < len(source.tables))
            features = image_set(cache, facts) if modality == "images" else caption_set(cache, facts, None)
            filled.append(_fill(features, table, entries[modality], splits, options))
        counts, leaks = (cache.images, cache.captions), find_leaks(cache)
        return Extraction(
            cache.dataset, cache.url, *counts, tuple(filled), {}, leaks, matched_by=matched_by, unmatched=unmatched
        )


def _encoders(options: ImportOptions, manifest: Manifest | None) -> tuple[str, ...]:
    """Return the names of the models that made the features: one, or one of the images and one of the captions."""
    pairs = FORMATS[options.format_].pairs
    if manifest is None and not pairs:
        raise SourceError(f"--from {options.format_} needs the data set: name a manifest as DATASET")
    encoders = options.encoder or (() if pairs else (options.format_,))
    if not 1 <= len(encoders) <= 1 + pairs:
        raise SourceError(
            f"--from {options.format_} needs the name of the model that made the features, as --encoder ViT-B/32; of"
            " embeddings by two models --encoder IMAGES,CAPTIONS"
        )
    for name in encoders:
        if not _short(name):
            raise SourceError(
                f"--encoder '{name}' cannot name a feature set; use letters from a to z, digits, '.', '_', '-'"
            )
    return encoders


def _open_source(options: ImportOptions, encoders: Sequence[str]) -> Imported:
    """Return what the source holds, with notes of what may be wrong with it."""
    path, format_ = options.source.absolute(), FORMATS[options.format_]
    if not path.exists():
        raise SourceError(f"{path} is not there; give the file or folder of the features as --source")
    if options.arrays and not format_.takes_arrays:
        raise SourceError(f"--arrays names the arrays of an HDF5 file, but --from is {options.format_}; leave it out")
    opened = resolve_name(f"{__package__}.importers.{format_.where}")(path, options)
    source = opened if isinstance(opened, Imported) else Imported(opened)
    if source.left_out:
        log.warning("%s left out: %s.", counted(len(source.left_out), "row"), "; ".join(some_of(list(source.left_out))))
    images = source.images
    if images.rows > images.channels:
        log.warning("an image has %d rows of %d numbers; if these are columns, transpose", images.rows, images.channels)
    if options.kind == "frames" and (format_.pairs or images.extras):
        found = "embeddings have no rows" if format_.pairs else f"these have {', '.join(images.extras)}, as regions do"
        raise SourceError(f"--kind frames is for features of a video's frames, and {found}; leave it out")
    widths = [table.channels for table in source.tables.values()]
    if len(encoders) < len(widths) and widths[0] != widths[1]:
        raise SourceError(
            f"{options.source}: the images' embeddings are {widths[0]} wide and the captions' {widths[1]}, which are"
            " not of one model; name both with --encoder IMAGES,CAPTIONS"
        )
    return source


def _short(encoder: str) -> str:
    """Return a model's name as that of a feature set begins."""
    return re.sub(r"[^a-z0-9_.]+", "-", encoder.lower()).strip("-.")


def _facts(table: Table, encoder: str, options: ImportOptions, *, one_model: bool) -> SetFacts:
    """Return what is known of a table's set; embeddings of images and captions by `one_model` compare."""
    identity = {"encoder": encoder, "imported": options.format_, **table.identity}
    if options.kind == "frames":
        identity["kind"] = options.kind  # another set than the same rows as regions
    return SetFacts(
        _short(encoder),
        options.kind if table.rows else "global",
        identity,
        options.dtype,
        table.channels if table.rows else None,
        table.channels,
        space=encoder if one_model else None,
        rows=table.rows,
        arrays=("size", *table.extras) if table.rows else (),
    )


def _own_samples(source: Imported, options: ImportOptions, kept: Kept) -> Samples:
    """Return the source's images and captions as a data set; captions are numbered by their entries."""
    assert source.captions is not None
    pairs = enumerate(zip(source.owners, source.captions.keys, source.captions.splits, strict=True))
    rows = (
        (f"{options.source}: pair {row:,}", ImageSample(None, name, split or None, -1, [Caption(text, row)]))
        for row, (name, text, split) in pairs
    )
    place = options.source.absolute()
    return build_samples(
        read_rows(rows, lambda *_: False),
        Manifest(options.format_, images=place, captions=place, path=place),
        left_out=source.left_out,
        kept=kept,
    )


def _require_all(
    entries: Mapping[str, np.ndarray], splits: Sequence[str], samples: Samples, options: ImportOptions
) -> None:
    """Refuse a source that has nothing of a split or, unless failures are skipped, not all of it."""
    for modality, of_modality in entries.items():
        for split in splits:
            first, last = begin, end = samples.splits[split]
            if modality == "captions":
                begin, end = samples.images.edges[[first, last]].tolist()
            lost, total = np.flatnonzero(of_modality[begin:end] < 0), end - begin
            if len(lost) == total or (len(lost) and options.on_error == "fail"):
                if modality == "captions":
                    lost = np.repeat(np.arange(last - first), np.diff(samples.images.edges[first : last + 1]))[lost]
                skip = "--on-error skip records them as failed" if len(lost) < total else "choose others with --splits"
                raise SourceError(
                    f"{options.source} lacks {len(lost):,} of {total:,} {modality} of split '{split}' of"
                    f" '{samples.dataset}', the first of '{samples.images[first + int(lost[0])].file_name}'; {skip}"
                )


def _fill(
    features: ImageSet | CaptionSet, table: Table, entries: np.ndarray, splits: Sequence[str], options: ImportOptions
) -> SetSummary:
    """Write the chunks of these splits that are missing; samples of other splits stay undone.

    `entries` of the table by sample, -1 for one that the source lacks.
    """
    wanted = {chunk for split in splits for chunk in features.chunks_of(split)}
    if options.repair:
        features = features.forget(*wanted.intersection(damaged_chunks(features)))
        features.retry(splits)
    missing = features.missing(splits)
    left = sum(len(features.rows_left(splits, chunk=chunk)) for chunk in missing)
    samples, began, seconds = 0, time.monotonic(), {"read": 0.0, "encode": 0.0, "write": 0.0}
    with Progress(printable(features.name), left, features.modality) as progress:
        for chunk in missing:
            started = time.monotonic()
            first, last = features.rows_in(chunk)
            arrays = features.read_chunk(chunk)
            rows = features.rows_left(splits, chunk=chunk)
            at, own = rows - first, entries[rows]
            faults = dict.fromkeys(at[own < 0].tolist(), "the source has no features of it")
            faults |= table.put(arrays, at[own >= 0], own[own >= 0])
            failed = _failed(features, first, last, faults, options)
            arrays["status"][at], arrays["status"][list(faults)] = OK, FAILED
            if "length" in arrays:
                arrays["length"][list(faults)] = 0
            read = time.monotonic()
            features.write(chunk, arrays, failed)
            seconds["read"] += read - started
            seconds["write"] += time.monotonic() - read
            samples += len(at) - len(failed)
            progress.update(len(at))
    features = features.reopened()
    rows = features.length[features.status == OK] if table.rows else np.zeros(0)
    boxes = "boxes x1, y1, x2, y2 and " if "boxes" in table.extras else ""
    return summary_of(
        features,
        splits,
        read_as=f"{boxes}{rows.min()} to {rows.max()} rows of {table.channels} numbers an image" if len(rows) else "",
        samples=samples,
        chunks=len(missing),
        chunks_before=len(wanted) - len(missing),
        seconds=time.monotonic() - began,
        shares=seconds,
    )


def _failed(
    features: ImageSet | CaptionSet, first: int, last: int, faults: Mapping[int, str], options: ImportOptions
) -> dict[int, str]:
    """Return the reasons by row of what cannot be read of rows [first, last), unless `on_error` is ``fail``."""
    names_of = features.cache.file_names if isinstance(features, ImageSet) else features.cache.caption_texts
    names = names_of(first, last) if faults else []
    if faults and options.on_error == "fail":
        place, advice = min(faults), "repair the source, or record such samples with --on-error skip"
        raise SampleError(names[place], f"{faults[place]}; {advice}")
    return {first + place: f"{names[place]}: {faults[place]}" for place in sorted(faults)}
