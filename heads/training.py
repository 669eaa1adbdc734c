"""Training a head from cached features, from top to bottom."""

import math
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from ..pipeline.batches import Batches
from ..pipeline.cache import FeatureCache
from ..pipeline.device import deterministic, pick_device, within_memory
from ..pipeline.errors import CacheError, RecipeError, RunError
from ..pipeline.progress import Progress
from ..pipeline.word_vectors import read_word_vectors
from .augmentation import drop_rows
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
    losses = build_losses(recipe, text_facts).to(target)
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

    weights = torch.tensor([recipe.terms[term]["weight"] for term in losses], device=target)
    text_number = same_texts(cache, train_split) if recipe.loss["exclude_same_text"] else None
    steps_an_epoch = train_split.steps(unit, batch_size)
    items = train_split.images if unit == "image" else train_split.captions
    started = time.perf_counter()
    path = getattr(model.text.adapter, "vectors", None)
    with (
        run.removed_unless_begun(created),
        within_memory(target),
        deterministic(target),
        Progress("train", epochs * items, f"{unit}s", done=first * items) as progress,
    ):
        if path is not None and state is None:
            load_vectors(model, path, caption_set.vocabulary or ())
        for epoch in range(first, epochs):
            began = time.perf_counter()
            lr = learning_rate(recipe.schedule, recipe.optimizer.lr, epoch)
            torch.manual_seed(int(np.random.SeedSequence([seed, epoch]).generate_state(1)[0]))
            model.train()
            sums, steps, seen = torch.zeros(1 + len(losses), dtype=torch.float64), 0, 0
            for batch in train_split.epoch(
                unit=unit, batch_size=batch_size, seed=seed, epoch=epoch, captions=recipe.data.captions
            ):
                now = epoch + steps / steps_an_epoch
                for group in optimizer.param_groups:
                    group["lr"] = (
                        0.0 if epoch < group["frozen"] else lr * group["factor"] * warmup(recipe.schedule, now)
                    )
                for term in losses.values():
                    term.epoch = now  # type: ignore[assignment]
                optimizer.zero_grad()
                with torch.autocast(target.type, precision, enabled=precision is not None):
                    images = model.embed_images(drop_rows(batch.images, recipe.augment.image))
                    captions = model.embed_captions(drop_rows(batch.captions, recipe.augment.text))
                # Similarity and losses stay in float32: differences of a margin's size drown in 8 bits.
                similarity = model.similarity(images.embedding, captions.embedding)
                positives = batch.positives
                if text_number is not None:
                    text = text_number[batch.caption_index].to(target)
                    similarity = similarity.masked_fill(same_text(positives, text), -torch.inf)
                terms = [term(similarity, positives, images, captions) for term in losses.values()]
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
    """Return AdamW over all weights, in groups: matrices decay, biases and normalisations do not.

    A group's `factor` multiplies the learning rate of its component, for example that of both aggregators (SetDiv
    appendix A); `frozen` is the number of first epochs in which it does not learn.
    """
    branches = (model.image, model.text)
    components: dict[str, list[nn.Module]] = {
        "adapter": [branch.adapter for branch in branches],
        "aggregator": [branch.aggregator for branch in branches],
        "similarity": [model.compare],
        "loss": [losses],
    }
    groups: dict[tuple[float, int, float], list[nn.Parameter]] = {}
    for component, modules in components.items():
        factor, frozen = getattr(values, f"{component}_lr"), getattr(values, f"{component}_frozen")
        for parameter in (p for module in modules for p in module.parameters() if p.requires_grad):
            decay = values.weight_decay if parameter.ndim > 1 else 0.0
            groups.setdefault((factor, frozen, decay), []).append(parameter)
    return torch.optim.AdamW(
        [
            {"params": parameters, "factor": factor, "frozen": frozen, "weight_decay": decay}
            for (factor, frozen, decay), parameters in groups.items()
        ],
        lr=values.lr,
    )


def weights_of(model: Model, losses: nn.ModuleDict) -> list[nn.Parameter]:
    """Return all trained weights."""
    return [*model.parameters(), *losses.parameters()]


def learning_rate(schedule: Schedule, lr: float, epoch: int) -> float:
    """Return the learning rate of an epoch, counted from 0, before any warm-up.

    ``cosine`` falls from `lr` towards 0 over all epochs; ``step`` multiplies it by `gamma` every `step` epochs.
    """
    if schedule.name == "cosine":
        return lr * (1 + math.cos(math.pi * epoch / schedule.epochs)) / 2
    return lr * schedule.gamma ** (epoch // schedule.step)


def warmup(schedule: Schedule, now: float) -> float:
    """Return by what the learning rate is multiplied after `now` epochs, of which the last may be a part.

    It rises from 0 to 1 over the warm-up's epochs (VSE-infinity, appendix A.1); before and behind them it is 1.
    """
    done = now - schedule.warmup_after
    if schedule.warmup_epochs == 0 or not 0 <= done < schedule.warmup_epochs:
        return 1.0
    return done / schedule.warmup_epochs


def load_vectors(model: Model, path: str, vocabulary: tuple[str, ...]) -> None:
    """Begin the text branch's word embeddings with the vectors of a GloVe or fastText file; say how many lack one.

    Raises:
        VectorsError: the file cannot be read.
        RecipeError: its vectors are of another width than `adapter.words.word_dim`.
    """
    read = read_word_vectors(path, vocabulary)
    adapter: Any = model.text.adapter
    try:
        adapter.load_vectors(torch.from_numpy(read.vectors), torch.from_numpy(read.found))
    except ValueError as error:
        raise RecipeError(f"adapter.words: {error}") from error
    passed = f"; {read.undecodable} undecodable lines were passed over" if read.undecodable else ""
    print(f"{len(read.missing)} of {len(read.found)} words have no vector in {path}{passed}.", file=sys.stderr)


def same_texts(cache: FeatureCache, batches: Batches) -> Tensor:
    """Return a number for each of a split's captions, equal where their texts are, int64 on the CPU."""
    numbers: dict[str, int] = {}
    return torch.tensor([numbers.setdefault(text, len(numbers)) for text in caption_texts(cache, batches)])


def same_text(positives: Tensor, text: Tensor) -> Tensor:
    """Return where a caption that is not the image's own has the text of one that is.

    Args:
        positives: bool ``[I, C]``.
        text: the number of each caption's text, ``[C]``.

    Returns:
        bool ``[I, C]``.
    """
    equal = (text[:, None] == text[None, :]).to(torch.float32)
    return (positives.to(torch.float32) @ equal > 0) & ~positives


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
