"""Stage one: encode every sample once, through Dask, into the feature cache.

One task is one shard (`tasks`). Only the process that began the extraction marks a shard as done, after the task's
receipt has come, so a kill at any moment loses at most the shards in flight. An extraction that finds every shard
done ends before torch is imported, which takes longer than finding that out.
"""

import os
import sys
import time
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..cache.feature_cache import FAILED, Blocks, CaptionSet, FeatureCache, FeatureSet, ImageSet
from ..cache.layout import (
    SetFacts,
    choose_splits,
    create_caption_set,
    create_image_set,
    find_cache,
    find_set,
    open_for_writing,
    record_failures,
    require_place,
)
from ..cache.verify import broken_shards
from ..data.manifest import Manifest
from ..data.samples import Samples, read_samples, tokenize
from ..encoders import TextEncoder, VisualEncoder, load_text, load_visual
from ..encoders.words import WordsEncoder
from ..errors import CacheError
from ..progress import Progress
from .options import Options

if TYPE_CHECKING:
    from .tasks import Job, Receipt


@dataclass
class SetSummary:
    """What became of one feature set.

    Attributes:
        name: the set.
        samples: encoded now, without those that failed.
        shards: written now.
        shards_before: found finished.
        failed: samples recorded as failed, by this extraction or before.
        reasons: of each of them, its file and what is wrong.
        seconds: wall time.
        shares: seconds that the tasks spent reading, encoding and writing.
    """

    name: str
    samples: int = 0
    shards: int = 0
    shards_before: int = 0
    failed: int = 0
    reasons: list[str] = field(default_factory=list)
    seconds: float = 0.0
    shares: dict[str, float] = field(default_factory=lambda: {"read": 0.0, "encode": 0.0, "write": 0.0})

    def add(self, receipt: "Receipt") -> None:
        """Count a finished task."""
        self.samples += receipt.samples - len(receipt.failed)
        self.shards += 1
        for share, seconds in receipt.seconds.items():
            self.shares[share] += seconds


def extract(manifest: Manifest, url: str, options: Options) -> dict[str, Any]:
    """Encode a data set into the cache at `url`; what is there already is kept and not computed again.

    Args:
        manifest: the data set.
        url: local path or fsspec URL of the cache.
        options: how.

    Returns:
        A summary: data set, images, captions, captions without words, and a `SetSummary` as a dict a set.

    Raises:
        ManifestError: the data set cannot be read.
        EncoderError: an encoder cannot be made.
        SampleError: an image cannot be read, and `on_error` is ``fail``.
        OutputError: the store cannot be written.
        CacheError: the store holds something else, or a value does not fit the dtype.
    """
    samples = read_samples(manifest)
    splits = choose_splits(samples, options.splits)
    options = replace(
        options, visual_weights=_absolute(options.visual_weights), text_weights=_absolute(options.text_weights)
    )
    if not options.repair and (found := _finished(samples, url, options, splits)) is not None:
        return found
    require_place(url, samples)  # a finished store may lie where nothing can be written
    from ..device import pick_device
    from .tasks import Job

    recorded: dict[str, Any] = {"device": str(pick_device(options.device)), "batch_size": options.batch_size}
    # Made before the store, so that a wrong name or file leaves nothing behind.
    visual = load_images(options, recorded["device"]) if options.visual else None
    text = load_captions(options, samples, recorded["device"]) if options.text else None
    with open_for_writing(url, samples, manifest.protocols, repair=options.repair) as cache:
        summary = _heading(cache)
        job = Job(
            url=cache.store.absolute_url,
            set_name="",
            encoder=options.visual or "",
            weights=options.visual_weights,
            image_size=options.image_size,
            folder=str(manifest.images.resolve()),
            device=options.device,
            batch_size=options.batch_size,
            skip=options.on_error == "skip",
            settings=options.visual_settings,
        )
        if visual is not None:
            images = _image_set(cache, options, visual, recorded)
            summary["sets"].append(_fill(images, replace(job, set_name=images.name), splits, options))
        if text is not None:
            captions = _caption_set(cache, options, text, samples, recorded)
            text_job = replace(
                job,
                set_name=captions.name,
                encoder=text.name,
                weights=options.text_weights,
                settings=options.text_settings,
            )
            summary["sets"].append(_fill(captions, text_job, splits, options))
            summary |= captions.attributes["counts"]
        return summary


def _heading(cache: FeatureCache) -> dict[str, Any]:
    return {
        "dataset": cache.dataset,
        "store": cache.url,
        "images": cache.images,
        "captions": cache.captions,
        "sets": [],
    }


def _finished(samples: Samples, url: str, options: Options, splits: list[str]) -> dict[str, Any] | None:
    """Return the summary of an extraction that has nothing left to do, or None if it may have."""
    cache = find_cache(url, samples)
    if cache is None:
        return None
    summary = _heading(cache)
    for modality, wanted in (("images", options.visual), ("captions", options.text)):
        if wanted is None:
            continue
        words = options.asked(modality)
        sets: list[FeatureSet] = [
            cache.image_set(name) if modality == "images" else cache.caption_set(name)
            for name in cache.set_names(modality)
        ]
        found = [features for features in sets if words is not None and features.attributes.get("asked") == words]
        if len(found) != 1:
            return None
        shards = [shard for split in splits for shard in found[0].blocks.of_split(split)]
        if not found[0].done()[shards].all():
            return None
        there = SetSummary(found[0].name, shards_before=len(shards), failed=len(found[0].failed))
        there.reasons = list(found[0].failed.values())
        summary["sets"].append({**vars(there), "per_second": 0.0})
        summary |= found[0].attributes.get("counts", {})
    return summary


def _absolute(weights: str) -> str:
    """Return a path that holds in any working folder; a worker's is not ours."""
    return str(Path(weights).resolve()) if weights not in ("imagenet", "") and Path(weights).exists() else weights


def load_images(options: Options, device: str) -> VisualEncoder:
    """Return the image encoder that the options name; errors as for `encoders.load_visual`."""
    assert options.visual is not None, "the options name one"
    return load_visual(options.visual, options.visual_weights, options.image_size, device, **options.visual_settings)


def _image_set(cache: FeatureCache, options: Options, encoder: VisualEncoder, recorded: dict) -> ImageSet:
    facts = SetFacts.of(encoder, options.dtype, recorded, options.asked("images"))
    features = find_set(cache, "images", facts.name)
    if features is None:
        blocks = Blocks.choose(cache.splits, options.shard_images)
        create_image_set(cache, facts, encoder.rows, blocks, encoder.extras)
    else:
        _warn_of_changes(features, facts.recorded, options.shard_images)
    return cache.image_set(facts.name)


def load_captions(options: Options, samples: Samples, device: str) -> TextEncoder:
    """Return the caption encoder that the options name; errors as for `encoders.load_text`.

    Raises:
        CacheError: words have no training captions to take their vocabulary from.
    """
    if options.text != "words":
        return load_text(options.text_weights, device, **options.text_settings)
    if "train" not in samples.splits:
        raise CacheError(f"'{samples.dataset}' has no train split to take a vocabulary from; use --text bert")
    training = samples.images[slice(*samples.splits["train"])]
    return WordsEncoder.build(caption.text for image in training for caption in image.captions)


def _caption_set(
    cache: FeatureCache, options: Options, encoder: TextEncoder, samples: Samples, recorded: dict
) -> CaptionSet:
    facts = SetFacts.of(encoder, options.dtype, recorded, options.asked("captions"))
    features = find_set(cache, "captions", facts.name)
    if features is not None:
        _warn_of_changes(features, facts.recorded, options.shard_images)
        return cache.caption_set(facts.name)
    blocks = Blocks.choose(cache.splits, options.shard_images)
    tokens = []
    counts = {"captions_without_words": 0, "captions_truncated": 0}
    if encoder.vocabulary is not None:
        counts |= {"words": len(encoder.vocabulary), "unknown_tokens": 0}
    with Progress("tokens", cache.captions, "captions") as progress:
        for shard in range(len(blocks)):
            images = samples.images[slice(*blocks.images(shard))]
            texts = [caption.text for image in images for caption in image.captions]
            ids = encoder.tokenize(texts)
            tokens.append(sum(map(len, ids)))
            counts["captions_without_words"] += sum(not tokenize(text) for text in texts)
            counts["captions_truncated"] += encoder.count_truncated(texts)
            if encoder.vocabulary is not None:
                counts["unknown_tokens"] += sum(caption.count(0) for caption in ids)
            progress.update(len(texts))
    extra: dict[str, Any] = {"counts": {**counts, "tokens": sum(tokens)}}
    if encoder.vocabulary is not None:
        extra["vocabulary"] = list(encoder.vocabulary)
    create_caption_set(cache, facts, blocks, tokens, extra)
    return cache.caption_set(facts.name)


def _warn_of_changes(features: FeatureSet, recorded: dict[str, Any], shard_images: int | None) -> None:
    before = {**features.attributes["recorded"], "shard_images": features.blocks.length}
    now = {**recorded, "shard_images": shard_images or features.blocks.length}
    changed = [f"{key} {before.get(key)} (now {value})" for key, value in now.items() if before.get(key) != value]
    if changed:
        print(f"Note: '{features.name}' was begun with {', '.join(changed)}.", file=sys.stderr)


def _fill(features: ImageSet | CaptionSet, job: "Job", splits: list[str], options: Options) -> dict[str, Any]:
    """Compute the shards of these splits that are not done yet; return a `SetSummary` as a dict."""
    from .schedule import run_here, run_on_cluster, shard_tasks
    from .tasks import METERS, write_caption_shard, write_image_shard

    cache, blocks = features.cache, features.blocks
    marks = cache.store.open_array(f"{features.path}/done", writable=True)
    wanted = [shard for split in splits for shard in blocks.of_split(split)]
    if options.repair:
        for shard in set(broken_shards(features)).intersection(wanted):
            marks[shard] = 0
    done = features.done()
    missing = [shard for shard in wanted if not done[shard]]
    total, left = (sum(features.samples_in(shard) for shard in shards) for shards in (wanted, missing))
    summary = SetSummary(features.name, shards_before=len(wanted) - len(missing))
    ever_failed = bool(features.failed)
    work = write_image_shard if isinstance(features, ImageSet) else write_caption_shard
    began = time.monotonic()
    with Progress(features.name, total, features.modality, done=total - left) as progress:

        def record(receipt: "Receipt") -> None:
            nonlocal ever_failed
            ever_failed |= bool(receipt.failed)
            if ever_failed:
                record_failures(features, cache.ids(*blocks.images(receipt.shard)), receipt.failed)
            marks[receipt.shard] = 1
            summary.add(receipt)
            if options.scheduler:
                progress.update(receipt.samples)

        tasks = shard_tasks(work, job, missing)
        if options.scheduler:
            if missing:
                run_on_cluster(tasks, options.scheduler, record)
        else:
            METERS[features.name] = progress.update
            try:
                run_here(tasks, options.workers or max(2, os.cpu_count() or 2), record)
            finally:
                del METERS[features.name]
    summary.seconds = time.monotonic() - began
    features = type(features)(cache, features.name)
    summary.failed, summary.reasons = int((features.status == FAILED).sum()), list(features.failed.values())
    for split in splits:
        if (features.status[features.rows_of(split)] == FAILED).all():
            reason = next(iter(features.failed.values()))
            for shard in blocks.of_split(split):  # nothing of it is worth keeping, and it must be tried again
                marks[shard] = 0
            record_failures(features, cache.ids(*cache.splits[split]), {})
            raise CacheError(
                f"no sample of split '{split}' could be read; for example {reason}; check the manifest's images, or"
                " choose other --splits"
            )
    return {**vars(summary), "per_second": summary.samples / max(summary.seconds, 1e-9)}
