"""Before the first step of a training: the features it reads, the run folder, and the first word vectors."""

import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from numbers import Integral
from pathlib import Path
from typing import TypeVar

import torch

from ...pipeline.encoders.word_vectors import read_word_vectors
from ...pipeline.errors import CacheError, RecipeError, RunError
from ...pipeline.reading.batches import Batches
from ...pipeline.reading.features import Features
from ...pipeline.reading.joined_sets import Captions, Images, joined, parts_of
from ...pipeline.reading.placement import Placement
from ...pipeline.reading.split import AS_A_WHOLE
from ...pipeline.store import OK, CaptionSet, FeatureCache, ImageSet
from ...pipeline.wording import counted
from ..model import Model, feature_facts
from ..modules.adapters import RowsAdapter, WordsAdapter
from ..recipes.blocks import Recipe
from ..runs.features import RetokenizedCaptions, Sets, on_own_sets, sets_named
from ..runs.files import sha256_of
from ..runs.info import RunInfo, absolute, as_told, versions
from ..runs.run import Run
from .optimisation import tied_to_length
from .state import stopped_early, take_weights

S = TypeVar("S", ImageSet, CaptionSet)
_AT_ONCE = 256  # samples that are read at once for statistics


def require_splits(cache: FeatureCache) -> None:
    """Raise CacheError if the store lacks a split that training needs."""
    for split, purpose in (("train", "learn from"), ("val", "choose its best epoch")):
        if split not in cache.splits:
            raise CacheError(
                f"{cache.url} has no split '{split}', which training needs to {purpose} (it has "
                f"{', '.join(cache.splits)}); add a split column to the data set, or map one with merge_splits in its "
                "manifest, and run `xret extract` into another store"
            )


def sets_of(cache: FeatureCache, recipe: Recipe, out: str | Path, resume: bool) -> Sets:
    """Return the feature sets that the recipe names; what a run's own are called means these when it goes on.

    Raises:
        CacheError: none or several fit.
    """
    if resume and Path(out).exists():
        recipe = on_sets_of(Run(out), recipe, cache)
    return sets_named(cache, recipe)


def on_sets_of(run: Run, recipe: Recipe, cache: FeatureCache) -> Recipe:
    """Return the recipe with the feature sets of a run, where it means them; see `on_own_sets`."""
    return on_own_sets(recipe, cache, image=run.info.image_set, text=run.info.text_set)


def require_places(recipe: Recipe, sets: Sets) -> None:
    """Say which features have no rows and columns, where positions in these are asked for.

    Raises:
        RecipeError: it is not known how high and wide a map is.
    """
    for side, features in zip(("image", "text"), sets, strict=True):
        if recipe.aggregator[side].get("positions") != "grid":
            continue
        kinds = [part.kind for part in parts_of(features)]
        if not isinstance(features, ImageSet) or kinds != ["grid"]:
            said = "several feature sets together" if len(kinds) > 1 else f"features of kind '{kinds[0]}'"
            without = f"{said} do not lie in rows and columns, and get no positions"
            print(f"aggregator.{side}.positions=grid: {without}.", file=sys.stderr)
            continue
        counts = set(features.length[features.status == OK].tolist())
        if features.grid is None or counts - {features.rows}:
            raise RecipeError(
                f"aggregator.{side}.positions=grid needs maps of one height and width, and those of '{features.name}'"
                f" have {' or '.join(map(str, sorted(counts)[:3]))} cells; set it to circle or none"
            )


def placement_of(out: str | Path, recipe: Recipe, resume: bool) -> Placement:
    """Return where the features shall lie; a run that was begun in the order of ``stream`` goes on in it."""
    goes_on = recipe.runtime.cache == "auto" and resume and Path(out).exists()
    streamed = goes_on and Run(out).info.shuffled != AS_A_WHOLE
    return "stream" if streamed else recipe.runtime.cache


def other_sets(also: Sequence[str], sets: Sets) -> list[Sets]:
    """Return the feature sets in the stores `also` that are of the same encoders as `sets`.

    Words are tokenised with the vocabulary of `sets`.

    Raises:
        CacheError: a store is named twice, cannot be used, or has no such features, or two have the same samples.
    """
    own = sets[0].cache
    seen, samples, found = {absolute(own.url): own}, {own.manifest_sha256: own.url}, []
    for url in also:
        cache = FeatureCache.open(url)
        before = seen.setdefault(absolute(cache.url), cache)
        if before is not cache:
            raise CacheError(f"{url} is named twice; leave one --also out")
        found.append(_equal_sets(cache, *sets))
        if cache.manifest_sha256 in samples:
            raise CacheError(f"{url} has the same samples as {samples[cache.manifest_sha256]}; leave one --also out")
        samples[cache.manifest_sha256] = url
    return found


def _equal_sets(cache: FeatureCache, image_set: Images, caption_set: Captions) -> Sets:
    if "train" not in cache.splits:
        raise CacheError(
            f"{cache.url} cannot be joined to {image_set.cache.url}: it has no split 'train'; it has "
            f"{', '.join(cache.splits)}"
        )
    images = [cache.image_set(name) for name in cache.set_names("images")]
    captions = [cache.caption_set(name) for name in cache.set_names("captions")]
    return (
        joined([_equal_to(own, images, cache, "images") for own in parts_of(image_set)]),
        joined([_equal_captions(own, captions, cache) for own in parts_of(caption_set)]),
    )


def _equal_captions(own: CaptionSet, there: Sequence[CaptionSet], cache: FeatureCache) -> CaptionSet:
    """Return a caption set equal to `own`; words are tokenised where there is none."""
    if own.vocabulary is not None and own.fingerprint not in [found.fingerprint for found in there]:
        return RetokenizedCaptions(cache, own.vocabulary)
    return _equal_to(own, there, cache, "captions")


def _equal_to(own: S, there: Sequence[S], cache: FeatureCache, what: str) -> S:
    same = [found for found in there if found.fingerprint == own.fingerprint]
    if not same:
        names = ", ".join(found.name for found in there) or "none"
        raise CacheError(
            f"{cache.url} cannot be joined to {own.cache.url}: it has no features of {what} equal to '{own.name}' "
            f"(there: {names}); extract them with the same options"
        )
    return same[0]


def checked_seed(seed: int) -> int:
    """Return a seed, of NumPy too, as Python has it; RecipeError where torch or NumPy does not take it."""
    if not isinstance(seed, Integral) or not 0 <= seed < 2**63:
        raise RecipeError(f"seed must be a whole number from 0 to 2**63 - 1, not {seed!r}")
    return int(seed)


def facts_of(split: Batches, target: torch.device, seed: int, base: Run | None = None) -> RunInfo:
    """Return what is known of a training on `split` before its first epoch; it begins with the weights of `base`."""
    image_set, caption_set = split.image_set, split.caption_set
    cache, others = image_set.cache, [part.image_set.cache for part in split.parts[1:]]
    return RunInfo(
        store=absolute(cache.url),
        also_stores=[other.absolute_url for other in others],
        manifest_sha256=cache.manifest_sha256,
        image_set=as_told([part.name for part in parts_of(image_set)]),
        text_set=as_told([part.name for part in parts_of(caption_set)]),
        fingerprints={
            "image": as_told([part.fingerprint for part in parts_of(image_set)]),
            "text": as_told([part.fingerprint for part in parts_of(caption_set)]),
        },
        seed=seed,
        # What a joined data set is known by where its store may be moved.
        also=[f"{other.dataset} {other.manifest_sha256[:8]}" for other in others] or None,
        device=str(target),
        versions=versions(),
        shuffled=split.shuffled,
        init_from=None if base is None else {"run": absolute(str(base.path)), "sha256": sha256_of(base.weights)},
    )


R = TypeVar("R", bound=Run)


def open_run(
    kind: type[R],
    out: str | Path,
    info: RunInfo,
    recipe: Recipe,
    split: Batches,
    *,
    resume: bool,
) -> tuple[R, bool]:
    """Make the run folder of a training on `split`, or open it to go on; return whether it was made.

    Raises:
        RunError: it is there and shall not be resumed, or was begun otherwise.
    """
    created = not (resume and Path(out).exists())
    if created:
        images, captions = split.image_set, split.caption_set
        kind.create(out, info, recipe, feature_facts(images), feature_facts(captions), captions.vocabulary)
    run = kind(out)
    if not created:
        longer = recipe.schedule.epochs > run.recipe.schedule.epochs
        as_long = replace(recipe, schedule=replace(recipe.schedule, epochs=run.recipe.schedule.epochs))
        run.refuse_difference(info.facts, as_long if longer else recipe)
        if longer:
            _require_open_end(run)
        _refuse_other_order(run, split, recipe)
        moved = (info.store, info.also_stores) != (run.info.store, run.info.also_stores)
        if moved or longer:
            with run.held(created=False):
                run.record(store=info.store, also_stores=info.also_stores)
                run.lengthen(recipe)
    return run, created


def _require_open_end(run: Run) -> None:
    """Raise RunError where more epochs would have changed those that a run has trained, or none would follow them."""
    again = f"train another run, from these weights with --init-from {run.path} if you like"
    if run.info.finetuned is not None:
        again = f"fine-tune again: `xret finetune {run.path} --out …`"
    schedule, epochs, best = run.recipe.schedule, len(run.metrics()), run.info.best_epoch
    if best is not None and stopped_early(epochs, best, schedule.patience):
        raise RunError(
            f"{run.path} was stopped by schedule.patience={schedule.patience} after epoch {epochs}; more epochs do not"
            f" change that; {again}"
        )
    if (tied := tied_to_length(run.recipe)) is not None:
        raise RunError(
            f"{run.path} was begun for {counted(schedule.epochs, 'epoch')} and cannot be made longer, because {tied};"
            f" {again}; a run of schedule.name=constant or step without warmup_ratio and swa_epochs can be made longer"
        )


def _refuse_other_order(run: Run, split: Batches, recipe: Recipe) -> None:
    """Raise RunError where an epoch of `split` mixes its samples otherwise than those of the run before."""
    then, now = run.info.shuffled, split.shuffled
    if then == now:
        return
    way = "set runtime.cache=stream"
    if then == AS_A_WHOLE:
        way = "set runtime.cache=stream, or free memory"
    elif now != AS_A_WHOLE:
        way = "read the features from where they were, on a local disk or in an object store"
    raise RunError(
        f"{run.path} cannot be resumed: its samples were shuffled {then}, and with runtime.cache="
        f"{recipe.runtime.cache} they now are {now}; {way}"
    )


def look_at_data(model: Model, split: Batches, base: Run | None = None) -> None:
    """Give a new model the weights of `base`, or what it takes from its training split.

    The latter are statistics of the features, and vectors of the words.

    Raises:
        VectorsError, RecipeError: as `load_vectors`.
        RunError: as `take_weights`.
    """
    if base is not None:
        take_weights(model, base, split)
        return
    _measure_channels(model, split)
    words = model.text.words
    if words is not None and words.vectors is not None:
        load_vectors(words, words.vectors, split.caption_set.vocabulary or ())


def _measure_channels(model: Model, split: Batches) -> None:
    """Give the adapters that standardise their features the split's statistics, for which it is read once more."""
    for branch, parts in ((model.image, split.image_features), (model.text, split.caption_features)):
        for number, adapter in enumerate(branch.adapters):
            if isinstance(adapter, RowsAdapter):
                adapter.measure(partial(_of_set, parts, number), bool(branch.aggregator.uses_local))


def _of_set(parts: Callable[[int], Iterator[Features]], number: int) -> Iterator[Features]:
    """Read a split's features of one of the feature sets anew."""
    return (features.parts[number] for features in parts(_AT_ONCE))


def load_vectors(adapter: WordsAdapter, path: str, vocabulary: tuple[str, ...]) -> None:
    """Begin the text branch's word embeddings with the vectors of a GloVe or fastText file; say how many lack one.

    Raises:
        VectorsError: the file cannot be read.
        RecipeError: its vectors are of another width than `adapter.words.word_dim`.
    """
    read = read_word_vectors(path, vocabulary)
    try:
        adapter.load_vectors(torch.from_numpy(read.vectors), torch.from_numpy(read.found))
    except ValueError as error:
        raise RecipeError(f"adapter.words: {error}") from error
    passed = f"; undecodable lines, passed over: {read.undecodable}" if read.undecodable else ""
    print(f"words without a vector in {path}: {len(read.missing)} of {len(read.found)}{passed}", file=sys.stderr)
