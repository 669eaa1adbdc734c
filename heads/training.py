"""Training a head from cached features, from top to bottom."""

import math
import time
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn

from ..pipeline.batches import Batches
from ..pipeline.cache import FeatureCache
from ..pipeline.device import deterministic, pick_device, within_memory
from ..pipeline.errors import CacheError, RunError
from ..pipeline.progress import Progress
from .evaluation import caption_texts, compare, embed, recalls
from .model import Model, build_losses, build_model, feature_facts
from .recipe import Optimizer, Recipe, Schedule
from .run import Run, absolute, versions


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
) -> TrainSummary:
    """Train the head that `recipe` describes on the features in `store`, and leave a run at `out`.

    The same seed gives the same numbers on the same device, also where the training was stopped and resumed: every
    epoch draws from a generator that is seeded by `seed` and its number alone.

    Args:
        store: the feature cache; its splits `train` and `val` are used.
        recipe: resolved; see `recipe.load_recipe`.
        out: the run folder; must not exist, unless `resume`.
        device: ``auto``, ``cpu`` or ``cuda``.
        seed: decides the first weights and the order of samples; 0 or more.
        resume: go on behind the last complete epoch of `out`. Starts it where there is nothing yet. The store may
            have been moved.

    Raises:
        RecipeError: the recipe does not fit the feature sets.
        CacheError: the store, its feature sets or its splits cannot be used.
        RunError: `out` exists or does not fit, memory does not suffice, or the loss is not finite. A folder that
            this call made is removed if its first epoch fails.
    """
    target = pick_device(device)
    cache = FeatureCache.open(store)
    require_splits(cache)
    image_set, caption_set = cache.image_set(recipe.data.image), cache.caption_set(recipe.data.text)
    image_facts, text_facts = feature_facts(image_set), feature_facts(caption_set)

    # The weights are drawn on the CPU, so that a seed means the same beginning on every device.
    torch.manual_seed(seed)
    with within_memory(target):
        model = build_model(recipe, image_facts, text_facts).to(target)
    losses = build_losses(recipe).to(target)
    optimizer = build_optimizer(model, losses, recipe.optimizer)
    precision = autocast_dtype(recipe.runtime.precision, target)
    # float16 loses small gradients without scaling; bfloat16 has float32's range.
    scaler = torch.amp.GradScaler(target.type, enabled=precision is torch.float16)

    train_split, val_split = (
        Batches(
            cache,
            image_set,
            caption_set,
            split,
            device=str(target),
            image_fields=model.image_fields,
            caption_fields=model.caption_fields,
        )
        for split in ("train", "val")
    )
    unit, batch_size, epochs = recipe.data.unit, recipe.data.batch_size, recipe.schedule.epochs
    val_texts, val_image = caption_texts(cache, val_split), torch.as_tensor(val_split.caption_image)
    if train_split.steps(unit, batch_size) == 0:
        raise RunError(f"split 'train' of {cache.url} has a single {unit}, and a batch needs two: add samples")

    facts = {
        "manifest_sha256": cache.manifest_sha256,
        "image_set": image_set.name,
        "text_set": caption_set.name,
        "fingerprints": {"image": image_set.fingerprint, "text": caption_set.fingerprint},
        "seed": seed,
    }
    created = not (resume and Path(out).exists())
    if not created:
        run = Run(out)
        run.refuse_difference(facts, recipe)
        run.record_store(absolute(cache.url))
    else:
        info = {"store": absolute(cache.url), **facts, "device": str(target), "versions": versions()}
        info |= {"best_epoch": None, "best_rsum": None}
        run = Run.create(out, info, recipe, image_facts, text_facts, caption_set.vocabulary)

    first, step, best_epoch, best_rsum = 0, 0, 0, -math.inf
    state = run.load_state(target) if resume else None
    if state is not None:
        model.load_state_dict(state["model"])
        losses.load_state_dict(state["losses"])
        optimizer.load_state_dict(state["optimizer"])
        scaler.load_state_dict(state["scaler"])
        first, step, best_epoch, best_rsum = (state[k] for k in ("epoch", "step", "best_epoch", "best_rsum"))

    weights = torch.tensor([recipe.loss[term]["weight"] for term in losses], device=target)
    items = train_split.images if unit == "image" else train_split.captions
    started = time.perf_counter()
    with (
        run.removed_unless_begun(created),
        within_memory(target),
        deterministic(target),
        Progress("train", epochs * items, f"{unit}s", done=first * items) as progress,
    ):
        for epoch in range(first, epochs):
            began = time.perf_counter()
            lr = learning_rate(recipe.schedule, recipe.optimizer.lr, epoch)
            for group in optimizer.param_groups:
                group["lr"] = lr * group["factor"]
            for term in losses.values():
                term.epoch = epoch  # type: ignore[assignment]
            torch.manual_seed(int(np.random.SeedSequence([seed, epoch]).generate_state(1)[0]))
            model.train()
            sums, steps, seen = torch.zeros(1 + len(losses), dtype=torch.float64), 0, 0
            for batch in train_split.epoch(unit=unit, batch_size=batch_size, seed=seed, epoch=epoch):
                optimizer.zero_grad()
                with torch.autocast(target.type, precision, enabled=precision is not None):
                    images = model.embed_images(batch.images)
                    captions = model.embed_captions(batch.captions)
                # Similarity and losses stay in float32: differences of a margin's size drown in 8 bits.
                similarity = model.similarity(images.embedding, captions.embedding)
                terms = [term(similarity, batch.positives, images, captions) for term in losses.values()]
                parts = torch.stack(terms)
                loss = parts @ weights
                values = torch.stack([loss, *parts]).detach().cpu()
                if not values[0].isfinite():
                    where = f"epoch {epoch + 1}, step {steps + 1}"
                    what = f"the loss is not finite in {where}: {describe(values, list(losses))}"
                    raise RunError(not_finite(what, epoch, lr, precision))
                scaler.scale(loss).backward()
                if recipe.optimizer.clip is not None:
                    scaler.unscale_(optimizer)
                    nn.utils.clip_grad_norm_(weights_of(model, losses), recipe.optimizer.clip)
                scaler.step(optimizer)
                scaler.update()
                sums, steps, step = sums + values, steps + 1, step + 1
                count = len(batch.images.length if unit == "image" else batch.captions.length)
                seen += count
                progress.update(count, f"epoch {epoch + 1}/{epochs}, {describe(values, list(losses))}")
            try:
                rsum = validate(model, val_split, val_texts, val_image)
            except RunError as error:
                what = f"the similarities are not finite in the validation of epoch {epoch + 1}"
                raise RunError(not_finite(what, epoch, lr, precision)) from error
            loss_mean, *part_means = (sums / steps).tolist()  # the mean over the epoch's batches
            if rsum > best_rsum:
                best_epoch, best_rsum = epoch + 1, rsum
                run.save_best(model)
            line = {
                "epoch": epoch + 1,
                "step": step,
                "loss": loss_mean,
                "parts": dict(zip(losses, part_means, strict=True)),
                "lr": lr,
                "rsum": rsum,
                "seconds": round(time.perf_counter() - began, 3),
            }
            state = {
                "epoch": epoch + 1,
                "step": step,
                "best_epoch": best_epoch,
                "best_rsum": best_rsum,
                "model": model.state_dict(),
                "losses": losses.state_dict(),
                "optimizer": optimizer.state_dict(),
                "scaler": scaler.state_dict(),
            }
            run.save_epoch(state, line, best_epoch, best_rsum)
            note = f"epoch {epoch + 1}/{epochs}, {describe(sums / steps, list(losses))}, validation RSUM {rsum:.1f}"
            progress.update(items - seen, note)  # a last batch of one was left out

    seconds = time.perf_counter() - started
    return TrainSummary(str(run.path), epochs, epochs - first, best_epoch, best_rsum, seconds)


def build_optimizer(model: Model, losses: nn.ModuleDict, values: Optimizer) -> torch.optim.AdamW:
    """Return AdamW over all weights, in groups: matrices decay, biases and normalisations do not; the weights of the
    two aggregators learn at `aggregator_lr` times the rate (SetDiv appendix A). `factor` holds a group's multiplier.
    """
    inside = {id(p) for branch in (model.image, model.text) for p in branch.aggregator.parameters()}
    groups: dict[tuple[float, float], list[nn.Parameter]] = {}
    for parameter in weights_of(model, losses):
        factor = values.aggregator_lr if id(parameter) in inside else 1.0
        decay = values.weight_decay if parameter.ndim > 1 else 0.0
        groups.setdefault((factor, decay), []).append(parameter)
    return torch.optim.AdamW(
        [{"params": p, "factor": factor, "weight_decay": decay} for (factor, decay), p in groups.items()], lr=values.lr
    )


def weights_of(model: Model, losses: nn.ModuleDict) -> list[nn.Parameter]:
    """Return all trained weights."""
    return [*model.parameters(), *losses.parameters()]


def learning_rate(schedule: Schedule, lr: float, epoch: int) -> float:
    """Return the learning rate of an epoch, counted from 0; it changes between epochs only.

    ``cosine`` falls from `lr` towards 0 over all epochs; ``step`` multiplies it by `gamma` every `step` epochs.
    """
    if schedule.name == "cosine":
        return lr * (1 + math.cos(math.pi * epoch / schedule.epochs)) / 2
    return lr * schedule.gamma ** (epoch // schedule.step)


def autocast_dtype(precision: str, device: torch.device) -> torch.dtype | None:
    """Return the dtype of mixed precision on this device, or None for float32 throughout.

    Raises:
        RunError: float16 was asked for without a GPU.
    """
    if precision == "auto":
        if device.type != "cuda":
            return None
        return torch.bfloat16 if torch.cuda.is_bf16_supported() else torch.float16
    if precision == "float16" and device.type == "cpu":
        raise RunError("runtime.precision float16 needs a GPU; on a CPU take float32, bfloat16 or auto")
    return {"float32": None, "bfloat16": torch.bfloat16, "float16": torch.float16}[precision]


def validate(model: Model, batches: Batches, texts: list[str], caption_image: Tensor) -> float:
    """Return the RSUM of a split: the sum of recall@1, 5 and 10 in both directions, ties pessimistic.

    Raises:
        RunError: a similarity is not finite.
    """
    images, captions = embed(model, batches)
    similarity = compare(model, images, captions, texts)
    return recalls(similarity, caption_image, "full", "pessimistic", "")["rsum"]


def require_splits(cache: FeatureCache) -> None:
    """Raise CacheError if the store lacks a split that training needs."""
    for split, purpose in (("train", "learn from"), ("val", "choose its best epoch")):
        if split not in cache.splits:
            raise CacheError(
                f"{cache.url} has no split '{split}', which training needs to {purpose} (it has "
                f"{', '.join(cache.splits)}); add a split column to the data set, or map one with merge_splits in its "
                "manifest, and extract into another --store"
            )


def describe(values: Tensor, terms: list[str]) -> str:
    """Return the loss and its parts for the progress line."""
    loss, *parts = values.tolist()
    inner = ", ".join(f"{term} {part:.4f}" for term, part in zip(terms, parts, strict=True))
    return f"loss {loss:.4f} ({inner})"


def not_finite(what: str, epoch: int, lr: float, precision: torch.dtype | None) -> str:
    """Return the sentence that ends a training whose numbers are not finite; `what` says which, and where."""
    way = f"--set optimizer.lr={lr / 10:g}"
    if precision is not None:
        way += " or --set runtime.precision=float32"
    kept = "the weights of the best epoch before are kept; " if epoch else ""
    return f"{what}; {kept}begin another run with {way}"
