"""Fine-tuning: the backbones of a trained head are put back, and all is trained end to end.

The run that comes of it has, beside what every run has, the weights of its best epoch's backbones:

    image_backbone.safetensors   where images were put back, a file for ``xret extract --visual-weights``; or
    image_backbone/              a folder for ``--visual hf:``
    text_backbone/               where captions were, a folder for ``--text-weights`` or ``--text hf:``; or
    text_backbone.safetensors    a file for ``--text-weights``
    run.json                     also `finetuned` {epoch, reattach, image_set, text_set, fingerprints} of the head, its
                                 folder as `head`, and `backbones`: what ``xret extract --from-run`` needs to know

`image_set`, `text_set` and `fingerprints` of run.json name the sets that such an extraction makes, so that an
evaluation finds no others. `metrics.jsonl` goes on after the head's lines.
"""

import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

from ....pipeline.data.sources import PictureReader
from ....pipeline.device import pick_device, within_memory
from ....pipeline.encoders import TrainableEncoder
from ....pipeline.encoders.spec import short_name
from ....pipeline.errors import OutOfMemory, RecipeError, RunError
from ....pipeline.reading.batches import Batches
from ....pipeline.reading.end_to_end import end_to_end_batches
from ....pipeline.reading.reattachment import find_pictures, put_back_captions, put_back_images
from ....pipeline.reading.split import Split
from ....pipeline.store import CaptionSet, FeatureCache, ImageSet
from ....pipeline.store.create import fingerprint
from ...model import Model, build_losses
from ...recipes.blocks import Recipe
from ...recipes.recipe import changed
from ...runs.features import batches_of, caption_set_of_run, image_set_of_run, open_store, views_to_draw
from ...runs.files import Writer
from ...runs.info import BranchName, RunInfo, absolute, versions
from ...runs.run import Run, require_free
from ..display import EACH_EPOCH, Shown
from ..event_log import require_log
from ..large_batches import require_whole_batches
from ..loop import Loop, TrainSummary
from ..optimisation import build_optimizer, decay_of, weights_of
from ..preparation import open_run, placement_of, require_splits
from ..state import TrainingState
from .reattached import EndToEndModel, EndToEndObjective

_BRANCHES: tuple[BranchName, ...] = ("image", "text")
_FACTOR = 0.1  # of the learning rate, for a backbone whose recipe names none (VSE-infinity, appendix A.1)
_FIXED = ("model", "adapter", "aggregator", "similarity")  # what the head's weights were trained for, …
_SETS = ("image", "text", "image_kind", "text_kind")
_NOISE = ("dropout", "channel_dropout", "hidden_dropout", "output_dropout", "state_dropout", "noise")  # … but for these
# What the weights of a loss are made from, and begin with.
_LEARNT_FROM = ("scale", "shift", "bias", "learned", "logarithm", "hidden", "word_dim")


def finetune(
    run: str | Path,
    out: str | Path,
    *,
    settings: Sequence[str] = (),
    reattach: Sequence[str] = (),
    data_root: Path | None = None,
    visual_weights: str | None = None,
    text_weights: str | None = None,
    store: str | None = None,
    device: str = "auto",
    resume: bool = False,
    shown: Shown = EACH_EPOCH,
) -> TrainSummary:
    """Put the backbones of a trained head back and train all of it from images and token ids, leaving a run at `out`.

    It begins with the head's best weights, its optimiser state and losses, and the epoch after its last.

    Args:
        run: the head's run folder.
        out: the new run folder.
        settings: changes of the run's recipe, such as ``schedule.epochs=40`` or ``finetune.image_lr=0.1``.
        reattach: which of ``image`` and ``text``; none: those that the recipe's `finetune` block trains.
        data_root: where the images are, see `reattachment.image_folder`.
        visual_weights, text_weights: of the backbones, see `reattachment`.
        store: the feature cache; None: the run's own, of several the first.
        device, resume, shown: as of `training.train`.

    Raises:
        RecipeError: the settings do not fit, or change what the head was trained for.
        CacheError, EncoderError, SampleError: a backbone cannot be put back, or its images are missing or others.
        RunError: a run does not fit, memory does not suffice, or the loss is not finite.
    """
    if not resume:
        require_free(out)
    base, target, weights = Run(run), pick_device(device), {"image": visual_weights, "text": text_weights}
    recipe, put_back = _recipe(base, settings, reattach, weights)
    cache = open_store(base, store)
    require_splits(cache)
    before = _state_of(base, recipe, cache)
    cached = Split.of(image_set_of_run(base, cache), caption_set_of_run(base, cache), "train")
    pictures = find_pictures(cache, data_root) if "image" in put_back else None
    with _enough_memory(target):
        encoders = _put_back(base, recipe, put_back, cached, pictures, weights, target)
        model = EndToEndModel(base.model(target, recipe), encoders, recipe)
        state = _state_after(base, before, recipe, model, target)
    sets, placement = (cached.image_set, cached.caption_set), placement_of(out, recipe, resume)
    learnt = batches_of(sets, model, "train", target, placement, views=views_to_draw(cached.image_set, recipe))
    how = recipe.finetune.crop_and_flip, recipe.finetune.mask_words
    both = learnt, batches_of(sets, model, "val", target)
    train_split, val_split = (end_to_end_batches(split, encoders, pictures, *how) for split in both)
    info = _facts_of(base, train_split, encoders, state.epoch)
    new, created = open_run(TunedRun, out, info, recipe, train_split, resume=resume)
    with new.held(created), _enough_memory(target):
        if not state.resume(new):
            new.save_metrics(base.metrics()[: state.epoch])
        objective = EndToEndObjective.of(recipe, model, state.losses, train_split)
        return Loop(new, objective, state, train_split, val_split, shown=shown).go_on()


class TunedRun(Run):
    """A run whose best weights are those of a head and of its backbones."""

    def best_files(self, model: Model) -> tuple[dict[str, Writer], dict[str, Any]]:
        """Return what writes the weights of the best epoch, and the names of the sets that the backbones will make."""
        assert isinstance(model, EndToEndModel) and self.info.backbones, "what is fine-tuned has backbones"
        writers, _ = super().best_files(model.head)
        prints, names = dict(self.info.fingerprints), {}
        for key, backbone in model.backbones.items():
            encoder = backbone.encoder
            writers[f"{key}_backbone{encoder.suffix}"] = encoder.save
            identity = {**encoder.identity, "weights": encoder.weights_id()}
            prints[key] = made = fingerprint(identity, encoder.spec.dtype)
            # As an extraction calls it: by its network, or by the folder.
            name = encoder.name if encoder.suffix else short_name(str(self.path.resolve() / f"{key}_backbone"))
            names[f"{key}_set"] = f"{name}@{made[:8]}"
        return writers, {"fingerprints": prints, **names}


def _state_of(base: Run, recipe: Recipe, cache: FeatureCache) -> dict[str, Any]:
    """Return the state that a head was left in, which its fine-tuning goes on from.

    Raises:
        RunError: it has none, or has trained to the end of the recipe's schedule.
    """
    state = base.load_state()
    if state is None:
        raise RunError(f"{base.path} has no state.pt to go on from; train the head with another --out")
    if base.info.also:
        print(f"{base.path} was trained on several stores; {cache.url} alone is trained on from here.", file=sys.stderr)
    if state["epoch"] >= recipe.schedule.epochs:
        raise RunError(
            f"{base.path} has trained to the end of its schedule, epoch {state['epoch']}; say how many there shall be"
            f" in all, for example --set schedule.epochs={state['epoch'] + 10}"
        )
    return state


def _state_after(
    base: Run, before: dict[str, Any], recipe: Recipe, model: EndToEndModel, target: torch.device
) -> TrainingState:
    """Return a training of a head with its backbones, which goes on from the state that the head was left in.

    A moving average begins anew.
    """
    if recipe.data.chunk is not None:
        require_whole_batches(model.head, "data.chunk")
    losses = build_losses(recipe, base.text_facts).to(target)
    losses.load_state_dict(before["losses"])
    state = TrainingState.new(model, losses, _optimizer(base, before, recipe, model, losses), recipe, target)
    state.epoch, state.step, state.best_epoch = before["epoch"], before["step"], before["epoch"]
    return state


def _facts_of(base: Run, split: Batches, encoders: dict[str, TrainableEncoder], epoch: int) -> RunInfo:
    """Return what is known of a fine-tuning on `split` before its first epoch, of a head after `epoch` epochs."""
    cache, before = split.image_set.cache, base.info
    sets: dict[str, Any] = {
        "image_set": before.image_set,
        "text_set": before.text_set,
        "fingerprints": before.fingerprints,
    }
    return RunInfo(
        store=absolute(cache.url),
        manifest_sha256=cache.manifest_sha256,
        seed=before.seed,
        finetuned={"epoch": epoch, "reattach": [name for name in _BRANCHES if name in encoders], **sets},
        head=absolute(str(base.path)),
        backbones={name: encoder.spec.to_json() for name, encoder in encoders.items()},
        device=str(split.device),
        versions=versions(),
        shuffled=split.shuffled,
        **sets,
    )


def _optimizer(
    base: Run, state: dict[str, Any], recipe: Recipe, model: EndToEndModel, losses: nn.ModuleDict
) -> torch.optim.Optimizer:
    """Return the head's optimiser with the state that its training left, and groups for the backbones.

    Another optimiser than the head's begins without a state.
    """
    before = build_optimizer(model, losses, base.recipe.optimizer)
    saved = state["optimizer"]
    groups = saved["param_groups"][: len(before.param_groups)]  # after them come a fine-tuned run's backbones
    ours = {number for group in groups for number in group["params"]}
    before.load_state_dict(
        {"param_groups": groups, "state": {number: s for number, s in saved["state"].items() if number in ours}}
    )
    optimizer = build_optimizer(model, losses, recipe.optimizer)
    if type(optimizer) is type(before):
        optimizer.state.update({p: before.state[p] for p in weights_of(model, losses) if p in before.state})
    for name, backbone in model.backbones.items():
        factor, frozen = (getattr(recipe.finetune, f"{name}_{what}") for what in ("lr", "frozen"))
        matrices = [p for p in backbone.parameters() if p.ndim > 1]
        others = [p for p in backbone.parameters() if p.ndim <= 1]
        for parameters in (matrices, others):
            decay = decay_of(parameters[0], recipe.optimizer) if parameters else 0.0
            optimizer.add_param_group({"params": parameters, "factor": factor, "frozen": frozen, "weight_decay": decay})
    return optimizer


def _recipe(
    base: Run, settings: Sequence[str], reattach: Sequence[str], weights: Mapping[str, str | None]
) -> tuple[Recipe, tuple[BranchName, ...]]:
    """Return the run's recipe, changed, and which backbones are put back.

    Raises:
        RecipeError: the settings do not fit, change what the head was trained for, or nothing would be put back; or
            weights are given for what is not.
    """
    asked = changed(base.recipe, settings)
    recipe = replace(asked, augment=replace(asked.augment, mix=0.0))
    then, now = base.recipe.to_dict(), asked.to_dict()
    others = [key for key in _FIXED if _without_noise(then[key]) != _without_noise(now[key])]
    others += [f"data.{key}" for key in _SETS if then["data"][key] != now["data"][key]]
    masks = (bool(values["augment"]["mask_words"]) for values in (then, now))  # then the words have one more
    others += ["whether augment.mask_words is above 0"] if next(masks) != next(masks) else []
    others += ["the terms of loss"] if then["loss"].keys() != now["loss"].keys() else []
    others += _losses_begun_otherwise(base, asked)
    if others:
        raise RecipeError(
            f"the head of {base.path} is trained, so that {' and '.join(others)} cannot change; train another head"
        )
    if set(reattach) - set(_BRANCHES):
        raise RecipeError(f"--reattach takes image, text or image,text, not '{','.join(reattach)}'")
    learns = {name: now["finetune"][f"{name}_lr"] > 0 for name in _BRANCHES}
    put_back = tuple(name for name in _BRANCHES if name in reattach or (not reattach and learns[name]))
    if not put_back:
        raise RecipeError(
            f"the recipe of {base.path} says of no backbone that it learns; say which to put back with --reattach"
            " image, text or image,text"
        )
    for name in put_back:
        if len(sets := base.info.names(name)) > 1:
            raise RecipeError(
                f"{base.path} reads several {name} feature sets ({', '.join(sets)}), and xret puts back the backbone of"
                " a single one; fine-tune a head that is trained on one of them"
            )
    for side, given in weights.items():
        if given is not None and side not in put_back:
            raise RecipeError(f"the {side} backbone is not put back, so that its weights {given} have no effect")
    require_log(recipe.runtime.log)
    if asked.augment.mix:
        print("augment.mix: a fine-tuning blends nothing, since its features are not cached.", file=sys.stderr)
    missing: dict[str, Any] = {f"{name}_lr": _FACTOR for name in put_back if not learns[name]}
    if missing:
        names = " and ".join(f"finetune.{key}" for key in missing)
        print(f"{names}: the recipe has none; {_FACTOR} times the head's learning rate is taken.", file=sys.stderr)
    return replace(recipe, finetune=replace(recipe.finetune, **missing)), put_back


def _losses_begun_otherwise(base: Run, recipe: Recipe) -> list[str]:
    """Return the keys whose values made the weights that a head's losses have learned, where they are changed."""
    with torch.device("meta"):
        built = [build_losses(one, base.text_facts) for one in (base.recipe, recipe)]
    learn = {term for losses in built for term, loss in losses.items() if any(True for _ in loss.parameters())}
    then, now = base.recipe.terms, recipe.terms
    both = sorted(learn & then.keys() & now.keys())
    return [f"loss.{term}.{key}" for term in both for key in _LEARNT_FROM if then[term].get(key) != now[term].get(key)]


def _without_noise(values: Any) -> Any:
    """Return nested values without those that change a head only while it is trained."""
    if not isinstance(values, Mapping):
        return values
    return {key: _without_noise(value) for key, value in values.items() if key not in _NOISE}


def _put_back(
    base: Run,
    recipe: Recipe,
    put_back: Sequence[str],
    cached: Split,
    pictures: PictureReader | None,
    weights: dict[str, str | None],
    target: torch.device,
) -> dict[str, TrainableEncoder]:
    """Return the encoders that made the sets of `cached`; a head that was fine-tuned before has weights of its own."""
    own = {name: str(path) for name in _BRANCHES if (path := base.backbone(name)) is not None}
    visual, text = (weights[name] or own.get(name) for name in _BRANCHES)
    encoders: dict[str, TrainableEncoder] = {}
    if "text" in put_back:
        assert isinstance(cached.caption_set, CaptionSet), "of several none is put back"
        encoders["text"] = put_back_captions(cached.caption_set, text, str(target))
    if pictures is not None:
        assert isinstance(cached.image_set, ImageSet), "of several none is put back"
        size = recipe.finetune.image_size
        encoders["image"] = put_back_images(cached.image_set, cached.image_rows, pictures, visual, str(target), size)
    return encoders


@contextmanager
def _enough_memory(target: torch.device) -> Iterator[None]:
    try:
        with within_memory(target):
            yield
    except OutOfMemory as error:
        raise OutOfMemory(
            f"the head with its backbones does not fit in the memory of {target}; set finetune.checkpointing=true, or"
            " a smaller data.batch_size or finetune.image_size"
        ) from error
