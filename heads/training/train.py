"""Training a head from cached features, from top to bottom."""

import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from numbers import Integral
from pathlib import Path
from typing import TypeVar

import numpy as np
import torch
from torch import nn

from ...pipeline.device import drawing, pick_device, within_memory
from ...pipeline.encoders.word_vectors import read_word_vectors
from ...pipeline.errors import CacheError, OutOfMemory, RecipeError, RunError
from ...pipeline.reading.batches import Batches, joined_batches
from ...pipeline.reading.features import Features
from ...pipeline.reading.joined_sets import Captions, Images, joined, parts_of
from ...pipeline.reading.placement import Placement, Resident
from ...pipeline.reading.split import AS_A_WHOLE
from ...pipeline.store import OK, CaptionSet, FeatureCache, ImageSet
from ...pipeline.wording import counted
from ..evaluation.evaluation import FEW, too_few, untrained_rsum
from ..model import Model, build_losses, build_model, feature_facts
from ..modules.adapters import RowsAdapter, WordsAdapter
from ..recipes.blocks import Recipe
from ..recipes.names import recipe_names
from ..recipes.recipe import load_recipe
from ..recipes.schema import difference, flat
from ..runs.features import RetokenizedCaptions, Sets, batches_of, on_sets_of, sets_named, views_to_draw
from ..runs.info import RunInfo, absolute, as_told, versions
from ..runs.run import Run, require_free
from .log import require_log
from .objective import Objective, require_whole_batches
from .optimisation import build_optimizer, tied_to_length
from .trainer import Trainer, TrainSummary, stopped_early

S = TypeVar("S", ImageSet, CaptionSet)
R = TypeVar("R", bound=Run)
_WHOLE = "--init-from takes all weights of a run or none: train with its recipe.yaml on features like its own"
_AT_ONCE = 256  # samples that are read at once for statistics
_log = logging.getLogger("xret")


def train(
    store: str,
    recipe: Recipe,
    out: str | Path,
    *,
    device: str = "auto",
    seed: int = 0,
    resume: bool = False,
    also: Sequence[str] = (),
    init_from: str | Path | None = None,
    resident: Resident | None = None,
    after_epoch: Callable[[int, float], None] | None = None,
    title: str | None = "",
) -> TrainSummary:
    """Train the head that `recipe` describes on the features in `store`, and leave a run at `out`.

    The same seed gives the same numbers on the same device, also after a stop or beside other trainings of the process.

    Args:
        store, recipe: the feature cache, of which `train` and `val` are used; a resolved recipe.
        out: the run folder; must not exist, unless `resume`.
        device: ``auto``, ``cpu`` or ``cuda``.
        seed: of the first weights and the order of samples.
        resume: go on after the last step in `out`, also for more epochs; the store may have been moved.
        also: other stores whose split `train` is learnt as well, see `other_sets`.
        init_from: a run whose best weights it begins with, all of which must fit.
        resident: features that other trainings of this process have in memory; what is put there is theirs too.
        after_epoch: is called with each complete epoch, from 1, and its validation RSUM, those before a stop included;
            what it raises ends the training.
        title: of one training among several, see `TrainLog`.

    Raises:
        RecipeError: the recipe does not fit the feature sets, or there is no such seed.
        CacheError: the store, its feature sets or its splits cannot be used.
        RunError: `out` exists or does not fit, memory does not suffice, or the loss is not finite. A folder that
            this call made is removed if its first epoch fails, unless there is something in it to go on from.
    """
    require_log(recipe.runtime.log)
    seed, target = checked_seed(seed), pick_device(device)
    run = opened(Run, out, resume)
    base = first_weights(init_from, run)
    cache = FeatureCache.open(store)
    require_splits(cache)
    sets = sets_named(cache, recipe if run is None else on_sets_of(run, recipe, cache))
    require_places(recipe, sets)
    others = other_sets(also, sets)
    with enough_memory(target, recipe):
        facts = feature_facts(sets[0]), feature_facts(sets[1])
        with drawing(torch.device("cpu"), seed):  # where the weights are drawn: a seed begins alike on every device
            model, losses = build_model(recipe, *facts).to(target), build_losses(recipe, facts[1]).to(target)
        if recipe.data.chunk is not None:
            require_whole_batches(model, "data.chunk")
        trainer = Trainer(model, losses, build_optimizer(model, losses, recipe.optimizer), recipe, target)
        how = target, placement_of(recipe, run), resident, views_to_draw(sets[0], recipe)
        split = joined_batches([batches_of(one, model, "train", *how) for one in (sets, *others)])
        val_split = batches_of(sets, model, "val", target, "stream", resident)
    if len(np.unique(split.caption_image)) < 2:
        raise RunError(f"split 'train' of {cache.url} has a single usable image, which has no negative: add images")
    created = run is None
    run = ready(Run, run, out, facts_of(split, target, seed, base), recipe, split)
    with run.locked(created), enough_memory(target, recipe):
        if not trainer.resume(run):
            if title == "":
                introduce(recipe, split, val_split)
            look_at_data(model, split, base)
            if base is not None:
                take_losses(losses, recipe, base)
        objective = Objective.of(recipe, model, losses, split)
        summary = trainer.train(run, objective, split, val_split, after_epoch, title)
        return replace(summary, untrained_rsum=untrained_rsum(sets, "val", target))


def opened(kind: type[R], out: str | Path, resume: bool) -> R | None:
    """Return the run that is resumed, or None where a new one is made; RunError where one is in its way."""
    if not resume:
        require_free(out)
    return kind(out) if resume and Path(out).exists() else None


def ready(kind: type[R], run: R | None, out: str | Path, info: RunInfo, recipe: Recipe, split: Batches) -> R:
    """Make the run folder of a training on `split`, or check that a resumed one is of the same training.

    Raises:
        RunError: it was begun otherwise.
    """
    if run is None:
        images, captions = split.image_set, split.caption_set
        kind.create(out, info, recipe, feature_facts(images), feature_facts(captions), captions.vocabulary)
        return kind(out)
    longer = recipe.schedule.epochs > run.recipe.schedule.epochs
    as_long = replace(recipe, schedule=replace(recipe.schedule, epochs=run.recipe.schedule.epochs))
    run.refuse_difference(info.facts, as_long if longer else recipe)
    if longer:
        _require_open_end(run)
    if run.info.shuffled != split.shuffled:
        way = "runtime.cache=memory, or free memory" if run.info.shuffled == AS_A_WHOLE else "runtime.cache=stream"
        raise RunError(
            f"{run.path} cannot be resumed: its samples were shuffled {run.info.shuffled}, now {split.shuffled};"
            f" set {way}, and read the features from where they were"
        )
    with run.locked():
        run.record(store=info.store, also_stores=info.also_stores)
        if longer:
            run.lengthen(recipe.schedule.epochs)
    return run


def _require_open_end(run: Run) -> None:
    """Raise RunError where more epochs would have changed those that a run has trained, or none would follow them."""
    again = f"train another run, from these weights with --init-from {run.path} if you like"
    if run.info.finetuned is not None:
        again = f"fine-tune again: `xret finetune {run.path} --out …`"
    schedule, best = run.recipe.schedule, run.info.best_epoch
    if best is not None and stopped_early(run.info.epochs, best, schedule.patience):
        raise RunError(
            f"{run.path} was stopped by schedule.patience={schedule.patience} after epoch {run.info.epochs}; more"
            f" epochs do not change that; {again}"
        )
    if (tied := tied_to_length(run.recipe)) is not None:
        raise RunError(
            f"{run.path} was begun for {counted(schedule.epochs, 'epoch')} and cannot be made longer, because {tied};"
            f" {again}; a run of schedule.name=constant or step without warmup_ratio and swa_epochs can be made longer"
        )


def facts_of(split: Batches, target: torch.device, seed: int, base: Run | None = None) -> RunInfo:
    """Return what is known of a training on `split` before its first epoch; it begins with the weights of `base`."""
    images, captions = parts_of(split.image_set), parts_of(split.caption_set)
    cache, others = split.image_set.cache, [part.image_set.cache for part in split.parts[1:]]
    return RunInfo(
        store=absolute(cache.url),
        also_stores=[other.absolute_url for other in others] or None,
        manifest_sha256=cache.manifest_sha256,
        image_set=as_told([part.name for part in images]),
        text_set=as_told([part.name for part in captions]),
        fingerprints={
            "image": as_told([part.fingerprint for part in images]),
            "text": as_told([part.fingerprint for part in captions]),
        },
        seed=seed,
        also=[f"{other.dataset} {other.manifest_sha256[:8]}" for other in others] or None,
        device=str(target),
        versions=versions(),
        shuffled=split.shuffled,
        init_from=None if base is None else absolute(str(base.path)),
    )


def require_splits(cache: FeatureCache) -> None:
    """Raise CacheError if the store lacks a split that training needs."""
    for split, purpose in (("train", "learn from"), ("val", "choose its best epoch")):
        if split not in cache.splits:
            raise CacheError(
                f"{cache.url} has no split '{split}', which training needs to {purpose} (it has "
                f"{', '.join(cache.splits)}); add a split column to the data set, or map one with merge_splits in its "
                "manifest, and run `xret extract` into another store"
            )


def require_places(recipe: Recipe, sets: Sets) -> None:
    """Log which features have no rows and columns, where positions in these are asked for.

    Raises:
        RecipeError: it is not known how high and wide a map is.
    """
    for side, features in zip(("image", "text"), sets, strict=True):
        if recipe.aggregator[side].get("positions") != "grid":
            continue
        kinds = [part.kind for part in parts_of(features)]
        if not isinstance(features, ImageSet) or kinds != ["grid"]:
            said = "several feature sets together" if len(kinds) > 1 else f"features of kind '{kinds[0]}'"
            _log.warning(
                f"aggregator.{side}.positions=grid: {said} do not lie in rows and columns, and get no positions."
            )
            continue
        counts = set(features.length[features.status == OK].tolist())
        if features.grid is None or counts - {features.rows}:
            raise RecipeError(
                f"aggregator.{side}.positions=grid needs maps of one height and width, and those of '{features.name}'"
                f" have {' or '.join(map(str, sorted(counts)[:3]))} cells; set it to circle or none"
            )


def placement_of(recipe: Recipe, run: Run | None) -> Placement:
    """Return where the features shall lie; a run that was begun in the order of ``stream`` goes on in it."""
    streamed = recipe.runtime.cache == "auto" and run is not None and run.info.shuffled != AS_A_WHOLE
    return "stream" if streamed else recipe.runtime.cache


def other_sets(also: Sequence[str], sets: Sets) -> list[Sets]:
    """Return the feature sets in the stores `also` that are of the same encoders as `sets`.

    Words are tokenised with the vocabulary of `sets`.

    Raises:
        CacheError: a store is named twice, cannot be used, or has no such features, or two have the same samples.
    """
    samples, found = {sets[0].cache.manifest_sha256: sets[0].cache.url}, []
    for url in also:
        cache = FeatureCache.open(url)
        if cache.manifest_sha256 in samples:
            raise CacheError(f"{url} has the same samples as {samples[cache.manifest_sha256]}; leave one --also out")
        samples[cache.manifest_sha256] = url
        found.append(_equal_sets(cache, *sets))
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


def introduce(recipe: Recipe, split: Batches, val: Batches) -> None:
    """Log what differs from the bundled recipe of this name, and whether the splits are too small."""
    if recipe.name in recipe_names():
        bundled = flat(load_recipe(recipe.name).to_dict())
        changed = [f"{key}={value}" for key, value in flat(recipe.to_dict()).items() if bundled.get(key) != value]
        _log.info(f"{recipe.name}{' with ' if changed else ''}{', '.join(changed)}")
    if val.images < FEW:
        _log.info(f"val: {too_few(val.images)} to tell which epoch is best.")
    unit, size = recipe.data.unit, recipe.data.batch_size
    if (items := split.images if unit == "image" else split.captions) < size:
        _log.info(f"data.batch_size={size:,} takes all {items:,} {unit}s at once: an epoch is a single step.")


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
    for branch, parts in ((model.image, split.image_features), (model.text, split.caption_features)):
        for number, adapter in enumerate(branch.adapters):
            if isinstance(adapter, RowsAdapter):
                adapter.measure(partial(_of_set, parts, number), bool(branch.aggregator.uses_local))
    words = model.text.words
    if words is not None and words.vectors is not None:
        load_vectors(words, words.vectors, split.caption_set.vocabulary or ())


def _of_set(parts: Callable[[int], Iterator[Features]], number: int) -> Iterator[Features]:
    """Read a split's features of one of the feature sets once more."""
    return (features.parts[number] for features in parts(_AT_ONCE))


def load_vectors(adapter: WordsAdapter, path: str, vocabulary: tuple[str, ...]) -> None:
    """Begin the text branch's word embeddings with the vectors of a GloVe or fastText file; log how many lack one.

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
    _log.warning(f"words without a vector in {path}: {len(read.missing)} of {len(read.found)}{passed}")


def first_weights(init_from: str | Path | None, run: Run | None) -> Run | None:
    """Return the run whose weights a training begins with; a resumed `run` knows it, and needs it until it is saved.

    Raises:
        RunError: there is no such run, or it has no weights, or `run` was begun with another.
    """
    told = None if run is None else run.info.init_from
    if run is not None and init_from is not None and absolute(str(init_from)) != told:
        how = f"with --init-from {told}" if told else "without --init-from"
        raise RunError(f"{run.path} was begun {how}; resume it so, or take another --out")
    place = init_from or told
    if place is None or (run is not None and run.begun):
        return None
    base = Run(place)
    _ = base.weights
    return base


def take_losses(losses: nn.ModuleDict, recipe: Recipe, base: Run) -> None:
    """Give the terms of a new training what another run's have learned, where both have them with the same values.

    A temperature, for one. Nothing is taken of a run that was handed on without its checkpoint.

    Raises:
        RunError: its checkpoint is damaged.
    """
    checkpoint = base.load_checkpoint()
    if checkpoint is None:
        return
    there = {term: {**block, "weight": 1} for term, block in base.recipe.terms.items()}
    same = {term for term, block in recipe.terms.items() if there.get(term) == {**block, "weight": 1}}
    learned = {key: value for key, value in checkpoint["state"]["losses"].items() if key.partition(".")[0] in same}
    losses.load_state_dict(losses.state_dict() | learned)


def take_weights(model: Model, base: Run, split: Batches) -> None:
    """Give a new model all weights of another run's best epoch.

    Raises:
        RunError: they do not fit, or its words are others.
    """
    vocabulary = split.caption_set.vocabulary
    if base.vocabulary != vocabulary:
        raise RunError(f"{base.path} knows other words than the captions of {split.caption_set.cache.url}; {_WHOLE}")
    there, here = base.model(torch.device("cpu")).state_dict(), model.state_dict()
    shapes = [{name: list(value.shape) for name, value in one.items()} for one in (there, here)]
    if said := difference(shapes[0], shapes[1]):
        raise RunError(f"the weights of {base.path} do not fit: {said}; {_WHOLE}")
    model.load_state_dict(there)
    own = (*parts_of(split.image_set), *parts_of(split.caption_set))
    if [one.fingerprint for one in own] != [*base.info.prints("image"), *base.info.prints("text")]:
        names = ", ".join((*base.info.names("image"), *base.info.names("text")))
        _log.warning(f"--init-from: {base.path} has learnt from other features ({names}).")


@contextmanager
def enough_memory(device: torch.device, recipe: Recipe) -> Iterator[None]:
    """Raise OutOfMemory where memory does not suffice, which also names keys of the recipe that need less."""
    try:
        with within_memory(device):
            yield
    except OutOfMemory as error:
        way = "" if recipe.data.chunk else "; or embed a batch in parts with data.chunk=32, for the same gradients"
        cache = "" if recipe.runtime.cache == "stream" else "; or leave the features there with runtime.cache=stream"
        raise OutOfMemory(f"{error}{way}{cache}") from error.__cause__
