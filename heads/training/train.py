"""Training a head from cached features, from top to bottom."""

import logging
from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from functools import lru_cache
from numbers import Integral
from pathlib import Path
from typing import Any, TypeVar

import torch

from ...pipeline.device import drawing, pick_device, within_memory
from ...pipeline.errors import CacheError, RecipeError, RunError
from ...pipeline.reading.batches import Batches, joined_batches
from ...pipeline.reading.joined_sets import Images, parts_of
from ...pipeline.reading.placement import Placement, Resident
from ...pipeline.reading.split import AS_A_WHOLE
from ...pipeline.store import OK, FeatureCache, ImageSet
from ...pipeline.store.leaks import Leaks, find_leaks
from ...pipeline.wording import counted
from ..evaluation.evaluation import evaluate_untrained
from ..evaluation.result import FEW, too_few
from ..model import build_losses, build_model, feature_facts, fitted
from ..recipes.blocks import Recipe
from ..recipes.names import recipe_names
from ..recipes.own import remember
from ..recipes.recipe import changed, load_recipe, without_effect
from ..recipes.schema import difference
from ..recipes.settings import Settings
from ..runs.features import Sets, batches_of, equal_sets, sets_named, sets_of_run, views_to_draw
from ..runs.info import RunInfo, absolute, pictures_of
from ..runs.run import Run, require_free
from .beginning import begin, taught, teach, teacher_digest
from .callbacks import Callback, require_log
from .objective import Objective, require_whole_batches
from .optimisation import build_optimizer, tied_to_length
from .stacked import Stack, StackedTrainer
from .trainer import Trainer, TrainSummary, stopped_early

R = TypeVar("R", bound=Run)
_log = logging.getLogger("xret")
_warn_once = lru_cache(16)(_log.warning)


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
        settings: changes of the recipe, such as ``{"model.dim": 256}``.
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
    stores, settings = [str(store)] if isinstance(store, str | Path) else [*map(str, store)], settings or {}
    if not stores:
        raise CacheError("there is no store to learn from; name one")
    if not isinstance(recipe, Recipe):
        recipe = load_recipe(str(recipe), settings, trust)
    elif settings:
        recipe = changed(recipe, settings)
    require_log(recipe.runtime.log)
    seed, target = checked_seed(seed), pick_device(device)
    remember(recipe.code)  # of a worker, which did not read the recipe, and may have no place for notes
    run = opened(Run, out, resume, trust)
    base = first_weights(init_from, run, trust)
    distil = _begun_with("distil", distil, run)
    teacher = teacher_digest(distil, run, trust)
    recipe = taught(recipe, distil)
    cache = FeatureCache.open(stores[0])
    require_splits(cache)
    sets = sets_named(cache, recipe.data.image, recipe.data.text) if run is None else sets_of_run(run, cache)
    recipe = fitted(recipe, *map(feature_facts, sets))
    for warning in without_effect(settings, recipe).values():
        _log.warning(warning)
    require_places(recipe, sets)
    info = _info(run, sets, base, recipe=recipe, seed=seed, store=stores[0], device=str(target))
    info = replace(info, distil=distil, teacher=teacher)
    others = other_sets(stores[1:], info, cache)
    with enough_memory(target, recipe):
        with drawing(torch.device("cpu"), seed):  # where the weights are drawn: a seed begins alike on every device
            model = build_model(recipe, info.image_facts, info.text_facts).to(target)
            losses = build_losses(recipe, info.text_facts).to(target)
        if recipe.data.chunk is not None:
            require_whole_batches(model, "data.chunk")
        how: dict[str, Any] = {"views": views_to_draw(sets[0], recipe), "share": recipe.data.share}
        how |= {"placement": placement_of(recipe, run), "resident": resident}
        split = joined_batches([batches_of(each, model, "train", target, **how) for each in (sets, *others)])
        val_split = batches_of(sets, model, "val", target, resident=resident)
        objective = Objective(recipe, model, losses, split)
        teach(objective, distil, split, target, trust)
        learning = objective, build_optimizer(model, losses, recipe.optimizer), target
        trainer = Trainer(*learning) if stack is None else StackedTrainer(stack, *learning)
    require_negatives(split)
    created = run is None
    run = ready(Run, run, out, on_split(info, split))
    leaks = find_leaks(cache) if title == "" else None
    with run.locked(created), enough_memory(target, recipe):
        if not trainer.resume(run):
            if leaks is not None:
                introduce(info, split, val_split, leaks)
            begin(objective, base, split, val_split, alone=title == "")
        summary = trainer.train(run, split, val_split, callbacks, title)
        untrained = evaluate_untrained(sets, "val", protocol="full", device=str(target))
        rsum = None if untrained is None else untrained.results[0].rsum
        return replace(summary, leaks=leaks, untrained_rsum=rsum)


def _info(run: Run | None, sets: Sets, base: Run | None, *, recipe: Recipe, seed: int, **new: Any) -> RunInfo:
    """Return what is known of a training that begins, `new` facts included, or goes on."""
    if run is not None:
        return replace(run.info, recipe=recipe, seed=seed)
    return RunInfo.of(*sets, recipe=recipe, seed=seed, init_from=base and absolute(str(base.path)), **new)


def require_negatives(split: Batches) -> None:
    """Raise RunError if a training split has a single image."""
    if len(split.units("image")) < 2:
        url = split.parts[0].image_set.cache.url
        raise RunError(f"split 'train' of {url} has a single usable image, which has no negative: add images")


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
    images = [part.image_set for part in split.parts]
    cache, *others = (one.cache for one in images)
    return replace(
        info,
        store=absolute(cache.url),
        manifest_sha256=cache.manifest_sha256,
        pictures={"train": pictures_of("train", *images), "val": pictures_of("val", images[0])},
        also=[f"{other.dataset} {other.manifest_sha256[:8]}" for other in others] or None,
        also_stores=[other.absolute_url for other in others] or None,
        skipped=split.skipped,
        shuffled=split.shuffled,
    )


def ready(kind: type[R], run: R | None, out: str | Path, info: RunInfo) -> R:
    """Make the run folder of a training; RunError where a resumed one was begun otherwise."""
    if run is None:
        return kind.create(out, info)
    then, now = run.info.lasting, info.lasting
    longer = info.recipe.schedule.epochs > run.recipe.schedule.epochs
    if run.info.pictures is None:  # as of runs from before
        then["pictures"] = now["pictures"]
    if said := difference(then, now, ["schedule.epochs"] if longer else []):
        raise RunError(f"{run.path} cannot be resumed, it was begun otherwise: {said}")
    if longer:
        _require_open_end(run)
    with run.locked():
        run.record(store=info.store, also_stores=info.also_stores, pictures=info.pictures)
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

    CacheError, RunError: a store cannot be used or lacks them, two have the same samples, or there is a teacher.
    """
    if also and info.distil is not None:
        raise RunError("a teacher is of one store: train with --distil on a single one")
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


def introduce(info: RunInfo, split: Batches, val: Batches, leaks: Leaks) -> None:
    """Log what differs from the bundled recipe of this name, and what is to be known of the splits."""
    recipe = info.recipe
    if recipe.name in recipe_names():
        bundled, beside = load_recipe(recipe.name).flat(), ("data.image_kind", "data.text_kind", "code.")
        differing = (item for item in recipe.flat().items() if bundled.get(item[0]) != item[1])
        changed = [f"{key}={value}" for key, value in differing if not key.startswith(beside)]
        _log.info(f"{recipe.name}{' with ' if changed else ''}{', '.join(changed)}")
    held = val.parts[0].image_set
    for other in split.parts[1:]:
        for name in held.cache.splits:
            count = len(_pictures(other.image_set, "train") & _pictures(held, name))
            if count and name != "train":
                _log.warning(
                    f"{other.image_set.cache.url} teaches {counted(count, 'picture')} of split '{name}' of"
                    f" {held.cache.url}, so that recalls on that split come out too high"
                )
    if val.images < FEW:
        _log.info(f"val: {too_few(val.images)} to tell which epoch is best.")
    unit, size = recipe.data.unit, recipe.data.batch_size
    if (items := split.images if unit == "image" else split.captions) < size:
        _log.info(f"data.batch_size={size:,} takes all {items:,} {unit}s at once: an epoch is a single step.")
    if leaks.sentence:
        _warn_once(f"{held.cache.url}: {leaks.sentence}.")


def _pictures(features: Images, split: str) -> set[bytes]:
    """Return a split's pictures by the digests of their files; none where they were imported."""
    digests = parts_of(features)[0].digests[features.rows_of(split)]
    return {digest.tobytes() for digest in digests if digest.any()}


def _begun_with(key: str, given: str | Path | None, run: Run | None) -> str | None:
    """Return the run that an argument names; a resumed `run` knows it. RunError if it was begun with another."""
    known = None if run is None else getattr(run.info, key)
    if given is None:
        return known
    if run is not None and absolute(str(given)) != known:
        option = f"--{key.replace('_', '-')}"
        how = f"with {option} {known}" if known else f"without {option}"
        raise RunError(f"{run.path} was begun {how}; resume it so, or take another --out")
    return absolute(str(given))


def first_weights(init_from: str | Path | None, run: Run | None, trust: bool = False) -> Run | None:
    """Return the run whose weights a training begins with; a resumed `run` knows it, and needs it until it is saved.

    RunError where there is none, it has no weights, or `run` was begun with another.
    """
    place = _begun_with("init_from", init_from, run)
    if place is None or (run is not None and run.begun):
        return None
    base = Run(place, trust)
    _ = base.weights
    return base


def enough_memory(device: torch.device, recipe: Recipe) -> AbstractContextManager[None]:
    """Raise OutOfMemory where memory does not suffice, which names keys of the recipe that need less."""
    way = "" if recipe.data.chunk else "; or embed a batch in parts with data.chunk=32, for the same gradients"
    cache = "" if recipe.runtime.cache == "stream" else "; or leave the features there with runtime.cache=stream"
    recorded = device.type == "cuda" and recipe.runtime.capture == "auto" and recipe.data.chunk is None
    graphs = "; or do without CUDA graphs, which hold memory of their own, by runtime.capture=off" if recorded else ""
    return within_memory(device, "the head", f"choose a smaller data.batch_size or model.dim{way}{cache}{graphs}")
