"""A training from its first step to its last: epochs, validation, and what is written down after each."""

import logging
import math
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from copy import deepcopy
from dataclasses import dataclass
from itertools import chain
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

from ...pipeline.device import copies, deterministic, drawing
from ...pipeline.errors import NotFinite, RunError
from ...pipeline.openmp import waiting_well
from ...pipeline.reading.batches import Batch, Batches
from ...pipeline.reading.features import Features
from ...pipeline.store.leaks import Leaks
from ...pipeline.wording import counted
from ..evaluation.metrics import Recalls, recalls
from ..evaluation.scoring import compare, embed
from ..model import Model, losses_of
from ..runs.run import CHECKPOINT, Run
from .callbacks import LOGS, Callback, TrainLog, describe, epoch_values, step_values
from .gradients import Gradients
from .objective import Objective
from .optimisation import average_of, float32_as, learning_rate, set_rates, warmup

COLLAPSED = 100  # steps at which the loss sits at its constant
_NEAR = 0.01  # of the constant
_READ = 256  # samples that are looked through together when a validation failed
_PARTS = ("model", "losses", "optimizer", "scaler", "average")
_COUNTS = ("epoch", "steps", "step", "best_epoch", "best_rsum", "at_constant")


@dataclass(frozen=True)
class TrainSummary:
    """What came of a training."""

    run: str  # the run folder
    epochs: int  # complete ones, all together
    trained: int  # how many of them this call trained; 0 where the run was complete already
    best_epoch: int  # counted from 1; its weights are `model.safetensors`; 0: what a residual begins with
    best_rsum: float  # its validation RSUM, of 600
    seconds: float  # of this call's epochs, validation included
    leaks: Leaks | None = None  # of the first store, where a training was begun by itself
    untrained_rsum: float | None = None  # of the frozen encoders alone on the same split, where they share a space


@dataclass(frozen=True)
class _Taken:
    """A step whose loss a GPU may still compute."""

    read: Callable[[], Tensor]  # waits for the loss and its terms
    batch: Batch
    of_epoch: int  # its number, counted from 1
    step: int  # among all
    rate: float  # its learning rate
    at_rest: dict[str, float]  # of each term that is watched, see `Loss.at_rest`


class Trainer:
    """Trains a model, from any state between two steps.

    The state, with the run's seed and the recipe, is all that the next step depends on: each step draws from a
    generator that is seeded by the seed, its epoch and its number.

    Args:
        objective: from a batch to its loss; it holds the model, the losses and the recipe.
        optimizer: of both.
        device: where all of them are.
    """

    def __init__(self, objective: Objective, optimizer: torch.optim.Optimizer, device: torch.device) -> None:
        self.objective, self.optimizer, self.device = objective, optimizer, device
        self.model, self.losses, self.recipe = objective.model, objective.losses, objective.recipe
        # float16 loses small gradients without scaling; bfloat16 has float32's range.
        self.scaler = torch.amp.GradScaler(device.type, enabled=objective.precision is torch.float16)
        self.gradients = Gradients(objective, optimizer, self.scaler)
        self.average = average_of(self.model, self.recipe.optimizer)  # is validated and kept once it has begun
        self.epoch = 0  # complete ones
        self.steps = 0  # of the epoch that is not complete
        self.step = 0  # all steps together
        self.at_constant = 0  # for how many steps a term has sat at its constant, see `Loss.at_rest`
        self.best_epoch, self.best_rsum = 0, -math.inf  # counted from 1, and its validation RSUM
        self.best: dict[str, Tensor] | None = None  # its weights by name, in the host's memory
        self.sums = torch.zeros(1 + len(self.losses), dtype=torch.float64)  # of the loss and its terms over `steps`
        self.metrics: list[dict[str, Any]] = []  # the lines of metrics.jsonl
        self.waited = 0.0  # seconds, for other trainings
        self._of_best: dict[str, Any] = {}  # what `run.json` says of the best epoch's backbones

    @property
    def kept(self) -> Model:
        """The model whose weights are validated and kept."""
        if self.average is None or not self.average.n_averaged:
            return self.model
        return self.average.module  # type: ignore[return-value]

    def resume(self, run: Run) -> bool:
        """Go on where `run` is; return False where nothing was saved there.

        RunError where the checkpoint is lost, damaged or does not fit, also in whether it scales the loss (float16).
        """
        checkpoint = run.load_checkpoint()
        if checkpoint is None:
            if run.info.epochs:  # as of a run that was handed on, whose weights a new beginning would replace
                run.file(CHECKPOINT)
            return False
        state, info, self.metrics, self.best = (checkpoint[key] for key in ("state", "info", "metrics", "best"))
        if bool(state["scaler"]) != self.scaler.is_enabled():
            then = "float16" if state["scaler"] else "another precision than float16"
            raise RunError(f"it was trained in {then}; to go on, set runtime.precision to what it was")
        self._of_best = {key: value for key, value in info.items() if key not in ("epochs", "best_epoch", "best_rsum")}
        try:
            if info["epochs"] != run.info.epochs:  # a kill came before all was exported
                if self.best is not None:
                    self.model.load_state_dict(self.best)
                run.export(checkpoint, self.model)
            for name in self._parts:
                getattr(self, name).load_state_dict(state[name])
        except (RuntimeError, ValueError, KeyError) as error:
            raise RunError(f"{run.path / CHECKPOINT} does not fit the run's run.json; train the run again") from error
        for name in _COUNTS:
            setattr(self, name, state[name])
        self.sums = state["sums"]
        return True

    @property
    def _parts(self) -> list[str]:
        return [name for name in _PARTS if getattr(self, name) is not None]

    def checkpoint(self) -> dict[str, Any]:
        """Return what `Run.save` writes."""
        state = {name: getattr(self, name) for name in _COUNTS} | {"sums": self.sums}
        state |= {name: getattr(self, name).state_dict() for name in self._parts}
        epoch, rsum = (None, None) if self.best is None else (self.best_epoch, self.best_rsum)
        info = {"epochs": self.epoch, "best_epoch": epoch, "best_rsum": rsum, **self._of_best}
        return {"state": state, "metrics": self.metrics, "best": self.best, "info": info}

    def train(
        self, run: Run, split: Batches, val: Batches, callbacks: Sequence[Callback] = (), title: str | None = ""
    ) -> TrainSummary:
        """Train the epochs that are left, or until `schedule.patience` ends it.

        Args:
            run: where all is written. Its seed is that of the samples' order and of what a step draws.
            split, val: learnt from, and what decides which epoch is the best.
            callbacks: are told of steps and epochs, as is what `runtime.log` names.
            title: of one training among several, see `TrainLog`.

        RunError where the loss or a similarity is not finite, or a file cannot be written.
        """
        self._run, self._split, self._val, self._terms = run, split, val, list(self.recipe.terms)
        self._texts, self._caption_image = val.texts(), torch.as_tensor(val.caption_image)
        data, epochs, patience = self.recipe.data, self.recipe.schedule.epochs, self.recipe.schedule.patience
        self._steps_an_epoch = split.steps(data.unit, data.batch_size)
        items = split.images if data.unit == "image" else split.captions
        before, started = self.epoch, self._clock()
        done = self.epoch * items + min(self.steps * data.batch_size, items)
        with (
            TrainLog(run.path, (epochs, items, done), data.unit, title) as log,
            self._told(run, callbacks),
            self._writing(),
            waiting_well(),
        ):
            at = f"goes on after epoch {self.epoch}, step {self.steps}," if self.step else "begins"
            threads = f" with {counted(torch.get_num_threads(), 'thread')}" if self.device.type == "cpu" else ""
            log.write(f"{at} {self.recipe.name} on {run.info.store}, {split.placement}, on {self.device}{threads}")
            if self.device.type == "cuda" and self.gradients.refused:
                log.write(f"its steps are launched operation by operation: {self.gradients.refused}")
            if not self.step and self.best is None and self.recipe.model.residual != "none":
                self._keep(self.validate().rsum)  # what it begins with is a model already
                self._save(export=True, weights=True)
                log.say(f"before the first step: val RSUM {self.best_rsum:.1f}", log.level)
            while self.epoch < epochs and not stopped_early(self.epoch, self.best_epoch, patience):
                self._train_epoch(log)
            if before < self.epoch < epochs:
                unaveraged = self.average is not None and not self.average.n_averaged
                after = ", and optimizer.swa_epochs had not begun" if unaveraged else ""
                note = f"stopped after epoch {self.epoch} of {epochs}: none of the last {patience} was better{after}"
                log.say(note, logging.WARNING if title == "" else log.level)
            self._await_written()
            seconds = self._clock() - started
            log.write(f"ended well: {counted(self.epoch - before, 'epoch')} in {seconds:.1f} s")
        return TrainSummary(str(run.path), self.epoch, self.epoch - before, self.best_epoch, self.best_rsum, seconds)

    @contextmanager
    def _told(self, run: Run, callbacks: Sequence[Callback]) -> Iterator[None]:
        kind = self.recipe.runtime.log
        self._callbacks = [*([LOGS[kind]()] if kind != "none" else []), *callbacks]
        with ExitStack() as ends:
            for callback in self._callbacks:
                callback.on_begin(run, self.step, tuple(self.metrics))
                ends.push(lambda _, error, __, callback=callback: callback.on_end(error))
            yield

    @contextmanager
    def _writing(self) -> Iterator[None]:
        """Let states be written beside the training; at its end, also by an error, the last one is waited for."""
        self._written: Future[None] | None = None
        with ThreadPoolExecutor(1, "state") as self._writer:
            try:
                yield
            finally:  # where it could not be written, that is what went wrong first
                self._await_written()

    def _save(self, *, export: bool, weights: bool = False) -> None:
        """Begin to write a copy of the state, once the one before is written; `export` as well, after an epoch."""
        self._await_written()
        checkpoint, run, kept = self.checkpoint(), self._run, self.kept
        state = checkpoint["state"]
        # In the host's memory: a GPU has none to spare where it fits just what a step needs.
        tensors = [one for one in tree_leaves(state) if isinstance(one, Tensor)]
        copied = dict(zip(map(id, tensors), copies(tensors), strict=True))
        checkpoint |= {"state": deepcopy(state, copied), "metrics": [*self.metrics]}

        def write() -> None:
            run.save(checkpoint)
            if export:
                run.export(checkpoint, kept, weights=weights)

        self._written = self._writer.submit(write)
        if run.exports_model and weights:
            self._await_written()

    def _await_written(self) -> None:
        if self._written is not None:
            self._written.result()

    def _train_epoch(self, log: TrainLog) -> None:
        began, data, schedule = self._clock(), self.recipe.data, self.recipe.schedule
        order: dict[str, Any] = {"unit": data.unit, "batch_size": data.batch_size, "captions": data.captions}
        self.model.train()
        for taken in self._steps_left(order):
            values = self._look_at(taken, log)
            for one in self._callbacks:
                one.on_step(taken.step, step_values(values, self._terms, taken.rate))
            units = taken.batch.images if data.unit == "image" else taken.batch.captions
            log.step(self.epoch, len(units.length), values)
        if self.average is not None and self.epoch >= schedule.epochs - self.recipe.optimizer.swa_epochs:
            self.average.update_parameters(self.model)
        table = self.validate()
        loss, *parts = (self.sums / self.steps).tolist()  # means over the epoch's batches
        line = {
            "epoch": self.epoch + 1,
            "step": self.step,
            "loss": loss,
            "parts": dict(zip(self._terms, parts, strict=True)),
            "lr": self._last_rate,
            "rsum": table.rsum,
            "seconds": round(self._clock() - began, 3),
        }
        self.metrics.append(line | ({"collapsed": True} if self.at_constant >= COLLAPSED else {}))
        self.epoch, self.steps, self.sums = self.epoch + 1, 0, torch.zeros_like(self.sums)
        better = table.rsum > self.best_rsum
        if better:
            self._keep(table.rsum)
        self._save(export=True, weights=better)
        log.epoch(self.metrics[-1], self.best_epoch, self.best_rsum)
        for one in self._callbacks:
            one.on_epoch(self.epoch, self.step, epoch_values(table))

    def _keep(self, rsum: float) -> None:
        self.best_epoch, self.best_rsum = self.epoch, rsum
        weights = self.kept.state_dict()
        self.best = dict(zip(weights, copies(list(weights.values())), strict=True))
        self._of_best = self._run.facts_of(self.kept)

    def _steps_left(self, order: dict[str, Any]) -> Iterator["_Taken"]:
        """Take the steps that are left of an epoch, yield each, and save the state where the recipe says so.

        On a GPU a step is yielded once the next one is on its way, so that nobody waits for its loss meanwhile.
        """
        every = self.recipe.runtime.checkpoint_steps
        waiting = deque[_Taken]()
        for batch in self._epoch(**order, seed=self.seed, epoch=self.epoch, first=self.steps):
            read = self.take_step(batch)
            pairs = None if self.recipe.loss["same_text"] == "positive" else len(batch.captions.length)
            values = zip(self._terms, (term.at_rest(pairs) for term in losses_of(self.losses)), strict=True)
            at_rest = {name: value for name, value in values if value is not None}
            self.steps, self.step = self.steps + 1, self.step + 1
            waiting.append(_Taken(read, batch, self.steps, self.step, self._last_rate, at_rest))
            save = every is not None and self.step % every == 0
            while len(waiting) > (self.device.type == "cuda" and not save):
                yield waiting.popleft()
            if save:
                self._save(export=False)
        yield from waiting

    def _look_at(self, taken: "_Taken", log: TrainLog) -> list[float]:
        """Return the loss of a step and its terms, and add them up; NotFinite where they are no numbers."""
        values = taken.read()
        told: list[float] = values.tolist()
        if not values[0].isfinite():
            where = f"epoch {self.epoch + 1}, step {taken.of_epoch}"
            what = f"the loss is not finite in {where}: {describe(told, self._terms)}"
            raise self._not_finite(what, (taken.batch.images, taken.batch.captions))
        self.sums = self.sums + values
        self._watch(dict(zip(self._terms, told[1:], strict=True)), taken.at_rest, log)
        return told

    def take_step(self, batch: Batch) -> Callable[[], Tensor]:
        """Learn from a batch; return what waits for its loss, followed by the terms, ``[1 + T]``, on the host."""
        with self.repeatable(*self.drawn_from):
            return self.change_weights(self.gradients(batch, self.begin_step()))

    def begin_step(self) -> float:
        """Set the learning rates of the next step; return after how many epochs it comes."""
        now, recipe = self._epochs_at(self.steps), self.recipe
        set_rates(self.optimizer, recipe.schedule, learning_rate(recipe.schedule, recipe.optimizer.lr, now), now)
        return now

    def change_weights(self, read: Callable[[], Tensor]) -> Callable[[], Tensor]:
        """Let the gradients change the weights, and return `read`, which waits for the loss.

        Where that is not finite, a CPU changes no weight; a GPU is not waited for, and the training ends a step
        later without saving any.
        """
        if self.device.type == "cpu" and not read()[0].isfinite():
            return read
        if any(weight.grad is not None for weight in self.gradients.weights):  # the scaler takes no step of nothing
            self.scaler.step(self.optimizer)
            self.scaler.update()
        if self.average is not None and self.recipe.optimizer.ema is not None:
            self.average.update_parameters(self.model)
        return read

    def validate(self) -> Recalls:
        """Return the recalls on the validation split; NotFinite where a similarity is no number."""
        try:
            with self.repeatable(0):
                similarity = compare(self.kept, *embed(self.kept, self._val), self._texts)
            return recalls(similarity, self._caption_image, "full", "pessimistic")
        except RunError as error:
            what = f"the similarities are not finite in the validation of epoch {self.epoch + 1}"
            read = chain(self._val.image_features(_READ), self._val.caption_features(_READ))
            raise self._not_finite(what, read) from error

    def _watch(self, terms: dict[str, float], at_rest: dict[str, float], log: TrainLog) -> None:
        """Count the steps at which a term sits at its value for equal similarities, and warn when it has for long."""
        near = [name for name, value in at_rest.items() if abs(terms[name] - value) < _NEAR * abs(value)]
        self.at_constant = self.at_constant + 1 if near else 0
        if self.at_constant == COLLAPSED:
            term, epochs = near[0], self.recipe.terms[near[0]].get("warmup_epochs")
            warm = "" if epochs is None else f"loss.{term}.warmup_epochs={epochs + 1} or --set "
            log.say(
                f"collapse: the {term} loss has sat at {at_rest[term]:g}, its value for equal similarities, for"
                f" {COLLAPSED} steps, so that little is learnt; begin another run with --set {warm}optimizer.lr="
                f"{self.recipe.optimizer.lr / 10:g}"
            )

    def _not_finite(self, what: str, read: Iterable[Features]) -> NotFinite:
        """Return the error that ends a training whose numbers are not finite; they came from what was `read`."""
        seen, way = what, f"begin another run with --set optimizer.lr={self.recipe.optimizer.lr / 10:g}"
        if self.objective.precision is not None:
            way += " or --set runtime.precision=float32"
        parts = (value for one in read for part in one.parts for value in (part.local, part.global_))
        if not all(value.isfinite().all() for value in parts if value is not None):
            way = "features in the cache are not finite themselves: extract their set again"
            seen = f"{what}; {way}"
        kept = "" if self.best is None else "the weights of the best epoch before are kept; "
        return NotFinite(f"{what}; {kept}{way}", seen)

    def _clock(self) -> float:
        return time.perf_counter() - self.waited

    def _epochs_at(self, steps: int) -> float:
        return self.epoch + steps / self._steps_an_epoch

    @contextmanager
    def repeatable(self, *seed: int) -> Iterator[None]:
        """Let the same seed give the same numbers, whatever else this process trains at the same time."""
        with drawing(self.device, *seed), deterministic(self.device), float32_as(self.recipe.runtime.precision):
            yield

    @property
    def seed(self) -> int:
        """That of the samples' order, and of what a step draws."""
        return self._run.info.seed

    @property
    def drawn_from(self) -> tuple[int, int, int]:
        """What the next step's batch and draws follow from."""
        return self.seed, self.epoch, self.steps

    def _epoch(self, **order: Any) -> Iterator[Batch]:
        return self._split.epoch(**order)

    @property
    def _last_rate(self) -> float:
        """The learning rate of the epoch's last step so far, before the factors of its parts."""
        schedule, last = self.recipe.schedule, self._epochs_at(self.steps - 1)
        return learning_rate(schedule, self.recipe.optimizer.lr, last) * warmup(schedule, last)


def stopped_early(epochs: int, best_epoch: int, patience: int | None) -> bool:
    """Return whether the last `patience` epochs have not been better than the best."""
    return patience is not None and epochs - best_epoch >= patience
