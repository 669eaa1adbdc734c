"""What may go wrong while a head learns, and what to say: numbers that are not finite, collapse, lack of memory."""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from ...pipeline.device import within_memory
from ...pipeline.errors import NotFinite, OutOfMemory
from ...pipeline.reading.features import Features
from ..modules.losses.triplet import Triplet
from ..recipes.blocks import Recipe
from ..runs.run import Run

STEPS = 100  # as long must the loss sit there
NEAR = 0.01  # of the constant


class CollapseDetector:
    """Sees whether a triplet loss with hardest negatives sits at its constant: all similarities of a batch are equal.

    The hinge of every pair is then the margin, in both directions: 2 x margin in the mean, as many times as there are
    pairs in the sum (known of VSE++'s, PVSE's and DivE's public code).

    Args:
        losses: the terms; without such a triplet loss nothing is looked for.
        same_text: how captions of equal text count. Where they are positives, nothing is looked for in a sum: how many
            they are is not known.
    """

    def __init__(self, losses: nn.ModuleDict, same_text: str = "negative") -> None:
        self.names = list(losses)
        triplet = losses["triplet"] if "triplet" in self.names else None
        self.triplet = triplet if isinstance(triplet, Triplet) else None
        if self.triplet is not None and self.triplet.reduction == "sum" and same_text == "positive":
            self.triplet = None
        self.warned = False

    def constant(self, pairs: int) -> float | None:
        """Return the loss of a batch with so many positive pairs if all similarities are equal; None: it has none."""
        loss = self.triplet
        # While all negatives count, an untrained head is near that constant too, and gets away from it.
        if loss is None or loss.negatives != "hardest" or loss.epoch < loss.warmup_epochs or not loss.margin:
            return None
        return 2 * loss.margin * (pairs if loss.reduction == "sum" else 1)

    def steps_at_constant(self, values: Tensor, pairs: int, before: int) -> int:
        """Return for how many steps on end the loss sits there.

        Args:
            values: the loss and its terms, ``[1 + T]``.
            pairs: positive ones of the batch.
            before: the number before this step.
        """
        constant = self.constant(pairs)
        if constant is None:
            return 0
        value = values[1 + self.names.index("triplet")].item()
        return before + 1 if abs(value - constant) < NEAR * constant else 0

    def warning(self, steps: int, lr: float) -> str | None:
        """Return, once, what to change when the loss has sat there for `STEPS` steps.

        Args:
            steps: for how many it has.
            lr: the recipe's learning rate.
        """
        if self.triplet is None or self.warned or steps < STEPS:
            return None
        self.warned = True
        constant = "2 x margin x pairs" if self.triplet.reduction == "sum" else "2 x margin"
        return (
            f"collapse: the triplet loss has sat at its constant {constant} for {STEPS} steps, so that all embeddings "
            "are alike and little is learnt; begin another run with --set loss.triplet.warmup_epochs="
            f"{self.triplet.warmup_epochs + 1} or --set optimizer.lr={lr / 10:g}"
        )


def not_finite(what: str, run: Run, lr: float, precision: torch.dtype | None, read: Iterable[Features]) -> NotFinite:
    """Return the error that ends a training whose numbers are not finite.

    Args:
        what: which numbers, and where.
        run: which may have weights of a better epoch.
        lr: the learning rate.
        precision: see `optimisation.autocast_dtype`.
        read: what the numbers came from.
    """
    seen, way = what, f"begin another run with --set optimizer.lr={lr / 10:g}"
    if precision is not None:
        way += " or --set runtime.precision=float32"
    if not all(map(_is_finite, read)):
        way = "features in the cache are not finite themselves: extract their set again"
        seen = f"{what}; {way}"
    kept = "the weights of the best epoch before are kept; " if run.has_weights else ""
    return NotFinite(f"{what}; {kept}{way}", seen)


def _is_finite(features: Features) -> bool:
    both = (value for part in features.parts for value in (part.local, part.global_))
    return all(value.isfinite().all() for value in both if value is not None)


@contextmanager
def enough_memory(device: torch.device, recipe: Recipe) -> Iterator[None]:
    """Turn a lack of memory into a sentence that also says which keys of the recipe need less.

    Raises:
        OutOfMemory: it does not suffice.
    """
    try:
        with within_memory(device):
            yield
    except OutOfMemory as error:
        ways = []
        if recipe.data.chunk is None:
            ways.append("embed a batch in parts with data.chunk=32, for the same gradients")
        if (device.type == "cuda" and recipe.runtime.cache in ("auto", "device")) or recipe.runtime.cache != "stream":
            ways.append("leave the features in the store with runtime.cache=stream")
        raise OutOfMemory("; or ".join([str(error), *ways])) from error.__cause__
