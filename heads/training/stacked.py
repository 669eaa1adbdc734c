"""Trainings that differ in numbers alone, together: weights lie side by side, and one step serves them all.

Each training is a `Trainer` in a thread of its own, with its run folder, schedule, best epoch and end. At each step it
asks the `Stack`, which waits until all have asked, computes their losses and gradients at once by `torch.vmap`, and
lets each one's optimiser change its weights. What a training draws, it draws as if it were alone.
"""

import logging
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Hashable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from copy import copy
from dataclasses import dataclass, field
from functools import lru_cache, partial
from itertools import count
from queue import SimpleQueue
from typing import Any, TypeVar

import torch
from torch import Tensor

from ...pipeline.openmp import waiting_well
from ...pipeline.reading.batches import Batch, Batches
from ...pipeline.reading.features import Features
from ...pipeline.reading.placement import free_host_memory
from ...pipeline.wording import counted, reason
from ..evaluation.metrics import Recalls
from ..model import losses_of
from ..runs.run import Run
from .objective import Objective
from .stacking import Ragged, StackedGradients
from .trainer import Trainer, TrainSummary

R = TypeVar("R")
AT_ONCE = 32  # trainings, each with a thread and weights of its own; of a step memory decides
FILLING = 2 << 20  # bytes of a training's step on a CPU beyond which several at once took longer than one by one
SHARE = 0.5  # of the free memory that one step may take
_log = logging.getLogger("xret")


@dataclass(frozen=True, eq=False)
class _Asked:
    """A step, or without a batch a validation, that a training waits for."""

    trainer: "StackedTrainer"
    batch: Any  # a `Batch`, or None
    answer: "Future[Any]" = field(default_factory=Future)
    since: float = field(default_factory=time.perf_counter)


class StackedTrainer(Trainer):
    """A training whose steps are computed with those of others; it runs in a thread of its own."""

    def __init__(self, stack: "Stack", objective: Objective, *rest: Any) -> None:
        super().__init__(objective, *rest)
        self._stack, self.number = stack, next(stack.numbers)

    def train(self, run: Run, split: Batches, val: Batches, *rest: Any) -> TrainSummary:
        """Train the epochs that are left, see `Trainer.train`."""
        return super().train(run, split, self._stack.kept(val), *rest)

    def take_step(self, batch: Batch) -> Callable[[], Tensor]:
        """Wait for a step that is taken together with others, or alone."""
        found: Callable[[], Tensor] = self._stack.ask(self, batch)
        return found

    def validate(self) -> Recalls:
        """Wait for a validation."""
        found: Recalls = self._stack.ask(self, None)
        return found

    def _epoch(self, **order: Any) -> Iterator[Batch]:
        return self._stack.shared(lambda first: self._split.epoch(**{**order, "first": first}), **order)


class Stack:
    """Trains several heads of one `structure` on the same features, in lockstep; see `run`."""

    def __init__(self) -> None:
        self._queue: SimpleQueue[_Asked | Future[Any]] = SimpleQueue()
        self._live, self.numbers = 0, count()  # how many trainings are not over; those of trainings that join
        self._asked, self._pending = list[_Asked](), list[_Asked]()  # which are answered, and the next ones
        self._reading = threading.Lock()
        self._epochs: dict[Hashable, _Shared] = {}
        self._val: Batches | None = None
        self._steps: dict[tuple[StackedTrainer, ...], StackedGradients] = {}
        self._most: int | None = None  # at once; None: not known yet
        self._refused = False  # whether nothing is stacked
        self._by_seed = False  # whether only trainings of one seed have batches of one shape

    def run(self, trainings: Sequence[Callable[["Stack"], R]]) -> list["Future[R]"]:
        """Call all `trainings`, each in a thread of its own, and return what comes of each.

        They begin one after the other, so that what is read for one is there for the next. An error ends one alone;
        an interruption ends all of them.
        """
        found: list[Future[R]] = []
        with ThreadPoolExecutor(len(trainings), "training") as pool, waiting_well():
            try:
                for training in trainings:
                    found.append(pool.submit(training, self))
                    self._live += 1
                    found[-1].add_done_callback(self._queue.put)
                    self._take()
                while self._live:
                    while len(self._pending) < self._live:
                        self._take()
                    asked = sorted(self._pending, key=lambda one: one.trainer.number)
                    these = 1 if self._refused else len(asked)  # one training after the other, or all together
                    self._asked, self._pending = asked[:these], asked[these:]
                    self._answer(self._asked)
            except BaseException as error:
                while self._live:
                    for one in (*self._asked, *self._pending):
                        if not one.answer.done():
                            one.answer.set_exception(error)
                    self._pending = []
                    with suppress(BaseException):
                        self._take()
                raise
        return found

    def ask(self, trainer: "StackedTrainer", batch: Batch | None) -> Any:
        """Wait for a step or a validation that another thread computes."""
        asked = _Asked(trainer, batch)
        self._queue.put(asked)
        return asked.answer.result()

    def kept(self, val: Batches) -> Batches:
        """Return what all validate on, which is read once."""
        if self._val is None:
            self._val = copy(val)
            for name in ("image_features", "caption_features"):
                setattr(self._val, name, lru_cache(1)(partial(_listed, getattr(val, name))))
        return self._val

    def shared(self, read: Callable[[int], Iterator[Batch]], first: int, **order: Any) -> Iterator[Batch]:
        """Yield the batches of an epoch from the first one on, read once for all trainings that want the same."""
        key = (first, *order.values())
        with self._reading:
            epoch = self._epochs.setdefault(key, _Shared(read(first), first))
            epoch.readers += 1
        try:
            for number in count(first):
                with self._reading:
                    if number < epoch.first:  # the others are farther
                        break
                    batch = epoch.batch(number)
                if batch is None:
                    return
                yield batch
            yield from read(number)
        finally:
            with self._reading:
                epoch.readers -= 1
                if not epoch.readers:
                    self._epochs.pop(key, None)

    def _take(self) -> None:
        """Wait until a training asks or ends; what ends one by no `Exception`, as Ctrl-C does, ends all."""
        asked = self._queue.get()
        if isinstance(asked, _Asked):
            self._pending.append(asked)
            return
        self._live -= 1
        error = asked.exception()
        if error is not None and not isinstance(error, Exception):
            raise error

    def _answer(self, asked: Sequence[_Asked]) -> None:
        groups: dict[Hashable, list[_Asked]] = defaultdict(list)
        for one in asked:
            if one.batch is None:  # what follows an epoch follows in one order, as where trials are pruned
                _fulfil(one, partial(Trainer.validate, one.trainer))
                self._take()
                continue
            now = one.trainer.begin_step()
            phases = tuple(term.begin(now) for term in losses_of(one.trainer.losses))
            groups[phases, one.trainer.seed if self._by_seed else None].append(one)
        for group in groups.values():
            left = group
            while left:
                most = self._most or 2  # as few as can be while nobody knows what they take
                self._step(left[:most])
                left = left[most:]

    def _step(self, group: Sequence[_Asked]) -> None:
        reads: Sequence[Callable[[], Tensor]] | None = None
        if len(group) > 1 and not self._refused:
            try:
                reads = self._together(group)
            except Ragged:
                self._by_seed = True
                by_seed: dict[int, list[_Asked]] = defaultdict(list)
                for one in group:
                    by_seed[one.trainer.seed].append(one)
                for part in by_seed.values():
                    self._step(part)
                return
        for number, one in enumerate(group):
            if reads is not None:
                _fulfil(one, partial(one.trainer.change_weights, reads[number]))
                continue
            if self._refused:
                one.trainer.waited += time.perf_counter() - one.since
            _fulfil(one, partial(Trainer.take_step, one.trainer, one.batch))

    def _together(self, group: Sequence[_Asked]) -> Sequence[Callable[[], Tensor]] | None:
        """Compute the gradients of a group at once; return what waits for each one's loss, None where that cannot be.

        The first step is also computed by one training alone, to see whether both agree, and what it takes of memory.
        """
        trainers = tuple(one.trainer for one in group)
        batches: list[Batch] = [one.batch for one in group]
        if trainers not in self._steps:  # others hold the weights
            for key in [key for key in self._steps if {*key} & {*trainers}]:
                del self._steps[key]
            self._steps[trainers] = StackedGradients(trainers)
        gradients = self._steps[trainers]
        if self._most is not None:
            with trainers[0].repeatable(*trainers[0].drawn_from):
                return gradients.of_each(batches)
        before = gradients.objective.buffers()
        try:
            with trainers[0].repeatable(*trainers[0].drawn_from):
                reads = gradients.of_each(batches)
            after, there = gradients.objective.buffers(), _numbers_of(trainers[0], reads[0])
            wrong = None
        except (RuntimeError, TypeError, ValueError) as error:
            wrong = f"an operation cannot be stacked ({reason(error)})"
        gradients.objective.set_buffers(before)
        saved: dict[int, int] = {}
        if wrong is None:
            noted = torch.autograd.graph.saved_tensors_hooks(partial(_note, saved), lambda tensor: tensor)
            with trainers[0].repeatable(*trainers[0].drawn_from), noted:
                here = _numbers_of(trainers[0], trainers[0].gradients(batches[0], trainers[0].begin_step()))
            pairs = zip(there, here, strict=True)
            near = (torch.allclose(*pair, rtol=1e-3, atol=1e-5, equal_nan=True) for pair in pairs)
            if trainers[0].device.type == "cpu" and not all(near):  # a GPU's dropout draws otherwise than when stacked
                wrong = "stacked, their numbers would be others"
            if trainers[0].device.type == "cpu" and sum(saved.values()) > FILLING:
                wrong = "each fills the processor"
            gradients.objective.set_buffers(before if wrong else after)
        if wrong is not None:
            self._refused = True
            self._steps.clear()
            _log.info(f"trained one by one: {wrong}")
            return None
        need = 2 * sum(saved.values()) + 4 * sum(weight.nbytes for weight in trainers[0].gradients.weights)
        device = trainers[0].device
        free = torch.cuda.mem_get_info(device)[0] if device.type == "cuda" else free_host_memory()
        self._most = max(2, int(SHARE * free / need))
        _log.info(f"{counted(min(self._live, self._most), 'training')} at once, which differ in numbers alone")
        return reads


def _listed(read: Callable[[int], Iterator[Features]], batch_size: int) -> list[Features]:
    return list(read(batch_size))


def _fulfil(asked: _Asked, work: Callable[[], Any]) -> None:
    """Answer a training with what `work` returns, or with its error."""
    try:
        asked.answer.set_result(work())
    except Exception as error:  # of one training, which it ends
        asked.answer.set_exception(error)


def _note(saved: dict[int, int], tensor: Tensor) -> Tensor:
    """Note the bytes of what is kept for the way back."""
    saved[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
    return tensor


def _numbers_of(trainer: StackedTrainer, read: Callable[[], Tensor]) -> list[Tensor]:
    """Return the losses and the gradients of a training's step."""
    grads = (weight.grad for weight in trainer.gradients.weights)
    return [read().clone(), *(grad.detach().cpu().clone() for grad in grads if grad is not None)]


class _Shared:
    """The batches of an epoch that several trainings read, of which the last one is kept."""

    def __init__(self, batches: Iterator[Batch], first: int) -> None:
        self.batches, self.first, self.readers = batches, first - 1, 0
        self.last: Batch | None = None

    def batch(self, number: int) -> Batch | None:
        """Return the batch with a number, the last one or the next; None where there are no more."""
        if number > self.first:
            self.first, self.last = number, next(self.batches, None)
        return self.last
