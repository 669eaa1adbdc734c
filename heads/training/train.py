"""Training a head from cached features, from top to bottom."""

import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from functools import lru_cache, partial
from numbers import Integral
from pathlib import Path
from typing import TypeVar

import numpy as np
import torch
from torch import nn

from ...pipeline.device import drawing, pick_device, within_memory
from ...pipeline.errors import CacheError, RecipeError, RunError
from ...pipeline.reading.batches import Batches, joined_batches
from ...pipeline.reading.features import Features
from ...pipeline.reading.joined_sets import Images, parts_of
from ...pipeline.reading.placement import Placement, Resident
from ...pipeline.reading.split import AS_A_WHOLE
from ...pipeline.store import OK, FeatureCache, ImageSet
from ...pipeline.store.leaks import find_leaks
from ...pipeline.wording import counted
from ..evaluation.closed_form import find_base
from ..evaluation.evaluation import FEW, evaluate_untrained, too_few
from ..model import Model, build_losses, build_model, feature_facts, fitted, term_of
from ..recipes.blocks import Recipe
from ..recipes.names import recipe_names
from ..recipes.own import remember
from ..recipes.recipe import load_recipe, without_effect
from ..recipes.schema import difference
from ..recipes.settings import Settings
from ..runs.features import Sets, batches_of, equal_sets, sets_named, sets_of_run, views_to_draw
from ..runs.info import RunInfo, absolute
from ..runs.run import Run, require_free
from .callbacks import Callback, require_log
from .objective import Objective, require_whole_batches
from .optimisation import build_optimizer, tied_to_length
from .stacked import Stack, StackedTrainer
from .teacher import Teacher, taught
from .trainer import Trainer, TrainSummary, stopped_early
from .word_vectors import read_word_vectors

R = TypeVar("R", bound=Run)
_WHOLE = "--init-from takes all weights of a run or none: train with its recipe.yaml on features like its own"
_BATCH = 256  # samples that are read together for statistics
_log = logging.getLogger("xret")


def train(
    store: str | Path | Sequence[str | Path],
    recipe: str | Path | Recipe,
    out: str | Path,
    *,
    settings: Settings | None = None,
    device: str = "auto",
    seed: int = 0,
    init_from: str | Path | None = None,
    distil: str | Path | None = None,
    resume: bool = False,
    callbacks: Sequence[Callback] = (),
    trust: bool = False,
    resident: Resident | None = None,
    title: str | None = "",
    stack: Stack | None = None,
) -> TrainSummary:
    """Train a head on the features in a store, and keep its best epoch by validation RSUM (``xret train-head``).

    The same seed gives the same numbers on the same device, also after a stop or beside other trainings of the process.

    Args:
        store: the feature store; its splits ``train`` and ``val`` are used. With several, which have features of the
            same encoders, all splits ``train`` are learnt together, and the first store validates.
        recipe: a name that ``xret recipes`` lists, the path of a YAML file, or a recipe that is loaded.
        out: the run folder; must not exist, unless `resume`.
        settings: changes of a recipe that is named, such as ``{"model.dim": 256}``.
        device: ``auto``, ``cpu`` or ``cuda``.
        seed: of the first weights and the order of samples.
        init_from: a run whose best weights it begins with, all of which must fit.
        distil: a run, perhaps an average, on the same store: the head also learns its scores of each batch, by
            `losses.Distillation`, which the recipe gets with a weight of 1 where it has none.
        resume: continue after the last step, also for more epochs.
        callbacks: called at steps and epochs, see `Callback`.
        trust: let parts of somebody's own, in a run or its `recipe.yaml` that was not trained here, run code.
        resident: features that other trainings of this process share in memory.
        title: of one training among several, see `TrainLog`.
        stack: computes its steps with those of others, see `Stack`.

    Raises:
        RecipeError: the recipe, its settings or the feature sets do not fit.
        CacheError: the store cannot be used.
        RunError: `out` exists or does not fit, memory does not suffice, or the loss is not finite.
    """
    stores = [str(store)] if isinstance(store, str | Path) else [*map(str, store)]
    if not stores:
        raise CacheError("there is no store to learn from; name one")
    if not isinstance(recipe, Recipe):
        recipe = load_recipe(str(recipe), settings or {}, trust)
    require_log(recipe.runtime.log)
    seed, target = checked_seed(seed), pick_device(device)
    remember(recipe.code)  # of a worker, which did not read the recipe, and may have no place for notes
    run = opened(Run, out, resume, trust)
    base = first_weights(init_from, run, trust)
    distil = _teacher_of(distil, run, stores)
    recipe = taught(recipe, distil)
    cache = FeatureCache.open(stores[0])
    require_splits(cache)
    sets = sets_named(cache, recipe.data.image, recipe.data.text) if run is None else sets_of_run(run, cache)
    recipe = fitted(recipe, *map(feature_facts, sets))
    for warning in without_effect(settings or {}, recipe).values():
        _log.warning(warning)
    require_places(recipe, sets)
    if run is None:
        begun = None if base is None else absolute(str(base.path))
        info = RunInfo.of(
            *sets, recipe=recipe, store=stores[0], seed=seed, device=str(target), init_from=begun, distil=distil
        )
    else:
        info = replace(run.info, recipe=recipe, seed=seed)
    others = other_sets(stores[1:], info, cache)
    with enough_memory(target, recipe):
        with drawing(torch.device("cpu"), seed):  # where the weights are drawn: a seed begins alike on every device
            model = build_model(recipe, info.image_facts, info.text_facts).to(target)
            losses = build_losses(recipe, info.text_facts).to(target)
        if recipe.data.chunk is not None:
            require_whole_batches(model, "data.chunk")
        how = {"resident": resident, "views": views_to_draw(sets[0], recipe), "share": recipe.data.share}
        place = placement_of(recipe, run)
        split = joined_batches(
            [batches_of(one, model, "train", target, placement=place, **how) for one in (sets, *others)]
        )
        val_split = batches_of(sets, model, "val", target, resident=resident)
        objective = Objective(recipe, model, losses, split)
        if distil is not None:
            objective.teacher = Teacher(distil, split, target, trust)
        learning = objective, build_optimizer(model, losses, recipe.optimizer), target
        trainer = Trainer(*learning) if stack is None else StackedTrainer(stack, *learning)
    require_negatives(split)
    created = run is None
    run = ready(Run, run, out, on_split(info, split))
    leaks = find_leaks(cache) if title == "" else None
    with run.locked(created), enough_memory(target, recipe):
        if not trainer.resume(run):
            if leaks is not None:
                introduce(info, split, val_split)
                if leaks.sentence:
                    _warn_once(f"{cache.url}: {leaks.sentence}.")
            _begin(objective, base, split, val_split, logging.INFO if title == "" else logging.DEBUG)
        summary = trainer.train(run, split, val_split, callbacks, title)
        untrained = evaluate_untrained(sets, "val", protocol="full", device=str(target))
        rsum = None if untrained is None else untrained.results[0].rsum
        return replace(summary, leaks=leaks, untrained_rsum=rsum)


def _begin(objective: Objective, base: Run | None, split: Batches, val: Batches, level: int) -> None:
    """Give a new head what it takes from its data, logged at `level`, or from another run."""
    if base is None:
        look_at_data(objective.model, split)
        fit_residual(objective.model, objective.recipe, split, val, level)
    else:
        take_weights(objective.model, base, split)
        take_losses(objective.losses, objective.recipe, base)


def require_negatives(split: Batches) -> None:
    """Raise RunError if a training split has a single image."""
    if len(np.unique(split.caption_image)) < 2:
        url = split.parts[0].image_set.cache.url
        raise RunError(f"split 'train' of {url} has a single usable image, which has no negative: add images")


@lru_cache(16)
def _warn_once(sentence: str) -> None:
    """Warn, but not again for each of several trainings of this process."""
    _log.warning(sentence)


def opened(kind: type[R], out: str | Path, resume: bool, trust: bool = False) -> R | None:
    """Return the run that is resumed, or None where a new one is made; RunError where one is in its way."""
    if not resume:
        require_free(out)
    run = kind(out, trust) if resume and Path(out).exists() else None
    if run is not None and run.info.average is not None:
        raise RunError(f"{out} is an average of runs, which nothing trains; take another --out")
    return run


def on_split(info: RunInfo, split: Batches) -> RunInfo:
    """Return what is known of a training with the stores that it learns from."""
    cache, *others = (part.image_set.cache for part in split.parts)
    return replace(
        info,
        store=absolute(cache.url),
        manifest_sha256=cache.manifest_sha256,
        also=[f"{other.dataset} {other.manifest_sha256[:8]}" for other in others] or None,
        also_stores=[other.absolute_url for other in others] or None,
        skipped=split.skipped,
        shuffled=split.shuffled,
    )


def ready(kind: type[R], run: R | None, out: str | Path, info: RunInfo) -> R:
    """Make the run folder of a training, or check that a resumed one is of the same training.

    Raises:
        RunError: it was begun otherwise.
    """
    if run is None:
        return kind.create(out, info)
    then, now = run.info.lasting, info.lasting
    longer = info.recipe.schedule.epochs > run.recipe.schedule.epochs
    if said := difference(then, now, ["schedule.epochs"] if longer else []):
        raise RunError(f"{run.path} cannot be resumed, it was begun otherwise: {said}")
    if longer:
        _require_open_end(run)
    with run.locked():
        run.record(store=info.store, also_stores=info.also_stores)
        if longer:
            run.record(recipe=replace(run.recipe, schedule=info.recipe.schedule))
    return run


def _require_open_end(run: Run) -> None:
    """Raise RunError where more epochs would have changed those that a run has trained, or none would follow them."""
    schedule, best, why = run.recipe.schedule, run.info.best_epoch, tied_to_length(run.recipe)
    if best is not None and stopped_early(run.info.epochs, best, schedule.patience):
        why = f"schedule.patience={schedule.patience} stopped it after epoch {run.info.epochs}"
    if why is not None:
        again = f"`xret finetune {run.path} --out …`" if run.info.finetuned else f"--init-from {run.path}"
        raise RunError(
            f"{run.path} was begun for {counted(schedule.epochs, 'epoch')} and cannot be made longer, because {why};"
            f" begin another run with {again}"
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
    """Log which features have no rows and columns for positions in a grid; RecipeError if maps are of several sizes."""
    for side, features in zip(("image", "text"), sets, strict=True):
        if recipe.aggregator[side].get("positions") != "grid":
            continue
        if not isinstance(features, ImageSet) or features.kind != "grid":
            _log.warning(
                f"aggregator.{side}.positions=grid: {features.name} has no rows and columns, and gets no positions"
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


def other_sets(also: Sequence[str], info: RunInfo, cache: FeatureCache) -> list[Sets]:
    """Return the feature sets in the stores `also` that are equal to those in `info`, which are of `cache`.

    Raises:
        CacheError, RunError: a store cannot be used or has no such features, or two have the same samples.
    """
    samples, found = {cache.manifest_sha256: cache.url}, []
    for url in also:
        other = FeatureCache.open(url)
        if other.manifest_sha256 in samples:
            raise CacheError(f"{url} has the same samples as {samples[other.manifest_sha256]}; leave one out")
        samples[other.manifest_sha256] = url
        found.append(equal_sets(info, other, cache.url))
    return found


def checked_seed(seed: int) -> int:
    """Return a seed, of NumPy too, as Python has it; RecipeError where torch or NumPy does not take it."""
    if not isinstance(seed, Integral) or not 0 <= seed < 2**63:
        raise RecipeError(f"seed must be a whole number from 0 to 2**63 - 1, not {seed!r}")
    return int(seed)


def introduce(info: RunInfo, split: Batches, val: Batches) -> None:
    """Log what differs from the bundled recipe of this name, what of it does nothing, and what is too small."""
    recipe = info.recipe
    if recipe.name in recipe_names():
        bundled, kinds = load_recipe(recipe.name).flat(), ("data.image_kind", "data.text_kind")
        changed = [f"{key}={value}" for key, value in recipe.flat().items() if bundled.get(key) != value]
        changed = [text for text in changed if not text.startswith((*kinds, "code."))]
        _log.info(f"{recipe.name}{' with ' if changed else ''}{', '.join(changed)}")
    held = val.parts[0].image_set
    for other in split.parts[1:]:
        for name in (name for name in held.cache.splits if name != "train"):
            if count := len(_pictures(other.image_set, "train") & _pictures(held, name)):
                _log.warning(
                    f"{other.image_set.cache.url} teaches {counted(count, 'picture')} of split '{name}' of"
                    f" {held.cache.url}, so that recalls on that split come out too high"
                )
    if val.images < FEW:
        _log.info(f"val: {too_few(val.images)} to tell which epoch is best.")
    unit, size = recipe.data.unit, recipe.data.batch_size
    if (items := split.images if unit == "image" else split.captions) < size:
        _log.info(f"data.batch_size={size:,} takes all {items:,} {unit}s at once: an epoch is a single step.")


def _pictures(features: Images, split: str) -> set[bytes]:
    """Return a split's pictures by the digests of their files; none where they were imported."""
    digests = parts_of(features)[0].digests[features.rows_of(split)]
    return {digest.tobytes() for digest in digests if digest.any()}


def look_at_data(model: Model, split: Batches) -> None:
    """Give a new model what it takes from its training split: statistics of the features, and vectors of the words.

    Raises:
        VectorsError: the GloVe or fastText file cannot be read.
        RecipeError: its vectors are of another width than `adapter.words.word_dim`.
    """
    for branch, parts in ((model.image, split.image_features), (model.text, split.caption_features)):
        for number, adapter in (*enumerate(branch.adapters), *enumerate(branch.twins)):
            adapter.measure(partial(_of_set, parts, number), branch.aggregator.uses_local)
    words = [one for one in (*model.text.adapters, *model.text.twins) if one.vectors is not None]
    if words and words[0].vectors is not None:
        read = read_word_vectors(words[0].vectors, split.caption_set.vocabulary or ())
        try:
            for one in words:
                one.load_vectors(torch.from_numpy(read.vectors), torch.from_numpy(read.found))
        except ValueError as error:
            raise RecipeError(f"adapter.words: {error}") from error
        _log.warning(f"words without a vector in {words[0].vectors}: {len(read.missing)} of {len(read.found)}")


def fit_residual(model: Model, recipe: Recipe, split: Batches, val: Batches, level: int) -> None:
    """Give a new model the closed form that its head is added to, where the recipe has one, and log it at `level`."""
    if recipe.model.residual in ("cca", "procrustes"):
        found = find_base(model, split, val, rotate=recipe.model.residual == "procrustes")
        _log.log(level, f"closed form: ridge {found.ridge:g}, power {found.power:g}, val RSUM {found.rsum:.1f}")


def _of_set(parts: Callable[[int], Iterator[Features]], number: int) -> Iterator[Features]:
    """Read a split's features of one of the feature sets once more."""
    return (features.parts[number] for features in parts(_BATCH))


def _teacher_of(distil: str | Path | None, run: Run | None, stores: Sequence[str]) -> str | None:
    """Return the run that a training learns from; a resumed `run` knows it. RunError if it was begun with another."""
    given = None if distil is None else absolute(str(distil))
    if given is not None and len(stores) > 1:
        raise RunError("a teacher is of one store: train with --distil on a single one")
    known = None if run is None else run.info.distil
    if run is not None and given not in (None, known):
        how = f"with --distil {known}" if known else "without --distil"
        raise RunError(f"{run.path} was begun {how}; resume it so, or take another --out")
    return given if run is None else known


def first_weights(init_from: str | Path | None, run: Run | None, trust: bool = False) -> Run | None:
    """Return the run whose weights a training begins with; a resumed `run` knows it, and needs it until it is saved.

    Raises:
        RunError: there is no such run, it has no weights, or `run` was begun with another.
    """
    known = None if run is None else run.info.init_from
    if run is not None and init_from is not None and absolute(str(init_from)) != known:
        how = f"with --init-from {known}" if known else "without --init-from"
        raise RunError(f"{run.path} was begun {how}; resume it so, or take another --out")
    place = known if init_from is None else init_from
    if place is None or (run is not None and run.begun):
        return None
    base = Run(place, trust)
    _ = base.weights
    return base


def take_weights(model: Model, base: Run, split: Batches) -> None:
    """Give a new model all weights of another run's best epoch; RunError if they do not fit, or words are others."""
    if base.vocabulary != split.caption_set.vocabulary:
        raise RunError(f"{base.path} knows other words than the captions of {split.caption_set.cache.url}; {_WHOLE}")
    there, here = base.model(torch.device("cpu")).state_dict(), model.state_dict()
    shapes = [{name: list(value.shape) for name, value in one.items()} for one in (there, here)]
    if said := difference(shapes[0], shapes[1]):
        raise RunError(f"the weights of {base.path} do not fit: {said}; {_WHOLE}")
    model.load_state_dict(there)
    own = (*parts_of(split.image_set), *parts_of(split.caption_set))
    if [one.fingerprint for one in own] != [*base.info.fingerprints("image"), *base.info.fingerprints("text")]:
        names = ", ".join((*base.info.names("image"), *base.info.names("text")))
        _log.warning(f"--init-from: {base.path} has learnt from other features ({names}).")


def take_losses(losses: nn.ModuleDict, recipe: Recipe, base: Run) -> None:
    """Give the terms of a new training what another run's have learned, where both have them with the same values.

    A temperature, for one. Nothing is taken of a run that was handed on without its checkpoint.
    """
    if (checkpoint := base.load_checkpoint()) is None:
        return
    there, here = ({term: {**block, "weight": 1} for term, block in one.terms.items()} for one in (base.recipe, recipe))
    same = {term for term, block in here.items() if there.get(term) == block}
    learned = {key: value for key, value in checkpoint["state"]["losses"].items() if term_of(key) in same}
    losses.load_state_dict(losses.state_dict() | learned)


def enough_memory(device: torch.device, recipe: Recipe) -> AbstractContextManager[None]:
    """Raise OutOfMemory where memory does not suffice, which names keys of the recipe that need less."""
    way = "" if recipe.data.chunk else "; or embed a batch in parts with data.chunk=32, for the same gradients"
    cache = "" if recipe.runtime.cache == "stream" else "; or leave the features there with runtime.cache=stream"
    recorded = device.type == "cuda" and recipe.runtime.capture == "auto" and recipe.data.chunk is None
    graphs = "; or do without CUDA graphs, which hold memory of their own, by runtime.capture=off" if recorded else ""
    return within_memory(device, "the head", f"choose a smaller data.batch_size or model.dim{way}{cache}{graphs}")
