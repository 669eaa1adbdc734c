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

from ..cache import Blocks, CaptionSet, FeatureCache
from ..cache.earlier import equal_sets, image_prints, knows_samples
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
from ..data.manifest import Manifest
from ..data.samples import Samples, tokenize
from ..encoders import HUB, TextEncoder, VisualEncoder, as_stored, turns_upright
from ..encoders.words import WordsEncoder
from ..errors import CacheError
from ..progress import Progress
from .command import command_of
from .options import Options, at_commits, moved_to, source_of
from .summary import CaptionCounts, Extraction, SetSummary
from .updates.reuse import Sources, addresses
from .updates.update import Place, finish, place_of


def extract(manifest: Manifest, url: str, options: Options) -> Extraction:
    """Encode a data set into the cache at `url`; what is there already is kept and not computed again.

    Args:
        manifest: the data set.
        url: local path or fsspec URL of the cache.
        options: how.

    Raises:
        ManifestError: the data set cannot be read.
        EncoderError: an encoder cannot be made.
        SampleError: an image cannot be read, and `on_error` is ``fail``.
        OutputError: the store cannot be written.
        CacheError: the store holds something else, or a value does not fit the dtype.
    """
    skip, anew = options.on_error == "skip", options.repair or options.update
    samples = find_samples(manifest, url, skip=skip, anew=anew)
    place = place_of(url, samples, manifest, options.update)
    url = place.url
    splits = choose_splits(samples, options.splits)
    options = _with_absolute_paths(options)
    if not (options.repair or place.is_new) and (found := _finished(samples, url, options, splits)) is not None:
        return found
    require_place(url, samples, is_new=place.is_new)  # a finished store may lie where nothing can be written
    from ..device import pick_device
    from .filling import fill
    from .tasks import Job, write_caption_shard, write_image_shard

    device = str(pick_device(options.device))
    # Made before the store, so that a wrong name or file leaves nothing.
    visual = options.load_visual(device) if options.visual else None
    text = load_captions(options, samples, device) if options.text else None
    exact = at_commits(options, visual, text)
    command = command_of(manifest, exact)
    how: dict[str, Any] = {"workers": options.workers, "scheduler": options.scheduler, "repair": options.repair}
    sets, counts = [], None
    with open_for_writing(url, samples, manifest.protocols, repair=options.repair, is_new=place.is_new) as cache:
        job = Job(cache.address, "", str(manifest.images.resolve()), options, cache.store.writer)
        if visual is not None:
            options, visual = as_begun(cache, options, visual, device)
            facts = replace(_facts(cache, options, exact, "images", visual, device), command=command)
            length, sources = _from_earlier(cache, facts, f"images/{facts.name}", options, place)
            images = image_set_to_fill(cache, facts, visual.rows, length, visual.extras, options.views, digests=True)
            of_images = replace(job, options=options, set_name=images.name, sources=sources)
            sets.append(fill(images, write_image_shard, lambda _: of_images, splits, **how))
        if text is not None:
            facts = replace(_facts(cache, options, exact, "captions", text, device), command=command)
            length, sources = _from_earlier(cache, facts, f"captions/{facts.name}", options, place)
            captions = caption_set_to_fill(cache, facts, length, partial(_count, cache, text))
            of_captions = replace(job, set_name=captions.name, sources=sources)
            sets.append(fill(captions, write_caption_shard, lambda _: of_captions, splits, **how))
            counts = CaptionCounts(**captions.attributes["counts"])
        if place.is_new:
            finish(cache)
        return Extraction(cache.dataset, cache.url, cache.images, cache.captions, tuple(sets), counts)


def as_begun(
    cache: FeatureCache, options: Options, encoder: VisualEncoder, device: str
) -> tuple[Options, VisualEncoder]:
    """Return options and encoder of images as a cache has their set, which goes on as an earlier version began it.

    Earlier versions did not apply EXIF orientations. A cache that has the set of today, too, goes on with that one.
    """
    if not turns_upright(encoder.identity):
        return options, encoder
    identities, there = (as_stored(encoder.identity), encoder.identity), image_prints(cache)
    old, new = (fingerprint(identity, options.dtype) for identity in identities)
    if old not in there or new in there:
        return options, encoder
    note = (
        f"Note: an earlier version made '{encoder.name}@{old[:8]}' without applying EXIF orientations, and it goes on"
        " so; a set that is made anew, as in another --store, applies them."
    )
    print(note, file=sys.stderr)
    options = replace(options, upright=False)
    return options, options.load_visual(device)


def _from_earlier(
    cache: FeatureCache, facts: SetFacts, path: str, options: Options, place: Place
) -> tuple[int | None, Sources | None]:
    """Return how many images a shard of a set gets, and which sets of other generations have features of it.

    It has as many as before: shards of one length can be shared. Shards that are repaired are computed; a
    new generation has none, and with `repair` shares no files with others, which may be damaged.
    """
    equal = equal_sets(cache, path, facts.fingerprint)
    length = options.shard_images or (equal[0].blocks.length if equal else None)
    known = [features for features in equal if knows_samples(features)]
    for features in equal:
        if features.channels is not None and features not in known:
            print(
                f"Note: '{features.name}' of generation {features.cache.generation} does not say of which files it is;"
                " all its pictures are computed anew.",
                file=sys.stderr,
            )
    if not known or (options.repair and not place.is_new):
        return length, None
    return length, Sources(addresses(known), path, share=not options.repair)


def _finished(samples: Samples, url: str, options: Options, splits: list[str]) -> Extraction | None:
    """Return the summary of an extraction that has nothing left to do, or None if it may have."""
    cache = find_cache(url, samples)
    if cache is None:
        return None
    summaries, counts, moved = [], None, []
    for modality in (m for m, wanted in (("images", options.visual), ("captions", options.text)) if wanted):
        asked = options.asked(modality)
        sets = [cache.set_at(path) for path in cache.set_paths(modality)]
        there = [features for features in sets if asked and features.attributes.get("asked") == asked]
        if asked is None or len(there) != 1:
            return None
        (features,) = there
        shards = [shard for split in splits for shard in features.blocks.of_split(split)]
        if not features.done()[shards].all():
            return None
        reasons = tuple(features.failed.values())
        summaries.append(SetSummary(features.name, shards_before=len(shards), failed=len(reasons), reasons=reasons))
        if isinstance(features, CaptionSet):
            counts = CaptionCounts(**features.attributes["counts"])
        if told := moved_to(options, modality, asked["weights"], features.attributes):
            moved.append((features, told))
    for features, told in moved:
        record_place(features, told)
    return Extraction(cache.dataset, cache.url, cache.images, cache.captions, tuple(summaries), counts)


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
        raise CacheError(f"'{samples.dataset}' has no train split to take a vocabulary from; use --text bert")
    training = samples.images[slice(*samples.splits["train"])]
    return WordsEncoder.build(caption.text for image in training for caption in image.captions)


def _facts(
    cache: FeatureCache,
    options: Options,
    exact: Options,
    modality: str,
    encoder: VisualEncoder | TextEncoder,
    device: str,
) -> SetFacts:
    """Return the facts of a set; one that is there keeps its name, whatever its weights are called now."""
    recorded = {"device": device, "batch_size": options.batch_size}
    asked = options.asked(modality)
    source = source_of(exact, modality, None if asked is None else asked["weights"])
    facts = SetFacts.of(encoder, options.dtype, recorded, asked, None if source is None else source.to_json())
    return facts.named_as_in(cache, modality)


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
