"""Which trainings can be stacked, and the losses and gradients of a step of all.

Their recipes differ in numbers alone, their weights lie side by side, and ``vmap`` computes them at once.
"""

from collections.abc import Callable, Hashable, Sequence
from copy import deepcopy
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn.functional import pad
from torch.utils._pytree import tree_map_only

from ...pipeline.device import drawing, stacking
from ...pipeline.reading.batches import Batch
from ...pipeline.reading.joined_sets import parts_of
from ...pipeline.reading.split import Split
from ...pipeline.store import FeatureCache
from ..model import Branch, Model, build_losses, build_model, feature_facts, losses_of
from ..modules.losses import Loss
from ..modules.losses.blocks import BlockLoss, pairs_of
from ..recipes.blocks import Recipe, role
from ..runs.features import sets_named
from .gradients import Gradients, tensors_in
from .objective import Objective, Prepared
from .optimisation import components_of
from .trainer import Trainer

_OF_EACH = ("loss", "adapter", "aggregator", "similarity")  # parts of a recipe whose numbers may differ


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
        units = len(Split.of(*sets, "train").drawn(recipe.data.share).images)
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
    return reads_rows and any(isinstance(part, nn.Dropout) and part.p > 0 for part in branch.modules())


class Ragged(Exception):
    """Batches of several seeds differ in shape."""


class _Given(NamedTuple):
    """The batches of several trainings: side by side, or one for all."""

    batches: Prepared
    of_cell: tuple[int, ...] | None  # which of the generators each training draws from; None: all from the same


class StackedObjective(Objective):
    """The losses of several trainings of one structure, ``[cells, 1 + T]``, whose weights it lays side by side."""

    def __init__(self, trainers: Sequence[Trainer]) -> None:
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
        """Prepare the batch of each seed, and begin its draws; `Ragged` where they differ in their numbers.

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
            return given._replace(pairs=None)
        assert given.positives is not None
        return given if given.pairs is not None else given._replace(pairs=pairs_of(given.positives))

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
            batches = tree_map_only(Tensor, lambda _: next(rest), given.batches)
            found: Tensor = functional_call(self.head, stacks, (batches,))
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
    """Return the batch of each cell, side by side, padded to the most rows; `Ragged` where their samples differ."""
    counts = {(len(one.images.length), len(one.captions.length), one.pairs and len(one.pairs.rows)) for one in given}
    if len(counts) > 1:
        raise Ragged
    columns = [_padded(column) for column in zip(*map(tensors_in, given), strict=True)]
    stacks = iter([torch.stack([column[place] for place in of_cell]) for column in columns])
    found: Prepared = tree_map_only(Tensor, lambda _: next(stacks), given[0])
    return found


def _padded(tensors: Sequence[Tensor]) -> list[Tensor]:
    longest = max(tensor.shape[1] if tensor.ndim > 1 else 0 for tensor in tensors)
    if all(tensor.ndim < 2 or tensor.shape[1] == longest for tensor in tensors):
        return list(tensors)
    return [pad(tensor, (0, 0) * (tensor.ndim - 2) + (0, longest - tensor.shape[1])) for tensor in tensors]


class StackedGradients(Gradients):
    """Computes the gradients of several trainings' batches at once, and hands each its own."""

    objective: StackedObjective

    def __init__(self, trainers: Sequence[Trainer]) -> None:
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
