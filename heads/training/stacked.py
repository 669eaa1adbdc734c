"""Trainings that differ in numbers alone, together: weights lie side by side, and one step serves them all.

Each training is a `Trainer` in a thread of its own, with its run folder, schedule, best epoch and end. At each step it
asks the `Stack`, which waits until all have asked, computes their losses and gradients at once by `torch.vmap`, and
lets each one's optimiser change its weights. What a training draws, it draws as if it were alone.
"""

import logging
import threading
from collections import defaultdict
from collections.abc import Callable, Hashable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from copy import copy, deepcopy
from dataclasses import dataclass, replace
from functools import lru_cache, partial
from itertools import count
from queue import SimpleQueue
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn.functional import pad

from ...pipeline.device import drawing, stacking
from ...pipeline.openmp import waiting_well
from ...pipeline.reading.batches import Batch, Batches
from ...pipeline.reading.features import Features
from ...pipeline.reading.joined_sets import parts_of
from ...pipeline.reading.placement import free_host_memory
from ...pipeline.reading.split import Split
from ...pipeline.store import FeatureCache
from ...pipeline.wording import counted, reason
from ..evaluation.metrics import Recalls
from ..model import Branch, Model, build_losses, build_model, feature_facts, losses_of
from ..modules.losses import Loss
from ..modules.losses.blocks import BlockLoss, pairs_of
from ..recipes.blocks import Recipe, role
from ..runs.features import sets_named
from ..runs.run import Run
from .gradients import Gradients, mapped, tensors_in
from .objective import Objective, Prepared
from .optimisation import components_of
from .trainer import Trainer, TrainSummary

R = TypeVar("R")
AT_ONCE = 32  # trainings, each with a thread and weights of its own; of a step memory decides
FILLING = 2 << 20  # bytes of a training's step on a CPU beyond which several at once took longer than one by one
SHARE = 0.5  # of the free memory that one step may take
_OF_EACH = ("loss", "adapter", "aggregator", "similarity")  # parts of a recipe whose numbers may differ
_log = logging.getLogger("xret")


def structure(recipe: Recipe) -> Hashable:
    """Return what the recipes of trainings must have in common to be trained together: all but numbers."""

    def kept(key: str, value: Any) -> Any:
        part = key.partition(".")[0]
        if part == "schedule" or role(key) == "described":
            return None
        if part == "optimizer" and not key.endswith("_lr"):
            return None
        return value > 0 if isinstance(value, float) and part in (*_OF_EACH, "optimizer") else value

    return tuple((key, repr(kept(key, value))) for key, value in sorted(recipe.flat().items()))


def refusal(recipe: Recipe, store: str) -> str | None:
    """Return why heads of a recipe are trained one by one on a store, a clause; None: they can be stacked."""
    if recipe.code:
        return f"{' and '.join(recipe.code)} may do what cannot be"
    sets = sets_named(FeatureCache.open(store), recipe.data.image, recipe.data.text)
    with torch.device("meta"):
        model = build_model(recipe, *map(feature_facts, sets))
        terms = losses_of(build_losses(recipe, feature_facts(sets[1])))
    if why := _alone(recipe, model, terms):
        return f"{why} cannot be"
    if recipe.runtime.precision == "float16":
        return "float16 cannot be, which scales the loss"
    if recipe.data.chunk is not None:
        units = len(Split.of(*sets, "train").drawn(recipe.data.share).image_rows)
        if recipe.data.unit == "caption" or min(units, recipe.data.batch_size) > recipe.data.chunk:
            return "data.chunk embeds batches in parts"
    for side, features, drops in (("image", sets[0], recipe.augment.image), ("text", sets[1], recipe.augment.text)):
        varies = drops or any(part.length.min() < part.length.max() for part in parts_of(features))
        if varies and _drops_rows(getattr(model, side)):
            return f"dropout in the rows of {side}s cannot be, whose number varies"
    return None


def _alone(recipe: Recipe, model: Model, terms: Sequence[Loss]) -> str | None:
    """Return what of a head cannot be stacked."""
    parts = (*model.modules(), *nn.ModuleList(terms).modules())
    if any(isinstance(part, nn.RNNBase | nn.RNNCellBase) for part in parts):
        return "a recurrent network"
    if model.image.aggregator.draws or model.text.aggregator.draws:
        return "samples of a Gaussian"
    rates = [getattr(recipe.optimizer, f"{name}_lr") for name in components_of(model, nn.ModuleDict())]
    adapters = [one for side in (model.image, model.text) for one in (*side.adapters, *side.twins)]
    if 0 in rates or any(epochs for one in adapters for epochs in one.frozen().values()):
        return "weights that do not learn at first"
    return next((term.alone for term in terms if term.alone), None)


def _drops_rows(branch: Branch) -> bool:
    reads_rows = branch.aggregator.uses_local or any(one.global_ in ("mean", "max") for one in branch.adapters)
    rates = ("p", "dropout", "state_dropout", "output_dropout")
    found = (getattr(part, name, 0) for part in branch.modules() for name in rates)
    return reads_rows and any(isinstance(rate, float) and rate > 0 for rate in found)


@dataclass(frozen=True, eq=False)
class _Asked:
    """A step, or without a batch a validation, that a training waits for."""

    trainer: "StackedTrainer"
    batch: Batch | None
    answer: "Future[Any]"


class StackedTrainer(Trainer):
    """A training whose steps are computed with those of others; it runs in a thread of its own."""

    def __init__(self, stack: "Stack", objective: Objective, *rest: Any) -> None:
        super().__init__(objective, *rest)
        self._stack, self.number = stack, stack.joined()

    def train(self, run: Run, split: Batches, val: Batches, *rest: Any) -> TrainSummary:
        """Train the epochs that are left, see `Trainer.train`."""
        return super().train(run, split, self._stack.kept(val), *rest)

    def _step(self, batch: Batch) -> Callable[[], Tensor]:
        found: Callable[[], Tensor] = self._stack.ask(self, batch)
        return found

    def _validate(self) -> Recalls:
        found: Recalls = self._stack.ask(self, None)
        return found

    def _epoch(self, **order: Any) -> Iterator[Batch]:
        return self._stack.shared(lambda first: self._split.epoch(**{**order, "first": first}), **order)

    def gradients_alone(self, batch: Batch) -> Callable[[], Tensor]:
        """Compute the gradients of a step by itself."""
        with self.repeatable(*self.drawn_from):
            return self.gradients(batch, self.begin_step())

    def changed(self, read: Callable[[], Tensor]) -> Callable[[], Tensor]:
        """Let the gradients change the weights, and return what waits for the loss."""
        self.change_weights(read)
        return read

    def step_alone(self, batch: Batch) -> Callable[[], Tensor]:
        """Take a step by itself."""
        return super()._step(batch)

    def validate_alone(self) -> Recalls:
        """Validate in the thread that calls."""
        return super()._validate()

    @property
    def drawn_from(self) -> tuple[int, int, int]:
        """What its next step's draws and batch follow from."""
        return self.seed, self.epoch, self.steps


class Stack:
    """Trains several heads of one `structure` on the same features, in lockstep; see `run`."""

    def __init__(self) -> None:
        self._queue: SimpleQueue[_Asked | Future[Any]] = SimpleQueue()
        self._live, self._members = 0, 0
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

    def joined(self) -> int:
        """Return the number of a training that joins."""
        self._members += 1
        return self._members

    def ask(self, trainer: "StackedTrainer", batch: Batch | None) -> Any:
        """Wait for a step or a validation that another thread computes."""
        asked = _Asked(trainer, batch, Future())
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
                _fulfil(one, one.trainer.validate_alone)
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
            except _Ragged:
                self._by_seed = True
                by_seed: dict[int, list[_Asked]] = defaultdict(list)
                for one in group:
                    by_seed[one.trainer.seed].append(one)
                for part in by_seed.values():
                    self._step(part)
                return
        for number, one in enumerate(group):
            if reads is None:
                _fulfil(one, lambda one=one: one.trainer.step_alone(one.batch))  # type: ignore[misc]
            else:
                _fulfil(one, lambda one=one, read=reads[number]: one.trainer.changed(read))  # type: ignore[misc]

    def _together(self, group: Sequence[_Asked]) -> Sequence[Callable[[], Tensor]] | None:
        """Compute the gradients of a group at once; return what waits for each one's loss, None where that cannot be.

        The first step is also computed by one training alone, to see whether both agree, and what it takes of memory.
        """
        trainers = tuple(one.trainer for one in group)
        batches = [one.batch for one in group if one.batch is not None]
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
            with torch.autograd.graph.saved_tensors_hooks(partial(_note, saved), lambda tensor: tensor):
                here = _numbers_of(trainers[0], trainers[0].gradients_alone(batches[0]))
            near = (
                torch.allclose(*pair, rtol=1e-3, atol=1e-5, equal_nan=True) for pair in zip(there, here, strict=True)
            )
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


class _Ragged(Exception):
    """Batches of several seeds differ in shape."""


@dataclass
class _Given:
    """The batches of several trainings: side by side, or one for all."""

    batches: Prepared
    of_cell: tuple[int, ...] | None  # which of the generators each training draws from; None: all from the same


class StackedObjective(Objective):
    """The losses of several trainings of one structure, ``[cells, 1 + T]``, whose weights it lays side by side."""

    def __init__(self, trainers: Sequence[StackedTrainer]) -> None:
        first = trainers[0].objective
        recipe = replace(first.recipe, data=replace(first.recipe.data, chunk=None))
        super().__init__(recipe, deepcopy(first.model), deepcopy(first.losses))
        self.text_number, self.precision, self.mask = first.text_number, first.precision, first.mask
        self.device = trainers[0].device
        self.head, heads = _Head(self), [_Head(one.objective) for one in trainers]
        states = [dict([*head.named_parameters(), *head.named_buffers()]) for head in heads]
        self.own = {name: [state[name] for state in states] for name in states[0]}  # of each training, by name
        self.stacks = {name: _laid_together(own) for name, own in self.own.items()}
        self.numbers = [
            (part, name, torch.tensor(values, device=self.device))
            for part, *own in zip(self.head.modules(), *(head.modules() for head in heads), strict=True)
            for name, values in _differing(own).items()
        ]
        self.of_terms = torch.stack([one.objective.weights.to(self.device) for one in trainers])
        self.generators: list[torch.Generator] = []

    def buffers(self) -> dict[str, Tensor]:
        """Return copies of what changes with a batch beside the weights, as the statistics of a batch normalisation."""
        return {name: stack.clone() for name, stack in self.stacks.items() if not stack.requires_grad}

    def set_buffers(self, buffers: dict[str, Tensor]) -> None:
        """Take it back."""
        for name, values in buffers.items():
            self.stacks[name].copy_(values)

    def prepare(self, cells: Any, now: float) -> Any:
        """Prepare the batch of each seed, and begin its draws; `_Ragged` where they differ in their numbers.

        `cells` are trainings with their batches.
        """
        given: dict[Hashable, Prepared] = {}
        for trainer, batch in cells:
            if trainer.drawn_from not in given:
                if len(self.generators) == len(given):
                    self.generators.append(torch.Generator(self.device))
                with drawing(self.device, *trainer.drawn_from):
                    made = super().prepare(batch, now)
                    if self.device.type == "cpu":  # goes on where the augmentation has ended
                        self.generators[len(given)].set_state(torch.get_rng_state())
                    else:
                        self.generators[len(given)].manual_seed(torch.initial_seed())
                given[trainer.drawn_from] = self._with_pairs(made)
        number = {key: place for place, key in enumerate(given)}
        if len(given) == 1:
            return _Given(next(iter(given.values())), None)
        of_cell = tuple(number[trainer.drawn_from] for trainer, _ in cells)
        return _Given(_side_by_side([*given.values()], of_cell), of_cell)

    def _with_pairs(self, given: Prepared) -> Prepared:
        """List the pairs where a loss needs them, and only there: their number is part of a shape."""
        if not any(term.uses_pairs and not isinstance(term, BlockLoss) for term in losses_of(self.losses)):
            return replace(given, pairs=None)
        assert given.positives is not None
        return given if given.pairs is not None else replace(given, pairs=pairs_of(given.positives))

    def loss(self, given: Any) -> Tensor:
        """Compute the losses of prepared batches."""
        tensors, of_cell = tensors_in(given.batches), given.of_cell
        values = [values for _, _, values in self.numbers]

        def of_cell_alone(
            stacks: dict[str, Tensor], of_terms: Tensor, numbers: list[Tensor], tensors: list[Tensor]
        ) -> Tensor:
            for (part, name, _), value in zip(self.numbers, numbers, strict=True):
                setattr(part, name, value)
            self.weights = of_terms
            rest = iter(tensors)
            found: Tensor = functional_call(self.head, stacks, (mapped(given.batches, lambda _: next(rest)),))
            return found

        with stacking(self.generators[: 1 if of_cell is None else None], of_cell):
            dims = (0, 0, 0, None if of_cell is None else 0)
            found: Tensor = torch.vmap(of_cell_alone, dims)(self.stacks, self.of_terms, values, tensors)
        return found


class _Head(nn.Module):
    """All that learns in an objective, which it computes."""

    def __init__(self, objective: Objective) -> None:
        super().__init__()
        self.model, self.losses = objective.model, objective.losses
        self._objective = [objective]  # no part of it

    def forward(self, given: Prepared) -> Tensor:
        """Return the loss and its terms."""
        return Objective.loss(self._objective[0], given)


def _laid_together(own: Sequence[Tensor]) -> Tensor:
    """Return a weight or buffer of all heads as one tensor, of which theirs become parts."""
    stack = torch.stack([tensor.detach() for tensor in own])
    for tensor, part in zip(own, stack.unbind(), strict=True):
        tensor.data = part
    return stack.requires_grad_(own[0].requires_grad)


def _differing(parts: Sequence[nn.Module]) -> dict[str, list[float]]:
    """Return the numbers that the same module of several heads differs in, by attribute."""
    found = {
        name: [getattr(part, name) for part in parts]
        for name, value in vars(parts[0]).items()
        if isinstance(value, float)
    }
    return {name: values for name, values in found.items() if len({*values}) > 1}


def _side_by_side(given: Sequence[Prepared], of_cell: Sequence[int]) -> Prepared:
    """Return the batch of each cell, side by side, padded to the most rows; `_Ragged` where their samples differ."""
    if len({(len(one.images.length), len(one.captions.length), _pairs(one)) for one in given}) > 1:
        raise _Ragged
    columns = [_padded(column) for column in zip(*map(tensors_in, given), strict=True)]
    stacks = iter([torch.stack([column[place] for place in of_cell]) for column in columns])
    found: Prepared = mapped(given[0], lambda _: next(stacks))
    return found


def _pairs(given: Prepared) -> int | None:
    return None if given.pairs is None else len(given.pairs.rows)


def _padded(tensors: Sequence[Tensor]) -> list[Tensor]:
    longest = max(tensor.shape[1] if tensor.ndim > 1 else 0 for tensor in tensors)
    if all(tensor.ndim < 2 or tensor.shape[1] == longest for tensor in tensors):
        return list(tensors)
    return [pad(tensor, (0, 0) * (tensor.ndim - 2) + (0, longest - tensor.shape[1])) for tensor in tensors]


class StackedGradients(Gradients):
    """Computes the gradients of several trainings' batches at once, and hands each its own."""

    objective: StackedObjective

    def __init__(self, trainers: Sequence[StackedTrainer]) -> None:
        first, objective = trainers[0], StackedObjective(trainers)
        super().__init__(objective, first.optimizer, first.scaler)
        self.trainers = trainers
        learning = {name: stack for name, stack in objective.stacks.items() if stack.requires_grad}
        self.weights = [*learning.values()]
        self._own = [objective.own[name] for name in learning]
        largest = [one.recipe.optimizer.clip for one in trainers]
        self._largest = (
            torch.tensor([one or torch.inf for one in largest], device=first.device) if any(largest) else None
        )

    def of_each(self, batches: Sequence[Batch]) -> list[Callable[[], Tensor]]:
        """Leave each training's gradients in its weights; return what waits for its loss and terms."""
        cells: Any = list(zip(self.trainers, batches, strict=True))
        read = self(cells, self.trainers[0].begin_step())
        for stack, own in zip(self.weights, self._own, strict=True):
            gradients = [None] * len(own) if stack.grad is None else stack.grad.unbind()
            for weight, gradient in zip(own, gradients, strict=True):
                weight.grad = gradient
        return [partial(_row, read, number) for number in range(len(self.trainers))]

    def total(self, loss: Tensor) -> Tensor:
        """Return the sum over all trainings, of which none changes another's gradient."""
        return loss[:, 0].sum()

    def _clip(self, now: float) -> None:
        gradients = [stack.grad for stack in self.weights if stack.grad is not None]
        if self._largest is None or not gradients:
            return
        norms = torch.stack([torch.linalg.vector_norm(one.reshape(len(one), -1), dim=1) for one in gradients])
        factor = (self._largest / (torch.linalg.vector_norm(norms, dim=0) + 1e-6)).clamp(max=1)
        torch._foreach_mul_(gradients, [factor.view(-1, *[1] * (one.ndim - 1)) for one in gradients])


def _row(read: Callable[[], Tensor], number: int) -> Tensor:
    return read()[number]
