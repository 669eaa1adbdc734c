"""Training a head from cached features, from top to bottom."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch

from ...pipeline.device import pick_device
from ...pipeline.errors import RunError
from ...pipeline.reading.batches import Batches, joined_batches
from ...pipeline.reading.placement import Placement, Resident
from ...pipeline.store import FeatureCache
from ..evaluation.rankers import untrained_rsum
from ..model import Model, build_losses, build_model, feature_facts
from ..recipes.blocks import Recipe
from ..runs.features import Sets, batches_of, views_to_draw
from ..runs.run import Run, require_free
from .display import EACH_EPOCH, Shown
from .event_log import require_log
from .failures import enough_memory
from .large_batches import require_whole_batches
from .loop import Loop, TrainSummary
from .objective import Objective
from .optimisation import build_optimizer
from .preparation import (
    checked_seed,
    facts_of,
    look_at_data,
    open_run,
    other_sets,
    placement_of,
    require_places,
    require_splits,
    sets_of,
)
from .state import TrainingState, first_weights, take_losses


def train(
    store: str,
    recipe: Recipe,
    out: str | Path,
    *,
    settings: Sequence[str] = (),
    device: str = "auto",
    seed: int = 0,
    resume: bool = False,
    also: Sequence[str] = (),
    init_from: str | Path | None = None,
    resident: Resident | None = None,
    after_epoch: Callable[[int, float], None] | None = None,
    shown: Shown = EACH_EPOCH,
) -> TrainSummary:
    """Train the head that `recipe` describes on the features in `store`, and leave a run at `out`.

    The same seed gives the same numbers on the same device, also after a stop: each step draws from a generator of its
    own, see `TrainingState.seed_step`.

    Args:
        store, recipe: the feature cache, of which `train` and `val` are used; a resolved recipe.
        out: the run folder; must not exist, unless `resume`.
        settings: with which the recipe was loaded, ``KEY=VALUE``.
        device: ``auto``, ``cpu`` or ``cuda``.
        seed: of the first weights and the order of samples.
        resume: go on after the last step in `out`, also for more epochs; the store may have been moved.
        also: other stores whose split `train` is learnt as well, see `other_sets`.
        init_from: a run whose best weights it begins with, see `first_weights`.
        resident: features that other trainings of this process have in memory; what is put there is theirs too.
        after_epoch: is told each complete epoch, from 1, and its validation RSUM, those before a stop included; what it
            raises ends the training.
        shown: how much of it is seen.

    Raises:
        RecipeError: the recipe does not fit the feature sets, or there is no such seed.
        CacheError: the store, its feature sets or its splits cannot be used.
        RunError: `out` exists or does not fit, memory does not suffice, or the loss is not finite. A folder that
            this call made is removed if its first epoch fails, unless there is something in it to go on from.
    """
    require_log(recipe.runtime.log)
    seed = checked_seed(seed)
    if not resume:
        require_free(out)
    base = first_weights(init_from, out, resume)
    target = pick_device(device)
    sets, *others = _sets(store, recipe, out, resume, also)
    with enough_memory(target, recipe):
        model = (state := _beginning(recipe, sets, seed, target)).model
        if recipe.data.chunk is not None:
            require_whole_batches(model, "data.chunk")
        where = placement_of(out, recipe, resume), resident
        train_split = _learnt_from([sets, *others], recipe, model, target, *where)
        val_split = batches_of(sets, model, "val", target, "stream", resident)

    info = facts_of(train_split, target, seed, base)
    run, created = open_run(Run, out, info, recipe, train_split, resume=resume)
    with run.held(created), enough_memory(target, recipe):
        if not state.resume(run):
            look_at_data(model, train_split, base)
            if base is not None:
                take_losses(state.losses, recipe, base)
        objective = Objective.of(recipe, model, state.losses, train_split)
        found = Loop(run, objective, state, train_split, val_split, after_epoch, shown).go_on()
        return replace(found, untrained_rsum=untrained_rsum(sets, "val", target))


def _sets(store: str, recipe: Recipe, out: str | Path, resume: bool, also: Sequence[str]) -> list[Sets]:
    """Return the feature sets of `store` that are learnt from, followed by those of other stores."""
    cache = FeatureCache.open(store)
    require_splits(cache)
    require_places(recipe, sets := sets_of(cache, recipe, out, resume))
    return [sets, *other_sets(also, sets)]


def _beginning(recipe: Recipe, sets: Sets, seed: int, target: torch.device) -> TrainingState:
    """Return a training before its first step, for features as of these sets."""
    facts = feature_facts(sets[0]), feature_facts(sets[1])
    torch.manual_seed(seed)  # on the CPU, where the weights are drawn: a seed begins alike on every device
    model, losses = build_model(recipe, *facts).to(target), build_losses(recipe, facts[1]).to(target)
    return TrainingState.new(model, losses, build_optimizer(model, losses, recipe.optimizer), recipe, target)


def _learnt_from(
    sets: Sequence[Sets],
    recipe: Recipe,
    model: Model,
    target: torch.device,
    placement: Placement,
    resident: Resident | None,
) -> Batches:
    """Return the training split of all stores as one."""
    views = views_to_draw(sets[0][0], recipe)  # the same in all: their fingerprints are equal
    split = joined_batches([batches_of(one, model, "train", target, placement, resident, views) for one in sets])
    if len(np.unique(split.caption_image)) < 2:
        url = sets[0][0].cache.url
        raise RunError(f"split 'train' of {url} has a single usable image, which has no negative: add images")
    return split
