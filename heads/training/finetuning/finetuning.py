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

import logging
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from ....pipeline.data.sources import PictureReader
from ....pipeline.device import pick_device, within_memory
from ....pipeline.encoders import TrainableEncoder
from ....pipeline.encoders.spec import short_name
from ....pipeline.errors import OutOfMemory, RecipeError, RunError
from ....pipeline.files import remove, writing
from ....pipeline.reading.batches import Batches
from ....pipeline.reading.end_to_end import end_to_end_batches
from ....pipeline.reading.reattachment import find_pictures, put_back_captions, put_back_images
from ....pipeline.reading.split import Split
from ....pipeline.store import CaptionSet, FeatureCache, ImageSet
from ....pipeline.store.create import fingerprint
from ...model import Model, build_losses
from ...recipes.blocks import Recipe
from ...recipes.recipe import changed
from ...recipes.settings import Settings
from ...runs.features import batches_of, caption_set_of_run, image_set_of_run, open_store, views_to_draw
from ...runs.info import BranchName, RunInfo, absolute
from ...runs.run import CHECKPOINT, Run
from ..log import require_log
from ..objective import require_whole_batches
from ..optimisation import build_optimizer, decay_of, weights_of
from ..train import facts_of, opened, placement_of, ready, require_splits
from ..trainer import Trainer, TrainSummary
from .reattached import EndToEndModel, EndToEndObjective

_BRANCHES: tuple[BranchName, ...] = ("image", "text")
_FACTOR = 0.1  # of the learning rate, for a backbone whose recipe names none (VSE-infinity, appendix A.1)
_FIXED = ("model", "adapter", "aggregator", "similarity")  # what the head's weights were trained for, …
_SETS = ("image", "text", "image_kind", "text_kind")
_NOISE = ("dropout", "channel_dropout", "hidden_dropout", "output_dropout", "state_dropout", "noise")  # … but for these
# What the weights of a loss are made from, and begin with.
_LEARNT_FROM = ("scale", "shift", "bias", "learned", "logarithm", "hidden", "word_dim")
_log = logging.getLogger("xret")


def finetune(
    run: str | Path,
    out: str | Path,
    *,
    settings: Settings | Sequence[str] = (),
    reattach: Sequence[str] = (),
    data_root: Path | None = None,
    visual_weights: str | None = None,
    text_weights: str | None = None,
    store: str | None = None,
    device: str = "auto",
    resume: bool = False,
) -> TrainSummary:
    """Put the backbones of a trained head back and train all of it from images and token ids, leaving a run at `out`.

    It begins with the head's best weights, its optimiser state and losses, and the epoch after its last.

    Args:
        run: the head's run folder.
        out: the new run folder.
        settings: changes of the run's recipe, such as ``{"schedule.epochs": 40, "finetune.image_lr": 0.1}``.
        reattach: which of ``image`` and ``text``; none: those that the recipe's `finetune` block trains.
        data_root: where the images are, see `reattachment.image_folder`.
        visual_weights, text_weights: of the backbones, see `reattachment`.
        store: the feature cache; None: the run's own, of several the first.
        device, resume: as of `train.train`.

    Raises:
        RecipeError: the settings do not fit, or change what the head was trained for.
        CacheError, EncoderError, SampleError: a backbone cannot be put back, or its images are missing or others.
        RunError: a run does not fit, memory does not suffice, or the loss is not finite.
    """
    new, base, target = opened(TunedRun, out, resume), Run(run), pick_device(device)
    weights = {"image": visual_weights, "text": text_weights}
    recipe, put_back = _recipe(base, settings, reattach, weights)
    cache = open_store(base, store)
    require_splits(cache)
    before = _state_of(base, recipe, cache)
    sets = image_set_of_run(base, cache), caption_set_of_run(base, cache)
    pictures = find_pictures(cache, data_root) if "image" in put_back else None
    with _enough_memory(target):
        encoders = _put_back(base, recipe, put_back, Split.of(*sets, "train"), pictures, weights, target)
        model = EndToEndModel(base.model(target, recipe), encoders, recipe)
        trainer = _trainer(base, before, recipe, model, target)
    trainer.metrics = base.metrics()[: trainer.epoch]
    views = views_to_draw(sets[0], recipe)
    learnt = batches_of(sets, model, "train", target, placement_of(recipe, new), views=views)
    how = recipe.finetune.crop_and_flip, recipe.finetune.mask_words
    both = learnt, batches_of(sets, model, "val", target)
    train_split, val_split = (end_to_end_batches(split, encoders, pictures, *how) for split in both)
    created = new is None
    new = ready(TunedRun, new, out, _facts_of(base, train_split, encoders, trainer.epoch), recipe, train_split)
    with new.locked(created), _enough_memory(target):
        trainer.resume(new)
        objective = EndToEndObjective.of(recipe, model, trainer.losses, train_split)
        return trainer.train(new, objective, train_split, val_split)


class TunedRun(Run):
    """A run whose best weights are those of a head and of its backbones."""

    def export_weights(self, tensors: dict[str, Tensor], model: Model) -> None:
        """Write the head's weights, and a file or folder for each backbone."""
        assert isinstance(model, EndToEndModel), "what is fine-tuned has backbones"
        super().export_weights({name: value for name, value in tensors.items() if ".backbone." not in name}, model)
        for key, backbone in model.backbones.items():
            place = self.path / f"{key}_backbone{backbone.encoder.suffix}"
            with writing(self.path / f"next_{place.name}", RunError) as partial:
                backbone.encoder.save(partial)
            if place.is_dir():  # a folder is not replaced in one step
                remove(place)
            (self.path / f"next_{place.name}").replace(place)

    def facts_of(self, model: Model) -> dict[str, Any]:
        """Return the names and fingerprints of the feature sets that the backbones will make."""
        assert isinstance(model, EndToEndModel) and self.info.backbones, "what is fine-tuned has backbones"
        facts: dict[str, Any] = {"fingerprints": dict(self.info.fingerprints)}
        for key, backbone in model.backbones.items():
            encoder = backbone.encoder
            identity = {**encoder.identity, "weights": encoder.weights_id()}
            facts["fingerprints"][key] = made = fingerprint(identity, encoder.spec.dtype)
            # As an extraction calls it: by its network, or by the folder.
            name = encoder.name if encoder.suffix else short_name(str(self.path.resolve() / f"{key}_backbone"))
            facts[f"{key}_set"] = f"{name}@{made[:8]}"
        return facts


def _state_of(base: Run, recipe: Recipe, cache: FeatureCache) -> dict[str, Any]:
    """Return the state that a head was left in, which its fine-tuning goes on from.

    Raises:
        RunError: it has none, or has trained to the end of the recipe's schedule.
    """
    checkpoint = base.load_checkpoint()
    if checkpoint is None:
        raise RunError(f"{base.path} has no {CHECKPOINT} to go on from; train the head with another --out")
    state: dict[str, Any] = checkpoint["state"]
    if base.info.also:
        _log.warning(f"{base.path} was trained on several stores; {cache.url} alone is trained on from here.")
    if state["epoch"] >= recipe.schedule.epochs:
        raise RunError(
            f"{base.path} has trained to the end of its schedule, epoch {state['epoch']}; say how many there shall be"
            f" in all, for example --set schedule.epochs={state['epoch'] + 10}"
        )
    return state


def _trainer(base: Run, before: dict[str, Any], recipe: Recipe, model: EndToEndModel, target: torch.device) -> Trainer:
    """Return the trainer of a head with its backbones, which goes on from the state that the head was left in.

    A moving average begins again.
    """
    if recipe.data.chunk is not None:
        require_whole_batches(model.head, "data.chunk")
    losses = build_losses(recipe, base.text_facts).to(target)
    losses.load_state_dict(before["losses"])
    trainer = Trainer(model, losses, _optimizer(base, before, recipe, model, losses), recipe, target)
    trainer.epoch, trainer.step, trainer.best_epoch = before["epoch"], before["step"], before["epoch"]
    return trainer


def _facts_of(base: Run, split: Batches, encoders: dict[str, TrainableEncoder], epoch: int) -> RunInfo:
    """Return what is known of a fine-tuning on `split` before its first epoch, of a head after `epoch` epochs."""
    before = base.info
    sets: dict[str, Any] = {key: getattr(before, key) for key in ("image_set", "text_set", "fingerprints")}
    return replace(
        facts_of(split, split.device, before.seed),
        finetuned={"epoch": epoch, "reattach": [name for name in _BRANCHES if name in encoders], **sets},
        head=absolute(str(base.path)),
        backbones={name: encoder.spec.to_json() for name, encoder in encoders.items()},
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
    base: Run, settings: Settings | Sequence[str], reattach: Sequence[str], weights: Mapping[str, str | None]
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
        _log.warning("augment.mix: a fine-tuning blends nothing, since its features are not cached.")
    missing: dict[str, Any] = {f"{name}_lr": _FACTOR for name in put_back if not learns[name]}
    if missing:
        names = " and ".join(f"finetune.{key}" for key in missing)
        _log.warning(f"{names}: the recipe has none; {_FACTOR} times the head's learning rate is taken.")
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
