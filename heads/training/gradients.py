"""A batch's loss and gradients, on a GPU by one launch where that is possible: both passes as a CUDA graph.

A GPU computes a small head's operations faster than its host can launch them, by 4 to 20 times. A graph holds them for
one shape of the batch, and reads the batch from where it was when it was recorded.
"""

from collections.abc import Callable, Hashable
from dataclasses import dataclass
from functools import lru_cache, partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import register_pytree_node, tree_leaves, tree_map_only

from ...pipeline.device import start_reading
from ...pipeline.reading.batches import Batch
from ...pipeline.reading.features import Features
from ..model import losses_of
from .objective import Objective, Prepared
from .optimisation import drop_frozen, frozen_groups, weights_of

MOST = 8  # graphs at once; each keeps gradients and a batch in the device's memory
register_pytree_node(Features, lambda value: (list(vars(value).values()), None), lambda values, _: Features(*values))


class Gradients:
    """Computes the loss of a batch, and leaves its gradients in the weights, clipped as the recipe says.

    On a GPU, the first batch of each shape goes operation by operation, and prepares what they need; with the second
    one they are recorded, and from then on repeated together. Numbers are the same bits either way.

    Attributes:
        refused: why no graph is used on a GPU, a clause; None: they are.
        graphs: by the shape of their batches and which weights learn.
    """

    def __init__(self, objective: Objective, optimizer: torch.optim.Optimizer, scaler: torch.amp.GradScaler) -> None:
        self.objective, self.optimizer, self.scaler = objective, optimizer, scaler
        self.weights: list[Tensor] = list(weights_of(objective.model, objective.losses))
        self.refused = _refusal(objective)
        self._capture = self.weights[0].is_cuda and self.refused is None
        self._seen: set[Hashable] = set()
        self.graphs: dict[Hashable, _Graph] = {}

    def __call__(self, batch: Batch, now: float) -> Callable[[], Tensor]:
        """Return what waits for the loss and its terms, ``[1 + T]`` on the host, of a batch after `now` epochs."""
        if not self._capture:
            return self._launched(partial(self.objective, batch, now), now)
        given = self.objective.prepare(batch, now)
        key = _shape(given), frozen_groups(self.optimizer, now)  # what is recorded learns what learned then
        if key not in self.graphs:
            if key not in self._seen or len(self.graphs) == MOST:
                self._seen.add(key)
                return self._launched(partial(self.objective.loss, given), now)
            self.graphs[key] = self._recorded(given, now)
        return self.graphs[key].replay(given)

    def _launched(self, compute: Callable[[], Tensor], now: float) -> Callable[[], Tensor]:
        self._forget()
        loss = compute()
        read = start_reading(loss.detach())
        self.scaler.scale(self.total(loss)).backward()
        self._clip(now)
        return read

    def _forget(self) -> None:
        for weight in self.weights:
            weight.grad = None

    def total(self, loss: Tensor) -> Tensor:
        """Return what the gradients are of, from what the objective gives."""
        return loss[0]

    def _clip(self, now: float) -> None:
        drop_frozen(self.optimizer, now)
        largest = self.objective.recipe.optimizer.clip
        learning = [weight for weight in self.weights if weight.grad is not None]
        if largest is not None and learning:
            self.scaler.unscale_(self.optimizer)
            nn.utils.clip_grad_norm_(learning, largest)

    def _recorded(self, given: Prepared, now: float) -> "_Graph":
        inputs: Prepared = tree_map_only(Tensor, torch.clone, given)
        self._forget()
        graph = torch.cuda.CUDAGraph()
        for generator in self.objective.generators:
            graph.register_generator_state(generator)
        # Graphs run one after the other, and so share their memory. Threads that read ahead go on meanwhile.
        pool = next((one.graph.pool() for one in self.graphs.values()), None)
        side = _side(self.weights[0].device)
        how: dict[str, Any] = {"pool": pool, "stream": side, "capture_error_mode": "thread_local"}
        # The first chooses the GPU, and puts back the thread's stream also where the second fails.
        with torch.cuda.stream(side), torch.cuda.graph(graph, **how):
            loss = self.objective.loss(inputs)
            self.total(loss).backward()
            self._clip(now)
        learned = [(weight, weight.grad) for weight in self.weights if weight.grad is not None]
        return _Graph(graph, tensors_in(inputs), loss.detach(), learned)


# By device, one to record on: torch's own is of whichever GPU was the thread's when it first recorded something.
_side = lru_cache(64)(torch.cuda.Stream)


@dataclass
class _Graph:
    """Both passes over a batch of one shape: where they read it, and where they leave loss and gradients."""

    graph: torch.cuda.CUDAGraph
    inputs: list[Tensor]
    loss: Tensor
    learned: list[tuple[Tensor, Tensor]]

    def replay(self, given: Prepared) -> Callable[[], Tensor]:
        """Compute a batch; return what waits for its loss and terms."""
        torch._foreach_copy_(self.inputs, tensors_in(given), non_blocking=True)
        self.graph.replay()
        for weight, gradient in self.learned:
            weight.grad = gradient
        return start_reading(self.loss)


def _refusal(objective: Objective) -> str | None:
    recipe = objective.recipe
    if recipe.runtime.capture == "off":
        return "runtime.capture is off"
    if recipe.code:
        return f"{' and '.join(recipe.code)} may ask the device for values"
    if not objective.static:
        return "its backbones learn"
    if recipe.data.chunk is not None:
        return "data.chunk embeds batches in parts"
    if objective.precision is torch.float16:
        return "float16 scales the loss anew"
    asking = [name for name, term in zip(recipe.terms, losses_of(objective.losses), strict=True) if term.asks_lengths]
    return f"loss.{asking[0]} asks for lengths" if asking else None


def tensors_in(value: Any) -> list[Tensor]:
    """Return the tensors in a value, in the order in which `tree_map_only` comes upon them."""
    return [leaf for leaf in tree_leaves(value) if isinstance(leaf, Tensor)]


def _shape(value: Any) -> Hashable:
    """Return what of a value a graph depends on: shapes and types of its tensors, and whatever else stands in it."""
    leaves = tree_leaves(value)
    return tuple((leaf.shape, leaf.stride(), leaf.dtype) if isinstance(leaf, Tensor) else leaf for leaf in leaves)
