"""A training from its first step to its last: epochs, validation, and what is written down after each."""

import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from itertools import chain

import torch
from torch import Tensor, nn

from ...pipeline.device import deterministic, start_reading
from ...pipeline.errors import RunError
from ...pipeline.reading.batches import Batch, Batches
from ...pipeline.wording import counted
from ..evaluation.metrics import Recalls, recalls
from ..evaluation.scoring import compare, embed
from ..runs.run import Run
from .display import EACH_EPOCH, Display, Shown, describe
from .event_log import Record, epoch_tags, event_log, step_tags
from .failures import CollapseDetector, not_finite
from .objective import Objective
from .optimisation import drop_frozen, learning_rate, set_rates, tied_to_length, warmup, weights_of
from .state import TrainingState

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
        untrained_rsum: of the frozen encoders without a head, on the same split; None where their features lie in no
            common space.
    """

    run: str
    epochs: int
    trained: int
    best_epoch: int
    best_rsum: float
    seconds: float
    untrained_rsum: float | None = None


class Loop:
    """A training from a state to the recipe's last epoch, or until `schedule.patience` is at its end.

    Args:
        run: where weights, state and metrics are written. Its seed is that of the samples' order
            and of what a step draws.
        objective: of a model, from a batch to its loss.
        state: of that model; it is changed.
        train_split: learnt from.
        val_split: decides which epoch is the best.
        after_epoch, shown: see `training.train`.
    """

    def __init__(
        self,
        run: Run,
        objective: Objective,
        state: TrainingState,
        train_split: Batches,
        val_split: Batches,
        after_epoch: Callable[[int, float], None] | None = None,
        shown: Shown = EACH_EPOCH,
    ) -> None:
        self.run, self.objective, self.state, self.seed = run, objective, state, run.info.seed
        self.train_split, self.val_split, self.after_epoch, self.shown = train_split, val_split, after_epoch, shown
        self.recipe, self.terms = objective.recipe, list(state.losses)
        self.unit, self.batch_size = self.recipe.data.unit, self.recipe.data.batch_size
        self.items = train_split.images if self.unit == "image" else train_split.captions
        self.steps_an_epoch = train_split.steps(self.unit, self.batch_size)
        self.texts, self.caption_image = val_split.texts(), torch.as_tensor(val_split.caption_image)
        self.collapse = CollapseDetector(state.losses, self.recipe.loss["same_text"])

    def go_on(self) -> TrainSummary:
        """Train the epochs that are left.

        Raises:
            RunError: the loss or a similarity is not finite.
        """
        recipe, state = self.recipe, self.state
        before, epochs, started = state.epoch, recipe.schedule.epochs, time.perf_counter()
        self.seen = min(state.steps * self.batch_size, self.items)  # of the epoch that is not complete
        done = state.epoch * self.items + self.seen
        shown = self.shown if self._goes_on else replace(self.shown, level="quiet")
        device = self.train_split.device
        with (
            deterministic(device),
            Display(shown, self.run.path, epochs, self.unit, self.items, done) as display,
            event_log(recipe.runtime.log, self.run, state.step) as record,
        ):
            begins = recipe, state.epoch, state.steps
            display.begin(self.run.info, *begins, self.train_split, self.val_split)
            self._tell_epochs_before()
            while self._goes_on:
                self._epoch(display, record)
        if state.epoch < epochs:
            none = f"none of the last {recipe.schedule.patience} was better in validation RSUM"
            display.note(f"train: stopped after epoch {state.epoch} of {epochs}, for {none}.")
            if state.average is not None and not state.average.n_averaged:
                display.note(
                    f"train: no weights were averaged: optimizer.swa_epochs begins at the end of {epochs} epochs."
                )
        seconds = time.perf_counter() - started
        best = f"best of {state.epoch}: epoch {state.best_epoch}, validation RSUM {state.best_rsum:.1f}"
        display.log(f"ended well: {counted(state.epoch - before, 'epoch')} in {seconds:.1f} s; {best}")
        return TrainSummary(
            str(self.run.path), state.epoch, state.epoch - before, state.best_epoch, state.best_rsum, seconds
        )

    def _tell_epochs_before(self) -> None:
        """Tell `after_epoch` what a stop may have kept from it, or kept it from raising."""
        if self.after_epoch is not None:
            for line in self.run.metrics()[: self.state.epoch]:
                self.after_epoch(line["epoch"], line["rsum"])

    def _epoch(self, display: Display, record: Record) -> None:
        """Learn from the batches that are left of an epoch, validate, and write down what came of it."""
        recipe, state = self.recipe, self.state
        began, epoch = time.perf_counter(), state.epoch
        state.model.train()
        for batch in self.train_split.epoch(
            unit=self.unit,
            batch_size=self.batch_size,
            seed=self.seed,
            epoch=state.epoch,
            captions=recipe.data.captions,
            first=state.steps,
        ):
            values = self._learn(batch, display)
            record(step_tags(values.tolist(), self.terms, self._last_rate), state.step)
            count = len(batch.images.length if self.unit == "image" else batch.captions.length)
            self.seen += count
            display.step(epoch, count, values, self.terms)
        if state.average is not None and state.epoch >= recipe.schedule.epochs - recipe.optimizer.swa_epochs:
            state.average.update_parameters(state.model)
        table = self._validate()
        means = (state.sums / state.steps).tolist()  # over the epoch's batches
        line = state.line(means, self._last_rate, table.rsum, time.perf_counter() - began)
        state.close_epoch(table.rsum)
        record(epoch_tags(state.epoch, table), state.step)
        best = state.kept if state.best_epoch == state.epoch else None
        self.run.save_epoch(state.to_dict(over=self._over), line, state.best_epoch, state.best_rsum, best)
        display.step(epoch, self.items - self.seen, means, self.terms)  # a last batch of one was left out
        display.epoch(line, state.best_epoch, state.best_rsum)
        self.seen = 0
        if self.after_epoch is not None:
            self.after_epoch(state.epoch, table.rsum)

    @property
    def _goes_on(self) -> bool:
        """Whether an epoch is left."""
        schedule = self.recipe.schedule
        return self.state.epoch < schedule.epochs and not self.state.stopped_early(schedule.patience)

    @property
    def _over(self) -> bool:
        """Whether no epoch is left, and there will never be more."""
        if self.state.stopped_early(self.recipe.schedule.patience):
            return True
        return self.state.epoch >= self.recipe.schedule.epochs and tied_to_length(self.recipe) is not None

    @property
    def _now(self) -> float:
        """Epochs so far, of which the last may be a part."""
        return self.state.epoch + self.state.steps / self.steps_an_epoch

    @property
    def _rate(self) -> float:
        """The learning rate of the step that comes, before warm-up and the factors of its parts."""
        return learning_rate(self.recipe.schedule, self.recipe.optimizer.lr, self._now)

    @property
    def _last_rate(self) -> float:
        """The learning rate of the epoch's last step so far, before the factors of its parts."""
        schedule, last = self.recipe.schedule, self.state.epoch + (self.state.steps - 1) / self.steps_an_epoch
        return learning_rate(schedule, self.recipe.optimizer.lr, last) * warmup(schedule, last)

    def _learn(self, batch: Batch, display: Display) -> Tensor:
        """Take a step, count it, and write the state down where the recipe says so; return as `_step`."""
        state = self.state
        values = self._step(batch)
        if not values[0].isfinite():
            where = f"epoch {state.epoch + 1}, step {state.steps + 1}"
            what = f"the loss is not finite in {where}: {describe(values, self.terms)}"
            read = (batch.images, batch.captions)
            raise not_finite(what, self.run, self._rate, self.objective.precision, read)
        state.count(values)
        state.at_constant = self.collapse.steps_at_constant(values, len(batch.captions.length), state.at_constant)
        if said := self.collapse.warning(state.at_constant, self.recipe.optimizer.lr):
            display.note(said)
        every = self.recipe.runtime.checkpoint_steps
        if every is not None and state.step % every == 0:
            self.run.save_state(state.to_dict())
        return values

    def _step(self, batch: Batch) -> Tensor:
        """Learn from a batch; return its loss, followed by the terms, ``[1 + T]``, on the host.

        Where the loss is not finite, no weight is changed.
        """
        recipe, state, optimizer, scaler = self.recipe, self.state, self.state.optimizer, self.state.scaler
        now = self._now
        state.seed_step(self.seed)
        set_rates(optimizer, recipe.schedule, self._rate, now)
        optimizer.zero_grad()
        loss = self.objective(batch, now)
        read = start_reading(loss.detach())
        scaler.scale(loss[0]).backward()
        values = read()
        if not values[0].isfinite():
            return values
        model, losses = state.model, state.losses
        drop_frozen(optimizer, now)
        learning = [p for p in weights_of(model, losses) if p.grad is not None]
        if learning:  # the scaler takes no step of nothing
            if recipe.optimizer.clip is not None:
                scaler.unscale_(optimizer)
                nn.utils.clip_grad_norm_(learning, recipe.optimizer.clip)
            scaler.step(optimizer)
            scaler.update()
        if state.average is not None and recipe.optimizer.ema is not None:
            state.average.update_parameters(model)
        return values

    def _validate(self) -> Recalls:
        """Return the recalls of the validation split, ties pessimistic."""
        model, split = self.state.kept, self.val_split
        try:
            similarity = compare(model, *embed(model, split), self.texts)
            return recalls(similarity, self.caption_image, "full", "pessimistic")
        except RunError as error:
            what = f"the similarities are not finite in the validation of epoch {self.state.epoch + 1}"
            read = chain(split.image_features(_AT_ONCE), split.caption_features(_AT_ONCE))
            lr = learning_rate(self.recipe.schedule, self.recipe.optimizer.lr, self.state.epoch)
            raise not_finite(what, self.run, lr, self.objective.precision, read) from error
