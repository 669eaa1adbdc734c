"""Encodes every sample once, through Dask, into the feature cache.

One task is one shard (`tasks`, `filling`). An extraction that finds every shard done ends before torch is imported,
which takes longer than finding that out.
"""

import sys
from collections import Counter
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from ..cache import Blocks, CaptionSet, FeatureCache, ImageSet
from ..cache.earlier import sets_of_all
from ..cache.facts import SetFacts, fingerprint
from ..cache.known_samples import find_samples
from ..cache.layout import (
    caption_set_to_fill,
    choose_splits,
    find_cache,
    image_set_to_fill,
    open_for_writing,
    require_place,
)
from ..cache.records import record_place
from ..data.digests import Digests
from ..data.manifest import Manifest
from ..data.samples import Samples, tokenize
from ..data.sources import FOLDER, missing_from
from ..encoders import HUB, TextEncoder, VisualEncoder, as_stored, is_own, turns_upright
from ..encoders.words import WordsEncoder, min_count_for
from ..errors import CacheError, ManifestError
from ..memory import keeping_memory
from ..progress import Progress
from ..wording import counted, some_of
from .command import command_of
from .options import Options, at_commits, moved_to, source_of
from .summary import CaptionCounts, Extraction, SetSummary
from .updates.reuse import find_earlier
from .updates.update import choose_target, finish


@keeping_memory()
def extract(manifest: Manifest, url: str, options: Options) -> Extraction:
    """Encode a data set into the cache at `url`; what is there already is kept and not computed again.

    Args:
        manifest: the data set.
        url: local path or fsspec URL of the cache.
        options: how.

    Raises:
        ManifestError: the data set cannot be read, or pictures are missing and `on_error` is ``fail``.
        EncoderError: an encoder cannot be made.
        SampleError: an image cannot be read, and `on_error` is ``fail``.
        OutputError: the store cannot be written.
        CacheError: the store holds something else, or a value does not fit the dtype.
    """
    if options.visual is options.text is None or not options.splits:
        raise CacheError("there is nothing to extract: give an encoder of images or captions, and at least one split")
    samples = find_samples(manifest, url, skip=options.on_error == "skip", anew=options.repair or options.update)
    target = choose_target(url, samples, manifest, Digests(samples, manifest.images), options.update)
    splits = choose_splits(samples, options.splits)
    options = _with_absolute_paths(with_min_count(options, samples, url))
    url = target.url
    if not (options.repair or target.is_new) and (found := _finished(samples, url, options, splits)) is not None:
        return found
    require_place(url, samples, is_new=target.is_new)  # a finished store may lie where nothing can be written
    from ..device import pick_device
    from .filling import fill
    from .tasks import Job, write_caption_shard, write_image_shard

    device = str(pick_device(options.device))
    # Made before the store, so that a wrong name or file leaves nothing.
    visual = options.load_visual(device) if options.visual else None
    text = load_captions(options, samples, device) if options.text else None
    if visual is not None:
        options, visual = as_begun(url, options, visual, device)
        if not options.repair and options.on_error == "fail" and samples.source == FOLDER:
            _require_pictures(samples, manifest, find_cache(url, samples), options, visual, splits)
    exact = at_commits(options, visual, text)
    command = command_of(manifest, exact)
    how: dict[str, Any] = {"workers": options.workers, "scheduler": options.scheduler}
    sets, counts = [], None
    with open_for_writing(url, samples, manifest.protocols, repair=options.repair, is_new=target.is_new) as cache:
        job = Job(cache.address, "", str(manifest.images.resolve()), options, cache.store.writer)
        if visual is not None:
            facts = replace(_facts(cache, options, exact, "images", visual, device), command=command)
            length, earlier = find_earlier(cache.address, f"images/{facts.name}", facts, options, target.is_new)
            images = image_set_to_fill(cache, facts, visual.rows, length, visual.extras, options.views, digests=True)
            of_images = replace(job, set_name=images.name, earlier=earlier)
            check = partial(_require_good_pictures, samples, manifest, images) if options.repair else None
            sets.append(fill(images, write_image_shard, lambda _: of_images, splits, repair=check, **how))
        if text is not None:
            facts = replace(_facts(cache, options, exact, "captions", text, device), command=command)
            length, earlier = find_earlier(cache.address, f"captions/{facts.name}", facts, options, target.is_new)
            captions = caption_set_to_fill(cache, facts, length, partial(_count, cache, text))
            of_captions = replace(job, set_name=captions.name, earlier=earlier)
            nothing = (lambda _: None) if options.repair else None
            sets.append(fill(captions, write_caption_shard, lambda _: of_captions, splits, repair=nothing, **how))
            counts = CaptionCounts(**captions.attributes["counts"])
        if target.is_new:
            finish(cache)
        return Extraction(cache.dataset, cache.url, cache.images, cache.captions, tuple(sets), counts)


def as_begun(url: str, options: Options, encoder: VisualEncoder, device: str) -> tuple[Options, VisualEncoder]:
    """Return options and encoder of images as the cache at `url` has their set, which goes on as it was begun.

    Earlier versions did not apply EXIF orientations. A cache that has the set of today, too, goes on with that one.
    """
    if is_own(options.visual or "") or not turns_upright(encoder.identity):
        return options, encoder
    there = {features.fingerprint for features in sets_of_all(url, "images")}
    old, new = (fingerprint(identity, options.dtype) for identity in (as_stored(encoder.identity), encoder.identity))
    if old not in there or new in there:
        return options, encoder
    note = (
        f"Note: an earlier version made '{encoder.name}@{old[:8]}' without applying EXIF orientations, and it goes on"
        " so; a set that is made anew, as in another --store, applies them."
    )
    print(note, file=sys.stderr)
    options = replace(options, upright=False)
    return options, options.load_visual(device)


def _finished(samples: Samples, url: str, options: Options, splits: list[str]) -> Extraction | None:
    """Return the summary of an extraction that has nothing left to do, or None if it may have."""
    cache = find_cache(url, samples)
    if cache is None:
        return None
    summaries, counts, moved = [], None, []
    for modality in (m for m, wanted in (("images", options.visual), ("captions", options.text)) if wanted):
        asked = options.asked(modality)
        features = _set_of(cache, modality, asked)
        if asked is None or features is None:
            return None
        shards = [shard for split in splits for shard in features.blocks.of_split(split)]
        if not features.done()[shards].all():
            return None
        reasons = tuple(reason for _, reason in features.failures)
        summaries.append(SetSummary(features.name, shards_before=len(shards), failed=len(reasons), reasons=reasons))
        if isinstance(features, CaptionSet):
            counts = CaptionCounts(**features.attributes["counts"])
        if told := moved_to(options, modality, asked["weights"], features.attributes):
            moved.append((features, told))
    for features, told in moved:
        record_place(features, told)
    return Extraction(cache.dataset, cache.url, cache.images, cache.captions, tuple(summaries), counts)


def _set_of(cache: FeatureCache, modality: str, asked: dict[str, Any] | None) -> ImageSet | CaptionSet | None:
    """Return the one feature set that these options made, see `Options.asked`; None where that cannot be told."""
    sets = [cache.set_at(path) for path in cache.set_paths(modality)]
    there = [features for features in sets if asked and features.attributes.get("asked") == asked]
    return there[0] if len(there) == 1 else None


def _require_pictures(
    samples: Samples,
    manifest: Manifest,
    cache: FeatureCache | None,
    options: Options,
    encoder: VisualEncoder,
    splits: list[str],
) -> None:
    """Refuse pictures that are missing, all at once; those of finished shards in `cache` are not needed."""
    rows = [row for split in splits for row in range(*samples.splits[split])]
    wanted = fingerprint(encoder.identity, options.dtype)
    sets = [] if cache is None else [cache.set_at(path) for path in cache.set_paths("images")]
    for features in (one for one in sets if one.fingerprint == wanted):
        done = features.done()
        left = [shard for split in splits for shard in features.blocks.of_split(split) if not done[shard]]
        rows = [row for shard in left for row in range(*features.blocks.images(shard))]
    missing = missing_from(manifest.images, (samples.images[row].file_name for row in rows))
    if missing:
        found = f"{counted(len(missing), 'picture')} of {len(rows):,} {'is' if len(missing) == 1 else 'are'} missing"
        advice = f"put them there, correct {manifest.listing}, or go on with --on-error skip"
        raise ManifestError(f"{manifest.images}: {found} ({', '.join(some_of(missing))}); {advice}.")


def _require_good_pictures(samples: Samples, manifest: Manifest, features: ImageSet, shards: list[int]) -> None:
    """Refuse to compute shards again without the pictures of their good features, which would be lost."""
    if samples.source != FOLDER or not shards:
        return
    rows = [row for shard in shards for row in range(*features.blocks.images(shard))]
    good = [samples.images[row] for row in rows if samples.images[row].id not in features.failed]
    missing = missing_from(manifest.images, (image.file_name for image in good))
    if missing:
        are = "is" if len(missing) == 1 else "are"
        raise ManifestError(
            f"{manifest.images}: {counted(len(missing), 'picture')} of the shards to repair {are} missing"
            f" ({', '.join(some_of(missing))}), whose features --repair would lose; put them there, or leave it out."
        )


def with_min_count(options: Options, samples: Samples, url: str) -> Options:
    """Return the options with the smallest count of a word: if none is given, that of the words in the store at `url`.

    Where none of its generations has any, or several counts, the number of training captions decides, see
    `words.min_count_for`.
    """
    if options.text != "words" or options.min_count is not None:
        return options
    asked = [features.attributes.get("asked") for features in sets_of_all(url, "captions") if features.kind == "words"]
    counts = {one["min_count"] for one in asked if isinstance(one, dict) and type(one.get("min_count")) is int}
    if len(counts) == 1:
        return replace(options, min_count=counts.pop())
    return replace(options, min_count=min_count_for(len(_training_texts(samples))))


def _training_texts(samples: Samples) -> list[str]:
    training = samples.images[slice(*samples.splits.get("train", (0, 0)))]
    return [caption.text for image in training for caption in image.captions]


def _with_absolute_paths(options: Options) -> Options:
    return replace(
        options,
        visual=_absolute_name(options.visual),
        visual_weights=_absolute(options.visual_weights),
        text=_absolute_name(options.text),
        text_weights=_absolute(options.text_weights),
    )


def _absolute(weights: str) -> str:
    """Return a path as an absolute one, since a worker has another working folder; other names as they are."""
    return str(Path(weights).resolve()) if weights not in ("imagenet", "") and Path(weights).exists() else weights


def _absolute_name(encoder: str | None) -> str | None:
    """Return the name of an encoder with the absolute path of its folder, where it names one."""
    named = encoder is not None and encoder.startswith(HUB)
    return f"{HUB}{_absolute(encoder.removeprefix(HUB))}" if encoder is not None and named else encoder


def load_captions(options: Options, samples: Samples, device: str) -> TextEncoder:
    """Return the caption encoder that the options name; errors as for `encoders.load_text`.

    Raises:
        CacheError: there are no training captions to take a vocabulary from.
    """
    if options.text != "words":
        return options.load_text(device)
    if "train" not in samples.splits:
        raise CacheError(
            f"'{samples.dataset}' has no train split to take a vocabulary from (it has {', '.join(samples.splits)});"
            " map one to 'train' with merge_splits in the manifest, or use --text bert"
        )
    assert options.min_count is not None, "see with_min_count"
    return WordsEncoder.build(_training_texts(samples), options.min_count)


def _facts(
    cache: FeatureCache,
    options: Options,
    exact: Options,
    modality: str,
    encoder: VisualEncoder | TextEncoder,
    device: str,
) -> SetFacts:
    """Return the facts of a set; one that is there, in any generation, keeps its name with weights of another name."""
    recorded = {"device": device, "batch_size": options.batch_size}
    asked = options.asked(modality)
    source = source_of(exact, modality, None if asked is None else asked["weights"])
    facts = SetFacts.of(encoder, options.dtype, recorded, asked, None if source is None else source.to_json())
    return facts.named_as(sets_of_all(cache.url, modality))


def _count(cache: FeatureCache, encoder: TextEncoder, blocks: Blocks) -> tuple[list[int], dict[str, Any]]:
    """Return how many tokens each shard has; and what tokenisation meets and the vocabulary, as attributes."""
    tokens: list[int] = []
    counts = Counter(captions_without_words=0, captions_truncated=0)
    with Progress("tokens", cache.captions, "captions") as progress:
        for shard in range(len(blocks)):
            texts = cache.caption_texts(*cache.captions_of(*blocks.images(shard)))
            ids = encoder.tokenize(texts)
            tokens.append(sum(map(len, ids)))
            counts["captions_without_words"] += sum(not tokenize(text) for text in texts)
            counts["captions_truncated"] += encoder.count_truncated(texts)
            if encoder.vocabulary is not None:
                counts["unknown_tokens"] += sum(caption.count(0) for caption in ids)
            progress.update(len(texts))
    if encoder.vocabulary is None:
        return tokens, {"counts": CaptionCounts(**counts, tokens=sum(tokens)).to_json()}
    found = CaptionCounts(**counts, words=len(encoder.vocabulary), tokens=sum(tokens))
    return tokens, {"counts": found.to_json(), "vocabulary": list(encoder.vocabulary)}
