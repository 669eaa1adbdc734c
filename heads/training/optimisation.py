"""How weights change: the optimiser's groups, learning rates, precision, and a moving average of the weights."""

import math
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

from ...pipeline.errors import RunError
from ..model import Model
from ..recipes.blocks import Optimizer, Recipe, Schedule


def build_optimizer(model: Model, losses: nn.ModuleDict, values: Optimizer) -> torch.optim.Optimizer:
    """Return the recipe's optimiser over all weights, in groups: those of one decay, and of one learning rate.

    A group's `factor` multiplies the learning rate of its component, for example that of both aggregators (SetDiv
    appendix A); `frozen` is the number of first epochs in which it does not learn, as backbones and given word vectors
    may not.
    """
    sides = model.image, model.text
    adapters = (one for side in sides for one in (*side.adapters, *side.twins))
    frozen = {weight: epochs for one in adapters for weight, epochs in one.frozen().items()}
    groups: dict[tuple[float, float, int], list[nn.Parameter]] = {}
    for component, module in components_of(model, losses).items():
        factor = getattr(values, f"{component}_lr")
        for one in (one for one in module.parameters() if one.requires_grad):
            decay = decay_of(one, values, of_loss=component == "loss")
            groups.setdefault((factor, decay, frozen.get(one, 0)), []).append(one)
    told = [
        {"params": parameters, "factor": factor, "frozen": epochs, "weight_decay": decay}
        for (factor, decay, epochs), parameters in groups.items()
    ]
    if values.name == "sgd":
        return torch.optim.SGD(told, lr=values.lr, momentum=values.momentum, fused=True)
    kind = torch.optim.AdamW if values.name == "adamw" else torch.optim.Adam
    return kind(told, lr=values.lr, betas=(values.beta1, values.beta2), fused=True)


def components_of(model: Model, losses: nn.ModuleDict) -> dict[str, nn.Module]:
    """Return what a learning rate can be given to: the modules of each component."""

    def of(*modules: nn.Module | None) -> nn.Module:
        return nn.ModuleList([module for module in modules if module is not None])

    image, text = model.image, model.text
    return {
        "image_adapter": of(image.adapter, image.twin),
        "text_adapter": of(text.adapter, text.twin),
        "aggregator": of(image.aggregator, image.residual, text.aggregator, text.residual),
        "loss": of(model.compare, losses),
    }


def decay_of(parameter: nn.Parameter, values: Optimizer, of_loss: bool = False) -> float:
    """Return the weight decay of a parameter, of a side or `of_loss`, which the similarity counts as."""
    decays = {"matrices": parameter.ndim > 1, "sides": not of_loss, "all": True}[values.decay]
    return values.weight_decay if decays else 0.0


def weights_of(model: nn.Module, losses: nn.ModuleDict) -> list[nn.Parameter]:
    """Return all trained weights."""
    return [*model.parameters(), *losses.parameters()]


def set_rates(optimizer: torch.optim.Optimizer, schedule: Schedule, lr: float, now: float) -> None:
    """Give every group its learning rate after `now` epochs, where the schedule's own is `lr`."""
    for group, frozen in zip(optimizer.param_groups, frozen_groups(optimizer, now), strict=True):
        group["lr"] = 0.0 if frozen else lr * group["factor"] * warmup(schedule, now)


def frozen_groups(optimizer: torch.optim.Optimizer, now: float) -> tuple[bool, ...]:
    """Return of each group of weights whether it does not learn yet after `now` epochs."""
    return tuple(int(now) < group["frozen"] for group in optimizer.param_groups)


def drop_frozen(optimizer: torch.optim.Optimizer, now: float) -> None:
    """Forget the gradients of what does not learn after `now` epochs: they count neither when clipped nor later."""
    for group, frozen in zip(optimizer.param_groups, frozen_groups(optimizer, now), strict=True):
        if frozen or group["factor"] == 0:
            for parameter in group["params"]:
                parameter.grad = None


def learning_rate(schedule: Schedule, lr: float, now: float) -> float:
    """Return the learning rate after `now` epochs, of which the last may be a part, before any warm-up.

    ``cosine`` and ``linear`` fall from `lr` towards 0 over all epochs, from one to the next or, `by` step, from step to
    step; ``step`` multiplies it by `gamma` every `step` epochs; ``constant`` stays.
    """
    epoch = int(now)
    done = (now if schedule.by == "step" else epoch) / schedule.epochs
    if schedule.name == "cosine":
        return lr * (1 + math.cos(math.pi * done)) / 2
    if schedule.name == "linear":
        return lr * (1 - done)
    if schedule.name == "constant":
        return lr
    return lr * schedule.gamma ** (epoch // schedule.step)


def warmup(schedule: Schedule, now: float) -> float:
    """Return by what the learning rate is multiplied after `now` epochs, of which the last may be a part.

    It rises from 0 to 1 over the warm-up's epochs (VSE-infinity, appendix A.1); before and after them it is 1.
    """
    done = now - schedule.warmup_after
    return done / schedule.warmup_epochs if 0 <= done < schedule.warmup_epochs else 1.0


def tied_to_length(recipe: Recipe) -> str | None:
    """Return what of a training depends on its number of epochs from early on; None: it can be lengthened."""
    schedule = recipe.schedule
    if schedule.name in ("cosine", "linear"):
        return f"the learning rate of schedule.name={schedule.name} falls to 0 over all epochs"
    return "optimizer.swa_epochs averages over the last epochs" if recipe.optimizer.swa_epochs else None


def autocast_dtype(precision: str, device: torch.device) -> torch.dtype | None:
    """Return the dtype of mixed precision, None for float32 throughout; RunError where it needs a GPU."""
    if precision == "auto":
        if device.type != "cuda":
            return None
        return torch.bfloat16 if torch.cuda.is_bf16_supported(including_emulation=False) else torch.float16
    if precision in ("float16", "tf32") and device.type == "cpu":
        raise RunError(f"runtime.precision {precision} needs a GPU; on a CPU take float32, bfloat16 or auto")
    return {"bfloat16": torch.bfloat16, "float16": torch.float16}.get(precision)


@contextmanager
def float32_as(precision: str) -> Iterator[None]:
    """Let a GPU multiply float32 numbers as they are (``float32``) or rounded to TF32 (``tf32``), in GRUs as well.

    Any other precision leaves torch's setting: TF32 in GRUs alone.
    """
    if precision not in ("float32", "tf32"):
        yield
        return
    flags: Any = torch.backends.cuda.matmul, torch.backends.cudnn
    before = [one.allow_tf32 for one in flags]
    try:
        for one in flags:
            one.allow_tf32 = precision == "tf32"
        yield
    finally:
        for one, was in zip(flags, before, strict=True):
            one.allow_tf32 = was


def average_of(model: nn.Module, values: Optimizer) -> AveragedModel | None:
    """Return the average of a model's weights that a recipe evaluates, or None where it evaluates the weights.

    `ema` is a moving average: after each step ``average = ema * average + (1 - ema) * weights``, from the weights after
    the first step on. `swa_epochs` is the plain mean over the ends of the last epochs (Izmailov et al., *Averaging
    Weights Leads to Wider Optima*). Buffers, such as the statistics of a batch normalisation, are those of the model.
    """
    if values.ema is None and values.swa_epochs == 0:
        return None
    average = AveragedModel(model, multi_avg_fn=None if values.ema is None else get_ema_multi_avg_fn(values.ema))
    for part in average.modules():
        if isinstance(part, nn.RNNBase):
            part.flatten_parameters()  # copied one by one, a GPU would copy them together again at each use
    return average
