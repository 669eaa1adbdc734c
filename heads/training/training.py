"""Training a head from cached features, from top to bottom."""

import sys
import time
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from ...pipeline.cache.feature_cache import FeatureCache
from ...pipeline.device import deterministic, start_reading
from ...pipeline.errors import RunError
from ...pipeline.progress import Progress
from ...pipeline.reading.batches import Batch, Batches, joined_batches
from ...pipeline.reading.placement import Resident
from ..evaluation.metrics import Recalls
from ..evaluation.protocols import recalls
from ..evaluation.scoring import compare, embed
from ..model import Model, build_losses, build_model, feature_facts
from ..recipes.recipe import Recipe
from ..runs.run import Run, require_free
from .compilation import compile_parts
from .event_log import epoch_tags, event_log, require_log, step_tags
from .large_batches import require_whole_batches
from .objective import Objective, same_texts
from .optimisation import (
    autocast_dtype,
    build_optimizer,
    drop_frozen,
    learning_rate,
    moving_average,
    set_rates,
    weights_of,
)
from .preparation import (
    batches_of,
    load_vectors,
    open_run,
    other_sets,
    placement_of,
    require_splits,
    sets_of,
)
from .ranks import Ranks, Silent, joined
from .state import TrainingState
from .watching import STEPS, CollapseWatch, enough_memory, not_finite

_AT_ONCE = 256  # samples that are looked through when a validation failed


@dataclass(frozen=True)
class TrainSummary:
    """What came of a training.

    Attributes:
        run: the run folder.
        epochs: how many are complete, all together.
        trained: how many of them this call trained; 0 where the run was complete already.
        best_epoch: counted from 1; its weights are `model.safetensors`.
        best_rsum: its validation RSUM, of 600.
        seconds: of this call's epochs, validation included.
    """

    run: str
    epochs: int
    trained: int
    best_epoch: int
    best_rsum: float
    seconds: float


def train(
    store: str,
    recipe: Recipe,
    out: str | Path,
    *,
    device: str = "auto",
    seed: int = 0,
    resume: bool = False,
    also: Sequence[str] = (),
    resident: Resident | None = None,
) -> TrainSummary:
    """Train the head that `recipe` describes on the features in `store`, and leave a run at `out`.

    The same seed gives the same numbers on the same device, also where the training was stopped and resumed: every
    step draws from a generator that is seeded by `seed`, its epoch and its number alone. Under torchrun all processes
    train one head; see `ranks`.

    Args:
        store: the feature cache; its splits `train` and `val` are used.
        recipe: resolved; see `recipe.load_recipe`.
        out: the run folder; must not exist, unless `resume`.
        device: ``auto``, ``cpu`` or ``cuda``.
        seed: decides the first weights and the order of samples; 0 or more.
        resume: go on behind the last complete epoch of `out`, or the last step that was written down. Starts it where
            there is nothing yet. The store may have been moved.
        also: other stores whose split `train` is learnt as well; features must be of the same encoders, words are
            tokenised with the vocabulary of `store`. Validation is on `store` alone.
        resident: features that other trainings of this process have in memory; what is put there is theirs too.

    Raises:
        RecipeError: the recipe does not fit the feature sets.
        CacheError: the store, its feature sets or its splits cannot be used.
        RunError: `out` exists or does not fit, memory does not suffice, or the loss is not finite. A folder that
            this call made is removed if its first epoch fails, unless there is something in it to go on from.
    """
    require_log(recipe.runtime.log)
    if not resume:
        require_free(out)
    with joined(device) as (ranks, target):
        return _train([store, *also], recipe, out, ranks, target, seed, resume, resident)


def _train(
    stores: Sequence[str],
    recipe: Recipe,
    out: str | Path,
    ranks: Ranks,
    target: torch.device,
    seed: int,
    resume: bool,
    resident: Resident | None,
) -> TrainSummary:
    cache = FeatureCache.open(stores[0])
    require_splits(cache)
    image_set, caption_set = sets = sets_of(cache, recipe, out, resume)
    others = other_sets(stores[1:], sets)
    image_facts, text_facts = feature_facts(image_set), feature_facts(caption_set)

    # The weights are drawn on the CPU, so that a seed means the same beginning on every device.
    torch.manual_seed(seed)
    with enough_memory(target, recipe):
        model = build_model(recipe, image_facts, text_facts).to(target)
        average = moving_average(model, recipe.optimizer.ema)
    if recipe.data.chunk is not None or ranks.count > 1:
        require_whole_batches(model, "data.chunk" if ranks.count == 1 else "torchrun")
    losses = build_losses(recipe, text_facts).to(target)
    precision = autocast_dtype(recipe.runtime.precision, target)
    # float16 loses small gradients without scaling; bfloat16 has float32's range.
    scaler = torch.amp.GradScaler(target.type, enabled=precision is torch.float16)
    state = TrainingState(model, losses, build_optimizer(model, losses, recipe.optimizer), scaler, average)

    with enough_memory(target, recipe):
        placement = placement_of(out, recipe, resume)
        parts = [batches_of(one, model, "train", target, placement, resident) for one in (sets, *others)]
        train_split, val_split = joined_batches(parts), batches_of(sets, model, "val", target, "mapped", resident)
    if train_split.images < 2:
        raise RunError(f"split 'train' of {cache.url} has a single usable image, which has no negative: add images")

    run, created = open_run(out, recipe, train_split, target, ranks, seed=seed, resume=resume)
    saved = run.load_state() if resume else None
    if saved is not None:
        state.load(saved)

    before, started = state.epoch, time.perf_counter()
    path = getattr(model.text.adapter, "vectors", None)
    with (
        run.alone() if ranks.first else nullcontext(),
        run.removed_unless_begun(created and ranks.first),
        enough_memory(target, recipe),
        deterministic(target),
    ):
        if path is not None and saved is None:
            load_vectors(model, path, caption_set.vocabulary or ())
        if recipe.runtime.compile:
            compile_parts(model, target)
        text_number = same_texts(train_split) if recipe.loss["exclude_same_text"] else None
        objective = Objective(recipe, model, losses, text_number=text_number, precision=precision, ranks=ranks)
        fit(run, recipe, objective, state, train_split, val_split, seed)
    seconds = time.perf_counter() - started
    return TrainSummary(str(run.path), state.epoch, state.epoch - before, state.best_epoch, state.best_rsum, seconds)


def fit(
    run: Run,
    recipe: Recipe,
    objective: Objective,
    state: TrainingState,
    train_split: Batches,
    val_split: Batches,
    seed: int,
) -> None:
    """Train from `state` to the recipe's last epoch, or until `schedule.patience` is at its end.

    Args:
        run: where weights, state and metrics are written, by the first rank.
        recipe: says for how long and how.
        objective: of a model, from a batch to its loss.
        state: of that model; it is changed.
        train_split: learnt from.
        val_split: decides which epoch is the best.
        seed: of the samples' order, and of what a step draws.

    Raises:
        RunError: the loss or a similarity is not finite.
    """
    ranks, target, terms = objective.ranks, torch.device(train_split.device), list(state.losses)
    unit, batch_size, epochs = recipe.data.unit, recipe.data.batch_size, recipe.schedule.epochs
    items = train_split.images if unit == "image" else train_split.captions
    steps_an_epoch = train_split.steps(unit, batch_size)
    texts, caption_image = val_split.texts(), torch.as_tensor(val_split.caption_image)
    watch = CollapseWatch(state.losses)
    seen = min(state.steps * batch_size, items)  # of the epoch that is not complete
    with (
        Progress("train", epochs * items, f"{unit}s", state.epoch * items + seen) if ranks.first else Silent() as bar,
        event_log(recipe.runtime.log if ranks.first else "none", run, state.step) as record,
    ):
        while state.epoch < epochs and not state.stopped_early(recipe.schedule.patience):
            epoch, began = state.epoch, time.perf_counter()
            lr = learning_rate(recipe.schedule, recipe.optimizer.lr, epoch)
            state.model.train()
            batches = train_split.epoch(
                unit=unit,
                batch_size=batch_size,
                seed=seed,
                epoch=epoch,
                captions=recipe.data.captions,
                first=state.steps,
            )
            for batch in batches:
                values = _step(objective, state, batch, epoch + state.steps / steps_an_epoch, lr, seed)
                if not values[0].isfinite():
                    where = f"epoch {epoch + 1}, step {state.steps + 1}"
                    what = f"the loss is not finite in {where}: {describe(values, terms)}"
                    raise RunError(not_finite(what, run, lr, objective.precision, (batch.images, batch.captions)))
                state.count(values)
                state.at_constant = watch.steps_at_constant(values, len(batch.captions.length), state.at_constant)
                if ranks.first:
                    watch.warn(state.at_constant, recipe.optimizer.lr)
                record(step_tags(values.tolist(), terms, lr), state.step)
                every = recipe.runtime.checkpoint_steps
                if every is not None and state.step % every == 0 and ranks.first:
                    run.save_state(state.to_dict())
                count = len(batch.images.length if unit == "image" else batch.captions.length)
                seen += count
                bar.update(count, f"epoch {epoch + 1}/{epochs}, {describe(values, terms)}")
            try:
                table = validation(state.kept, val_split, texts, caption_image) if ranks.first else None
            except RunError as error:
                what = f"the similarities are not finite in the validation of epoch {epoch + 1}"
                read = chain(val_split.image_features(_AT_ONCE), val_split.caption_features(_AT_ONCE))
                raise RunError(not_finite(what, run, lr, objective.precision, read)) from error
            rsum = ranks.agree(0.0 if table is None else table.rsum, target)
            means = (state.sums / state.steps).tolist()  # over the epoch's batches
            line = _line(state, means, terms, lr, rsum, time.perf_counter() - began)
            state.close_epoch(rsum)
            if table is not None:
                record(epoch_tags(epoch + 1, table), state.step)
                if state.best_epoch == state.epoch:
                    run.save_best(state.kept)
                run.save_epoch(state.to_dict(), line, state.best_epoch, state.best_rsum)
            note = f"epoch {epoch + 1}/{epochs}, {describe(means, terms)}, validation RSUM {rsum:.1f}"
            bar.update(items - seen, note)  # a last batch of one was left out
            seen = 0
    if state.epoch < epochs and ranks.first:
        none = f"none of the last {recipe.schedule.patience} was better in validation RSUM"
        print(f"train: stopped behind epoch {state.epoch} of {epochs}, for {none}.", file=sys.stderr)


def _step(objective: Objective, state: TrainingState, batch: Batch, now: float, lr: float, seed: int) -> Tensor:
    """Learn from a batch after `now` epochs and return its loss and behind it the terms, ``[1 + T]``, on the host.

    Where the loss is not finite, no weight is changed.
    """
    recipe, ranks, optimizer, scaler = objective.recipe, objective.ranks, state.optimizer, state.scaler
    state.seed_step(seed)
    set_rates(optimizer, recipe.schedule, lr, now)
    optimizer.zero_grad()
    loss = objective(batch, now)
    read = start_reading(loss.detach())
    scaler.scale(loss[0]).backward()
    values = read()
    if not values[0].isfinite():
        return values
    model, losses = state.model, state.losses
    ranks.sum_gradients(
        [*model.image.parameters(), *model.text.parameters()],
        [*model.compare.parameters(), *losses.parameters()],
    )
    drop_frozen(optimizer, now)
    if recipe.optimizer.clip is not None:
        scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(weights_of(model, losses), recipe.optimizer.clip)
    scaler.step(optimizer)
    scaler.update()
    if state.average is not None:
        state.average.update_parameters(model)
    return values


def _line(
    state: TrainingState, means: list[float], terms: list[str], lr: float, rsum: float, seconds: float
) -> dict[str, Any]:
    """Return what metrics.jsonl says of the epoch that ends now; `means` of its loss and terms."""
    loss, *parts = means
    line = {
        "epoch": state.epoch + 1,
        "step": state.step,
        "loss": loss,
        "parts": dict(zip(terms, parts, strict=True)),
        "lr": lr,
        "rsum": rsum,
        "seconds": round(seconds, 3),
    }
    return line | ({"collapsed": True} if state.at_constant >= STEPS else {})


def validation(model: Model, batches: Batches, texts: list[str], caption_image: Tensor) -> Recalls:
    """Return the table of a split: recalls in both directions and their sum, ties pessimistic.

    Raises:
        RunError: a similarity is not finite.
    """
    images, captions = embed(model, batches)
    similarity = compare(model, images, captions, texts)
    return recalls(similarity, caption_image, "full", "pessimistic", "")


def describe(values: Tensor | list[float], terms: list[str]) -> str:
    """Return the loss and its parts for the progress line."""
    loss, *parts = values.tolist() if isinstance(values, Tensor) else values
    inner = ", ".join(f"{term} {part:.4f}" for term, part in zip(terms, parts, strict=True))
    return f"loss {loss:.4f} ({inner})"
