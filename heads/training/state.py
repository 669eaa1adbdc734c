"""All that a step of training changes; with the seed and the recipe it is all that the next step depends on.

Random numbers need no place here: every step draws from a generator seeded by the seed, its epoch and its number.
"""

import math
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.optim.swa_utils import AveragedModel

from ...pipeline.errors import RunError
from ...pipeline.reading.batches import Batches
from ...pipeline.reading.joined_sets import parts_of
from ..model import Model
from ..recipes.blocks import Recipe
from ..runs.config import difference
from ..runs.files import sha256_of
from ..runs.info import absolute
from ..runs.run import Run
from .failures import STEPS
from .optimisation import autocast_dtype, average_of

_WHOLE = "--init-from takes all weights of a run or none: train with its recipe.yaml on features like its own"
_PARTS = ("model", "losses", "optimizer", "scaler", "average")
_LAST_WEIGHTS = ("model", "average")
_COUNTS = ("epoch", "steps", "step", "best_epoch", "best_rsum", "at_constant")


@dataclass
class TrainingState:
    """The state between two steps.

    Attributes:
        model, losses, optimizer, scaler: what is trained, and how.
        average: of the model's weights, which is what is validated and kept once it has begun; or None.
        epoch: complete ones.
        steps: done in the epoch that is not complete.
        step: all steps together.
        best_epoch: counted from 1; 0 before the first.
        best_rsum: its validation RSUM.
        at_constant: for how many steps the loss has sat at its constant; see `failures.CollapseDetector`.
        sums: of the loss and its terms over `steps`, float64 ``[1 + T]``.
    """

    model: Model
    losses: nn.ModuleDict
    optimizer: torch.optim.Optimizer
    scaler: torch.amp.GradScaler
    average: AveragedModel | None = None
    epoch: int = 0
    steps: int = 0
    step: int = 0
    best_epoch: int = 0
    best_rsum: float = -math.inf
    at_constant: int = 0
    sums: Tensor = field(init=False)

    @classmethod
    def new(
        cls,
        model: Model,
        losses: nn.ModuleDict,
        optimizer: torch.optim.Optimizer,
        recipe: Recipe,
        target: torch.device,
    ) -> "TrainingState":
        """Return the state before the first step on `target`.

        Raises:
            RecipeError, RunError: a moving average would never move, or the device has no such precision.
        """
        # float16 loses small gradients without scaling; bfloat16 has float32's range.
        scaled = autocast_dtype(recipe.runtime.precision, target) is torch.float16
        scaler = torch.amp.GradScaler(target.type, enabled=scaled)
        return cls(model, losses, optimizer, scaler, average_of(model, recipe.optimizer))

    def __post_init__(self) -> None:
        self.sums = torch.zeros(1 + len(self.losses), dtype=torch.float64)

    @property
    def kept(self) -> Model:
        """The model whose weights are validated and kept."""
        if self.average is None or not self.average.n_averaged:
            return self.model
        return self.average.module  # type: ignore[return-value]

    def count(self, values: Tensor) -> None:
        """Count a step with the loss and its terms, ``[1 + T]``."""
        self.sums = self.sums + values
        self.steps, self.step = self.steps + 1, self.step + 1

    def close_epoch(self, rsum: float) -> None:
        """Count an epoch with its validation RSUM."""
        if rsum > self.best_rsum:
            self.best_epoch, self.best_rsum = self.epoch + 1, rsum
        self.epoch, self.steps, self.sums = self.epoch + 1, 0, torch.zeros_like(self.sums)

    def line(self, means: list[float], lr: float, rsum: float, seconds: float) -> dict[str, Any]:
        """Return what metrics.jsonl says of the epoch that ends now; `means` of its loss and terms."""
        loss, *parts = means
        line = {
            "epoch": self.epoch + 1,
            "step": self.step,
            "loss": loss,
            "parts": dict(zip(self.losses, parts, strict=True)),
            "lr": lr,
            "rsum": rsum,
            "seconds": round(seconds, 3),
        }
        return line | ({"collapsed": True} if self.at_constant >= STEPS else {})

    def stopped_early(self, patience: int | None) -> bool:
        """Return whether `patience` has ended the training."""
        return stopped_early(self.epoch, self.best_epoch, patience)

    def seed_step(self, seed: int) -> None:
        """Let the next step draw from a generator of its own."""
        torch.manual_seed(int(np.random.SeedSequence([seed, self.epoch, self.steps]).generate_state(1)[0]))

    def to_dict(self, *, over: bool = False) -> dict[str, Any]:
        """Return tensors and plain scalars.

        Of a training that is `over`, and cannot be lengthened, the last weights are left out: a fine-tuning goes on
        from the best ones, with the optimiser's state.
        """
        names = [name for name in _PARTS if getattr(self, name) is not None and not (over and name in _LAST_WEIGHTS)]
        parts = {name: getattr(self, name).state_dict() for name in names}
        return {name: getattr(self, name) for name in _COUNTS} | parts | {"sums": self.sums}

    def resume(self, run: Run) -> bool:
        """Go on where `run` is; return False where nothing has begun there.

        A state of complete epochs may lack what is new within one, and that of a training that is over the weights.

        Raises:
            RunError: the state is damaged; or one of both scales the loss, as float16 needs it, and the other does not.
        """
        state = run.load_state()
        if state is None:
            return False
        if bool(state["scaler"]) != self.scaler.is_enabled():
            then = "float16" if state["scaler"] else "another precision than float16"
            raise RunError(f"it was trained in {then}; to go on, set runtime.precision to what it was")
        for name in _PARTS:
            if getattr(self, name) is not None and (name in state or name not in _LAST_WEIGHTS):
                getattr(self, name).load_state_dict(state[name])
        for name in _COUNTS:
            setattr(self, name, state.get(name, 0))
        self.sums = state["sums"] if "sums" in state else torch.zeros_like(self.sums)
        return True


def stopped_early(epochs: int, best_epoch: int, patience: int | None) -> bool:
    """Return whether so many epochs have not been better than the best."""
    return patience is not None and epochs - best_epoch >= patience


def first_weights(init_from: str | Path | None, out: str | Path, resume: bool) -> Run | None:
    """Return the run whose weights a training begins with; one that goes on takes what it was begun with.

    Raises:
        RunError: there is no such run, or it has no weights, or `out` was begun with others.
    """
    run = Run(out) if resume and Path(out).exists() else None
    told = None if run is None else run.info.init_from
    if run is not None and init_from is not None:
        if told is None:
            raise RunError(f"{out} was begun without --init-from; resume it so, or take another --out")
        # The other run may have been moved, or be gone where it is needed no longer.
        if absolute(str(init_from)) != told["run"] and sha256_of(Run(init_from).weights) != told["sha256"]:
            raise RunError(
                f"{out} was begun with --init-from {told['run']}, whose weights are others; leave --init-from out, as"
                " the run knows it, or take another --out"
            )
    if run is not None and run.begun:
        return None  # its own weights count
    place = init_from or (None if told is None else told["run"])
    if place is None:
        return None
    base = Run(place)
    if told and told["sha256"] != sha256_of(base.weights):
        raise RunError(f"{base.path} has other weights than {out} was begun with; take another --out")
    return base


def take_losses(losses: nn.ModuleDict, recipe: Recipe, base: Run) -> None:
    """Give the terms of a new training what another run's have learned, where both have them with the same values.

    A temperature, for one. Nothing is taken of a run that was handed on without its state.

    Raises:
        RunError: its state is damaged.
    """
    state = base.load_state() if (base.path / "state.pt").exists() else None
    if state is None:
        return
    there = {term: {**block, "weight": 1} for term, block in base.recipe.terms.items()}
    same = {term for term, block in recipe.terms.items() if there.get(term) == {**block, "weight": 1}}
    learned = {key: value for key, value in state["losses"].items() if key.partition(".")[0] in same}
    losses.load_state_dict(losses.state_dict() | learned)


def take_weights(model: Model, base: Run, split: Batches) -> None:
    """Give a new model all weights of another run's best epoch.

    Raises:
        RunError: they do not fit, or its words are others.
    """
    vocabulary = split.caption_set.vocabulary
    if base.vocabulary != vocabulary:
        raise RunError(f"{base.path} knows other words than the captions of {split.caption_set.cache.url}; {_WHOLE}")
    there, here = base.model(torch.device("cpu")).state_dict(), model.state_dict()
    shapes = [{name: list(value.shape) for name, value in one.items()} for one in (there, here)]
    if said := difference(shapes[0], shapes[1]):
        raise RunError(f"the weights of {base.path} do not fit: {said}; {_WHOLE}")
    model.load_state_dict(there)
    own = (*parts_of(split.image_set), *parts_of(split.caption_set))
    if [one.fingerprint for one in own] != [*base.info.prints("image"), *base.info.prints("text")]:
        names = ", ".join((*base.info.names("image"), *base.info.names("text")))
        print(f"--init-from: {base.path} has learnt from other features ({names}).", file=sys.stderr)
