"""Encodes every sample once, through Dask, into the feature store.

An extraction that finds everything done ends before torch is imported, which takes longer than finding that out.
"""

import logging
import time
import uuid
from collections import Counter
from collections.abc import Collection, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np

from ..data.manifest import Manifest
from ..data.samples import Samples, read_samples, tokenize
from ..data.sources import FOLDER, FolderReader, digests_of, is_url, missing_from
from ..encoders.registry import is_own
from ..encoders.spec import EncoderSpec
from ..errors import CacheError, ManifestError
from ..progress import Progress
from ..store import FAILED, OK, FeatureCache, FeatureSet, ImageSet
from ..store.create import SetFacts, caption_set, image_set
from ..store.folder import Folder
from ..store.inspect import damaged_chunks
from ..store.leaks import find_leaks, taught_in
from ..store.store import find_store, may_be_store, open_for_writing, splits_at
from ..wording import counted, printable, some_of
from ..workers import connect, prepare
from .options import Options, choose_splits, recorded_options
from .summary import Extraction, SetSummary

if TYPE_CHECKING:
    from distributed import Client

log = logging.getLogger("xret")

Sets: TypeAlias = list[tuple[Any, Any]]  # a feature set, and the encoder that fills it

_PARTS = 16  # chunks that a set has at least, so that a kill loses little and every thread has work
_IMAGES, _CAPTIONS = 2048, 16384  # in a chunk at most


def extract(manifest: Manifest, url: str | Path, options: Options) -> Extraction:
    """Encode a data set into the store at `url`; what is there already is kept and not computed again.

    Raises:
        ManifestError: the data set cannot be read, or pictures are missing and `on_error` is ``fail``.
        EncoderError: an encoder cannot be loaded.
        SampleError: an image cannot be read, and `on_error` is ``fail``.
        OutputError: the store cannot be written.
        CacheError: the store holds something else, or a value does not fit the dtype.
    """
    url, samples, options = settle(manifest, url, options)
    if (known := find_store(url, samples)) is not None:
        if known.protocols != manifest.protocols:
            with open_for_writing(url, samples, manifest.protocols) as known:
                log.info("%s is evaluated by %s from now on", url, " and ".join(manifest.protocols))
        if options.visual and samples.source == FOLDER:
            _require_unchanged(known, manifest, options.repair)
        if not options.repair and (finished := _finished(known, options)) is not None:
            return finished
    Folder(url).require_writable()  # a finished store may lie where nothing can be written
    from ..device import pick_device

    with connect(options.cluster) if options.cluster else nullcontext() as client:
        device, extractor = str(pick_device(options.device)), Extractor(samples, manifest, options, client)
        if client is not None:  # what takes workers seconds to import, they do while this process loads its encoders
            client.run(prepare, f"{__package__}.cluster", wait=False)
        # Loaded before the store is created, so that a wrong name or file leaves nothing.
        encoders = load_encoders(options, samples, device)
        if options.visual and known is None:
            extractor.require_pictures()
        summaries: list[SetSummary] = []
        counts: dict[str, Any] = {}
        with open_for_writing(url, samples, manifest.protocols) as cache:
            for side, of_side in encoders.items():
                sets = create_sets(cache, side, of_side, options, device)
                summaries += extractor.fill(sets)
                counts = sets[0][0].attributes.get("counts", {})
            if options.reuse and len(taught := taught_in(FeatureCache.open(options.reuse), cache)):
                log.warning(
                    "%s of test are in train of %s, such as %s; a run that was trained there knows them. Pictures keep"
                    " their splits by their file names: give them the names they had, or splits in the manifest.",
                    counted(len(taught), "picture"),
                    options.reuse,
                    printable(cache.file_names(taught[0], taught[0] + 1)[0]),
                )
            return _summary(cache, summaries, counts)


def settle(manifest: Manifest, url: str | Path, options: Options) -> tuple[str, Samples, Options]:
    """Return the URL, the samples, and options with the splits that there are and paths valid in any folder."""
    may_be_store(url)  # before pictures are looked at
    url, reuse = str(url), options.reuse and FeatureCache.open(options.reuse).absolute_url
    samples = read_samples(manifest, options.on_error == "skip", partial(splits_at, url, reuse))
    sides = {"visual": options.visual, "text": options.text}  # with absolute paths of weights, which are recorded
    found: dict[str, Any] = {side: replace(spec.located({}), trust=spec.trust) for side, spec in sides.items() if spec}
    return url, samples, replace(options, reuse=reuse, splits=choose_splits(samples, options.splits), **found)


def _summary(cache: FeatureCache, summaries: Sequence[SetSummary], counts: dict[str, Any]) -> Extraction:
    sizes = cache.images, cache.captions
    return Extraction(cache.dataset, cache.url, *sizes, tuple(summaries), counts, find_leaks(cache))


def create_sets(
    cache: FeatureCache, side: str, encoders: Sequence[Any], options: Options, device: str, parts: int = _PARTS
) -> Sets:
    """Return the set of each encoder, created empty if it is not there, of so many chunks at least, and the encoder."""
    sets: Sets = []
    if side == "images":
        views, stamp = getattr(encoders[0], "views", 1), ("stamp",) if cache.source == FOLDER else ()
        most = max(1, min(_IMAGES // views, max(8, -(-cache.images // parts // 8) * 8)))
        # The largest first, as sets whose chunks have the same rows are filled in one pass.
        for encoder in sorted(encoders, key=lambda encoder: -encoder.rows * encoder.channels):
            arrays = ("size", "digest", *stamp, *encoder.extras)
            facts = replace(
                _facts(encoder, options.sides[side], options, device), rows=encoder.rows, views=views, arrays=arrays
            )
            sets.append((image_set(cache, facts, most=most), encoder))
            most = min(most, sets[-1][0].chunk_rows)
        return sets
    lengths, counts = _tokenize_all(cache, encoders[0])
    extra = {"counts": counts, "vocabulary": encoders[0].vocabulary and list(encoders[0].vocabulary)}
    most = min(_CAPTIONS, max(8, -(-cache.captions // parts // 8) * 8))
    for encoder in encoders:
        facts = _facts(encoder, options.sides[side], options, device, **extra)
        sets.append((caption_set(cache, facts, lengths, most=most), encoder))
    return sets


def _require_unchanged(cache: FeatureCache, manifest: Manifest, repair: bool) -> None:
    """Refuse pictures that have changed since the store has features of them: another stamp and another digest.

    With `repair`, sets that are damaged are passed over.
    """
    pictures, names = FolderReader(manifest.images), cache.file_names(0, cache.images)
    now = np.array([pictures.stamp(name) for name in names], dtype=np.int64)
    stored: dict[tuple[int, bytes], None] = {}  # rows and digests
    for path in cache.set_paths("images"):
        try:
            features = ImageSet(cache, path.partition("/")[2])
            other = features.stamps.any(1) & now.any(1) & (features.stamps != now).any(1)
            stored |= {(row, features.digests[row].tobytes()): None for row in np.flatnonzero(other).tolist()}
        except CacheError:
            if not repair:
                raise
    found = digests_of(pictures, [names[row] for row, _ in stored])
    if changed := [names[row] for (row, then), one in zip(stored, found, strict=True) if one != then]:
        raise CacheError(
            f"{manifest.images}: {counted(len(changed), 'picture')} of {len(names):,} changed after {cache.url} got"
            f" features of it ({', '.join(some_of(changed))}); put back the files, or extract into another store with"
            f" --reuse {cache.url}"
        )


def _finished(cache: FeatureCache, options: Options) -> Extraction | None:
    """Return the summary of an extraction that has nothing left to do, or None if it may have."""
    if any(is_own(spec.name) for spec in options.sides.values()):
        return None  # its identity is in its code, which may be another one now
    summaries: list[SetSummary] = []
    counts: dict[str, Any] = {}
    for side in options.sides:
        for spec in options.of_layers(side):
            features = set_of(cache, side, spec)
            if features is None or features.missing(options.splits):
                return None
            chunks = {chunk for split in options.splits for chunk in features.chunks_of(split)}
            summaries.append(summary_of(features, (), chunks_before=len(chunks)))
            counts = features.attributes.get("counts", {})
    return _summary(cache, summaries, counts)


def set_of(cache: FeatureCache, side: str, spec: EncoderSpec) -> FeatureSet | None:
    """Return the set of a side that was made with a spec; None: there is none, or several."""
    asked, sets = recorded_options(spec), map(cache.set_at, cache.set_paths(side))
    made = [features for features in sets if features.attributes.get("options") == asked]
    return made[0] if len(made) == 1 else None


def load_encoders(options: Options, samples: Samples, device: str) -> dict[str, list[Any]]:
    """Return by side the encoder of each layer; that of ``words`` has the vocabulary of the training captions."""
    from ..encoders.registry import load_text_layers, load_visual_layers

    encoders: dict[str, list[Any]] = {}
    if options.visual:
        encoders["images"] = load_visual_layers(options.of_layers("images"), device)
    if options.text is None:
        return encoders
    if options.text.name != "words":
        return encoders | {"captions": load_text_layers(options.of_layers("captions"), device)}
    from ..encoders.words import WordsEncoder, without_spaces

    options.text.require(())
    if "train" not in samples.splits:
        raise CacheError(
            f"'{samples.dataset}' has no train split to take a vocabulary from (it has {', '.join(samples.splits)});"
            " map one to 'train' with merge_splits in the manifest, or use --text bert"
        )
    training = samples.images[slice(*samples.splits["train"])]
    texts = [caption.text for image in training for caption in image.captions]
    if without_spaces(texts[:_CAPTIONS]):
        log.warning(
            "The captions of '%s' have no spaces between words, so that --text words takes phrases for words; take"
            " --text hf:MODEL of their language.",
            printable(samples.dataset),
        )
    return encoders | {"captions": [WordsEncoder.build(texts)]}


def _facts(encoder: Any, spec: EncoderSpec, options: Options, device: str, **extra: Any) -> SetFacts:
    asked = recorded_options(replace(spec, layer=encoder.spec.layer))
    extra |= {"spec": encoder.spec.to_json(), "options": asked, "grid": getattr(encoder, "grid", None)}
    if "pool" in encoder.identity:
        extra["cells"] = getattr(encoder, "cells", None)
    return SetFacts(
        encoder=encoder.name,
        kind=encoder.kind,
        identity=encoder.identity,
        dtype="int32" if encoder.channels is None else spec.dtype,
        channels=encoder.channels,
        global_channels=encoder.global_channels,
        recorded={**encoder.versions, "device": device, "batch_size": options.batch_size},
        space=encoder.space,
        extra=extra,
    )


def _tokenize_all(cache: FeatureCache, encoder: Any) -> tuple[np.ndarray, dict[str, Any]]:
    """Return the tokens of each caption, int64 [M], and what tokenisation has met, see `Extraction`."""
    lengths = np.zeros(cache.captions, dtype=np.int64)
    counts: Counter[str] = Counter(captions_without_words=0, captions_truncated=0)
    if encoder.vocabulary is not None:
        counts.update(unknown_tokens=0, captions_unknown=0)
    shares: dict[str, float] = {}
    with Progress("tokens, before they are encoded", cache.captions, "captions") as progress:
        for split, rows in cache.splits.items():
            (start, stop), before = cache.captions_of(*rows), counts["unknown_tokens"]
            for first in range(start, stop, _CAPTIONS):
                texts = cache.caption_texts(first, min(first + _CAPTIONS, stop))
                ids = encoder.tokenize(texts)
                lengths[first : first + len(texts)] = [len(caption) for caption in ids]
                has_words = [tokenize(text) != [] for text in texts]
                counts["captions_without_words"] += has_words.count(False)
                counts["captions_truncated"] += encoder.count_truncated(texts)
                if encoder.vocabulary is not None:
                    counts["unknown_tokens"] += sum(caption.count(0) for caption in ids)
                    both = zip(ids, has_words, strict=True)
                    counts["captions_unknown"] += sum(some and not any(caption) for caption, some in both)
                progress.update(len(texts))
            shares[split] = (counts["unknown_tokens"] - before) / max(1, int(lengths[start:stop].sum()))
    found: dict[str, Any] = {**counts, "tokens": int(lengths.sum())}
    if encoder.vocabulary is None:
        return lengths, found
    if counts["captions_unknown"]:
        log.warning(
            "%s no word of the vocabulary, so that nothing tells them apart; with few training captions take an encoder"
            " with a vocabulary of its own, --text bert or hf:MODEL.",
            counted(counts["captions_unknown"], "caption") + (" holds" if counts["captions_unknown"] == 1 else " hold"),
        )
    return lengths, found | {"words": len(encoder.vocabulary), "unknown_by_split": shares}


@dataclass(frozen=True)
class Extractor:
    """Fills the sets of an extraction; on the workers of a cluster if there is a client of it."""

    samples: Samples
    manifest: Manifest
    options: Options
    client: "Client | None" = None

    def fill(self, sets: Sets) -> list[SetSummary]:
        """Compute what sets lack, each with its encoder: those whose chunks have the same rows in one pass."""
        rows = dict.fromkeys(features.chunk_rows for features, _ in sets)
        passes = [[one for one in sets if one[0].chunk_rows == count] for count in rows]
        return [summary for of_pass in passes for summary in self._fill(of_pass)]

    def _fill(self, sets: Sets) -> list[SetSummary]:
        splits = self.options.splits
        wanted = {chunk for split in splits for chunk in sets[0][0].chunks_of(split)}
        if self.options.repair:
            sets = self._without_damage(sets, wanted)
        missing = [features.missing(splits) for features, _ in sets]
        began, tally = time.monotonic(), Counter[Any]()
        if any(missing):
            lacking = [one for one, chunks in zip(sets, missing, strict=True) if chunks]
            tally = self._fill_chunks(lacking, wanted, sorted(set().union(*missing)))
        seconds, shares = time.monotonic() - began, {share: tally[share] / 1e9 for share in ("read", "encode", "write")}
        return [
            summary_of(
                features if self.client is None else features.reopened(),
                splits,
                samples=tally[features.path, "encoded"],
                reused=tally[features.path, "reused"],
                chunks=len(chunks),
                chunks_before=len(wanted) - len(chunks),
                seconds=seconds,
                shares=shares,
            )
            for (features, _), chunks in zip(sets, missing, strict=True)
        ]

    def _fill_chunks(self, sets: Sets, wanted: Collection[int], missing: list[int]) -> Counter[Any]:
        """Fill the chunks that are missing of those that are wanted; return the `Tally` of what was done."""
        from .cluster import at_once, fill_here, fill_on_cluster
        from .filler import Filler, Job

        features, options, rows = sets[0][0], self.options, list[int]()
        if features.modality == "images":  # of a chunk at the border of two splits, the images of these splits alone
            rows = np.unique(np.concatenate([one.rows_left(options.splits) for one, _ in sets])).tolist()
            self.require_pictures(rows)
            total, left = sum(len(range(*features.cache.splits[split])) for split in options.splits), len(rows)
        else:
            total, left = (sum(len(range(*features.rows_in(one))) for one in some) for some in (wanted, missing))
        trust = any(spec.trust for spec in options.sides.values())  # `Encoder.spec` has it not
        job = Job(
            key=uuid.uuid4().hex,
            url=features.cache.absolute_url,
            paths=tuple(one.path for one, _ in sets),
            folder=str(self.manifest.images.resolve()),
            seen=self._seen(rows) if self.client is not None and rows else None,
            specs=tuple(replace(encoder.spec, trust=trust) for _, encoder in sets),
            options=options,
        )
        # As many chunks as fit a batch, unless there are too few for all threads.
        size = max(1, min(options.batch_size // features.chunk_rows, len(missing) // (4 * at_once())))
        groups = [missing[first : first + size] for first in range(0, len(missing), size)]
        name = printable(features.name) + (f" and {len(sets) - 1} more" if len(sets) > 1 else "")
        tally: Counter[Any] = Counter()
        with Progress(name, total, features.modality, done=total - left) as progress:

            def take(done: Counter[Any]) -> None:
                tally.update(done)
                progress.update(done["samples"])

            if self.client is not None:
                fill_on_cluster(job, groups, self.client, take)
            else:
                fill_here(Filler(job, *zip(*sets, strict=True)), groups, take)
        return tally

    def _seen(self, rows: Sequence[int]) -> str | None:
        """Return the name of a picture that is there, or of a file that holds some, for workers to look for."""
        if self.samples.source != FOLDER:
            return next((file.name for file in self.samples.source.files if not is_url(file.name)), None)
        names = [*self.samples.images.names_of(rows[:_IMAGES])]
        missing = set(missing_from(self.manifest.images, names))
        return next((name for name in names if name not in missing), None)

    def _without_damage(self, sets: Sets, wanted: Collection[int]) -> Sets:
        """Delete damaged chunks, and let samples that failed be not done; return the sets as they are then.

        ManifestError: a picture is missing whose good features would be lost.
        """
        damaged = [[chunk for chunk in damaged_chunks(features) if chunk in wanted] for features, _ in sets]
        for (features, _), chunks in zip(sets, damaged, strict=True):
            if features.modality == "images":
                self.require_pictures(_good_rows(features, chunks), repair=True)
        sets = [(features.forget(*chunks), of) for (features, of), chunks in zip(sets, damaged, strict=True)]
        for features, _ in sets:
            features.retry(self.options.splits)
        return sets

    def require_pictures(self, rows: Sequence[int] | None = None, *, repair: bool = False) -> None:
        """Refuse pictures that are missing, all at once; with `repair`, those whose good features would be lost.

        `rows` are theirs, None: all of the options' splits.
        """
        samples, manifest = self.samples, self.manifest
        if samples.source != FOLDER or (self.options.on_error == "skip" and not repair):
            return
        if rows is None:
            rows = [row for split in self.options.splits for row in range(*samples.splits[split])]
        missing = missing_from(manifest.images, samples.images.names_of(rows))
        if not missing:
            return
        found = f"{counted(len(missing), 'picture')} of {len(rows):,} {'is' if len(missing) == 1 else 'are'} missing"
        advice = f"put them there, correct {manifest.listing}, or go on with --on-error skip"
        if repair:
            advice = "put them there: --repair would lose their features"
        raise ManifestError(f"{manifest.images}: {found} ({', '.join(some_of(missing))}); {advice}.")


def _good_rows(features: FeatureSet, chunks: Sequence[int]) -> list[int]:
    try:
        status = features.status
    except CacheError:  # it is damaged itself
        status = np.full(features.samples, OK)
    return [row for chunk in chunks for row in range(*features.rows_in(chunk)) if status[row] == OK]


def summary_of(features: FeatureSet, splits: Sequence[str], **done: Any) -> SetSummary:
    """Return the summary of a set with what was done now.

    CacheError: all samples of one of these splits have failed; they can be tried again then.
    """
    if lost := [split for split in splits if (features.status[features.rows_of(split)] == FAILED).all()]:
        _, example = next(iter(features.failures))
        features.retry(lost)
        raise CacheError(
            f"no {features.modality[:-1]} of split {' or '.join(map(repr, lost))} could be read; for example {example};"
            " fix that, or choose other --splits"
        )
    reasons = tuple(reason for _, reason in features.failures)
    return SetSummary(features.name, failed=len(reasons), reasons=reasons, **done)
