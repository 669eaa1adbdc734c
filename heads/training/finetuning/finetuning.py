"""Fine-tuning: the backbones of a trained head are put back, and all is trained end to end.

The run that comes of it has, beside what every run has, the weights of its best epoch's backbones:

    image_backbone.safetensors   where images were put back, a file for ``xret extract --visual-weights``; or
    image_backbone/              a folder for ``--visual hf:``
    text_backbone/               where captions were, a folder for ``--text-weights`` or ``--text hf:``; or
    text_backbone.safetensors    a file for ``--text-weights``

`image` and `text` of its run.json name the sets that ``xret extract --encoder RUN`` makes with them, so that an
evaluation finds no others; `finetuned` has the head's. `metrics.jsonl` goes on after the head's lines.
"""

import logging
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from ....pipeline.device import pick_device, within_memory
from ....pipeline.encoders.base import TrainableEncoder
from ....pipeline.encoders.origin import Origin
from ....pipeline.encoders.spec import short_name
from ....pipeline.errors import RecipeError, RunError
from ....pipeline.files import remove, writing
from ....pipeline.reading.joined_sets import parts_of
from ....pipeline.reading.pictures import find_pictures
from ....pipeline.reading.split import Split
from ...model import Model, build_losses, term_of
from ...recipes.blocks import Recipe
from ...recipes.recipe import changed
from ...recipes.schema import difference, flat
from ...recipes.settings import Settings
from ...runs.features import RetokenizedCaptions, Sets, batches_of, open_store, sets_of_run, views_to_draw
from ...runs.info import BRANCHES, BranchName, RunInfo, absolute, versions
from ...runs.run import CHECKPOINT, Run
from ..beginning import teach, teacher_digest
from ..callbacks import Callback, require_log
from ..objective import require_whole_batches
from ..optimisation import build_optimizer, decay_of, weights_of
from ..train import on_split, opened, placement_of, ready, require_splits
from ..trainer import Trainer, TrainSummary
from .end_to_end import end_to_end_batches
from .reattached import EndToEndModel, EndToEndObjective, put_back_captions, put_back_images

_FACTOR = 0.1  # of the learning rate, for a backbone whose recipe names none (VSE-infinity, appendix A.1)
_FIXED = ("model.", "adapter.", "aggregator.", "similarity.", "data.image", "data.text")  # what weights are made for …
_NOISE = ("dropout", "hidden_dropout", "state_dropout")  # … but for these
# What the weights of a loss are made from, and begin with.
_LEARNT_FROM = ("scale", "learned", "logarithm")
_LACKING = (
    "the head with its backbones",
    "set finetune.checkpointing=true, or a smaller data.batch_size or finetune.image_size",
)
_log = logging.getLogger("xret")


def finetune(
    run: str | Path,
    out: str | Path,
    *,
    settings: Settings | None = None,
    reattach: str | Sequence[str] = (),
    data_root: str | Path | None = None,
    visual_weights: str | None = None,
    text_weights: str | None = None,
    store: str | Path | None = None,
    device: str = "auto",
    resume: bool = False,
    callbacks: Sequence[Callback] = (),
    trust: bool = False,
) -> TrainSummary:
    """Load the backbones of a trained head again, and train both from images and captions (``xret finetune``).

    It begins with the head's best weights, its optimiser state and losses, and the epoch after its last.

    Args:
        run: the head's run folder.
        out: the new run folder; must not exist, unless `resume`.
        settings: changes of the recipe, such as ``{"finetune.image_lr": 0.1}``.
        reattach: which of ``image`` and ``text``, or ``image,text``; none: those that the recipe's `finetune` block
            trains.
        data_root: the folder of the images, or the one that the manifest's relative paths start from.
        visual_weights, text_weights: of the backbones, if they have moved.
        store: the feature store; None: the run's own.
        device: ``auto``, ``cpu`` or ``cuda``.
        resume: continue after the last step.
        callbacks: called at steps and epochs, see `Callback`.
        trust: let a file of weights, or parts of somebody's own in a run that was not trained here, run code.

    Raises:
        RecipeError: the settings do not fit, or change what the head was trained for.
        CacheError, EncoderError, SampleError: a backbone cannot be put back, or images are missing.
        RunError: a run does not fit, memory does not suffice, or the loss is not finite.
    """
    new, base, target = opened(TunedRun, out, resume, trust), Run(run, trust), pick_device(device)
    if (checkpoint := base.load_checkpoint()) is None:
        raise RunError(f"{base.path} has no {CHECKPOINT} to go on from; train the head with another --out")
    before: dict[str, Any] = checkpoint["state"]
    sides = reattach.split(",") if isinstance(reattach, str) else reattach
    recipe, put_back = _recipe(base, before, settings or {}, sides)
    for side, weights, name in (("image", visual_weights, "visual-weights"), ("text", text_weights, "text-weights")):
        if weights is not None and side not in put_back:
            way = f"leave --{name} out, or name {side} in --reattach"
            raise RecipeError(f"the backbone of {side}s is not put back, and takes no weights; {way}")
    cache = open_store(base, store)
    require_splits(cache)
    if base.info.also:
        _log.warning(f"{base.path} was trained on several stores; {cache.url} alone is trained on from here.")
    sets = sets_of_run(base, cache)
    pictures = find_pictures(cache, None if data_root is None else Path(data_root)) if "image" in put_back else None
    with within_memory(target, *_LACKING):
        tuned = {name: str(path) for name in BRANCHES if (path := base.backbone(name)) is not None}
        encoders: dict[str, TrainableEncoder] = {}
        if "text" in put_back:
            (captions,), text = parts_of(sets[1]), text_weights or tuned.get("text")
            encoders["text"] = put_back_captions(captions, text, str(target), trust)
        if pictures is not None:
            (images,), rows = parts_of(sets[0]), Split.of(*sets, "train").image_rows
            visual, size = visual_weights or tuned.get("image"), recipe.finetune.image_size
            encoders["image"] = put_back_images(images, rows, pictures, visual, str(target), size, trust)
        model = EndToEndModel(base.model(target, recipe), encoders, recipe)
        if recipe.data.chunk is not None:
            require_whole_batches(model.head, "data.chunk")
        losses = build_losses(recipe, base.text_facts).to(target)
        losses.load_state_dict(before["losses"])
        optimizer = _optimizer(base, before, recipe, model, losses)
    drawn: dict[str, Any] = {"views": views_to_draw(sets[0], recipe), "share": recipe.data.share}
    learnt = batches_of(sets, model, "train", target, placement=placement_of(recipe, new), **drawn)
    how = recipe.finetune.crop_and_flip, recipe.finetune.mask_words
    both = learnt, batches_of(sets, model, "val", target)
    split, val = (end_to_end_batches(one, encoders, pictures, *how) for one in both)
    trainer = Trainer(EndToEndObjective(recipe, model, losses, split), optimizer, target)
    trainer.epoch, trainer.step, trainer.best_epoch = before["epoch"], before["step"], before["epoch"]
    trainer.metrics = base.metrics()[: trainer.epoch]
    teacher_digest(base.info.distil, base, trust)
    info = _info(base, sets, recipe=recipe, device=str(target), put_back=put_back, epoch=trainer.epoch)
    created = new is None
    new = ready(TunedRun, new, out, on_split(info, split))
    with new.locked(created), within_memory(target, *_LACKING):
        teach(trainer.objective, base.info.distil, learnt, target, trust)
        trainer.resume(new)
        return trainer.train(new, split, val, callbacks)


def _info(base: Run, sets: Sets, *, recipe: Recipe, device: str, put_back: Sequence[BranchName], epoch: int) -> RunInfo:
    """Return what is known of a fine-tuning; the store knows where the weights of other runs lie."""
    origins: dict[str, Any] = {}
    for name, features in zip(BRANCHES, sets, strict=True):
        pairs = zip(parts_of(features), base.info.origins(name), strict=True)
        origins[name] = tuple(was if isinstance(now, RetokenizedCaptions) else Origin.of(now) for now, was in pairs)
    facts: dict[str, Any] = {"epochs": 0, "best_epoch": None, "best_rsum": None, "init_from": None, **origins}
    prints = {name: list(base.info.fingerprints(name)) for name in BRANCHES}
    facts |= {"finetuned": {"epoch": epoch, "reattach": list(put_back), "fingerprints": prints}, "recipe": recipe}
    facts |= {"head": absolute(str(base.path)), "device": device, "versions": versions()}
    return replace(base.info, **facts)


class TunedRun(Run):
    """A run whose best weights are those of a head and of its backbones."""

    exports_model = True

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
        """Return what makes the feature sets of the backbones, as JSON has it."""
        assert isinstance(model, EndToEndModel), "what is fine-tuned has backbones"
        facts: dict[str, Any] = {}
        for key, backbone in model.backbones.items():
            encoder, spec = backbone.encoder, backbone.encoder.spec
            identity = {**encoder.identity, "weights": encoder.weights_id()}
            made = Origin("", "grid" if key == "image" else "tokens", identity, spec.dtype, spec)
            # As an extraction calls it: by its network, or by the folder.
            name = encoder.name if encoder.suffix else short_name(str(self.path.resolve() / f"{key}_backbone"))
            facts[key] = [replace(made, name=f"{name}@{made.fingerprint[:8]}").to_json()]
        return facts


def _optimizer(
    base: Run, state: dict[str, Any], recipe: Recipe, model: EndToEndModel, losses: nn.ModuleDict
) -> torch.optim.Optimizer:
    """Return the head's optimiser with its state, without one if it is another, and groups for the backbones."""
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
        for matrices in (True, False):
            parameters = [p for p in backbone.parameters() if (p.ndim > 1) == matrices]
            decay = decay_of(parameters[0], recipe.optimizer) if parameters else 0.0
            optimizer.add_param_group({"params": parameters, "factor": factor, "frozen": frozen, "weight_decay": decay})
    return optimizer


def _recipe(
    base: Run, state: Mapping[str, Any], settings: Settings, reattach: Sequence[str]
) -> tuple[Recipe, tuple[BranchName, ...]]:
    """Return the run's recipe, changed, and which backbones are put back."""
    recipe = changed(base.recipe, settings)
    require_log(recipe.runtime.log)
    if said := difference(_settled(base.recipe, state), _settled(recipe, state)):
        raise RecipeError(f"{base.path} is trained, so that this cannot change: {said}; train another head")
    if state["epoch"] >= recipe.schedule.epochs:
        raise RunError(
            f"{base.path} has trained to the end of its schedule, epoch {state['epoch']}; say how many there shall be"
            f" in all, for example --set schedule.epochs={state['epoch'] + 10}"
        )
    learning = [name for name in BRANCHES if getattr(recipe.finetune, f"{name}_lr") > 0]
    put_back = _put_back(base, reattach or learning)
    if recipe.augment.mix:
        _log.warning("augment.mix: a fine-tuning blends nothing, since its features are not cached.")
    missing: dict[str, Any] = {f"{name}_lr": _FACTOR for name in put_back if name not in learning}
    for key in missing:
        _log.warning(f"finetune.{key}: the recipe has none; {_FACTOR} times the head's learning rate is taken.")
    augment, tuned = replace(recipe.augment, mix=0.0), replace(recipe.finetune, **missing)
    return replace(recipe, augment=augment, finetune=tuned), put_back


def _put_back(base: Run, names: Sequence[str]) -> tuple[BranchName, ...]:
    """Return which backbones are put back; RecipeError where there are none, or one cannot be."""
    if set(names) - set(BRANCHES):
        raise RecipeError(f"--reattach takes image, text or image,text, not '{','.join(names)}'")
    if not names:
        raise RecipeError(
            f"the recipe of {base.path} says of no backbone that it learns; say which to put back with --reattach"
            " image, text or image,text"
        )
    put_back = tuple(name for name in BRANCHES if name in names)
    for name in put_back:
        if len(sets := base.info.names(name)) > 1:
            raise RecipeError(
                f"{base.path} reads several {name} feature sets ({', '.join(sets)}), and xret puts back the backbone of"
                " a single one; fine-tune a head that is trained on one of them"
            )
    return put_back


def _settled(recipe: Recipe, state: Mapping[str, Any]) -> dict[str, Any]:
    """Return the values that the weights of a head and of its losses were trained for, by dotted key."""
    learned = set(map(term_of, state["losses"]))
    values: dict[str, Any] = {"loss": list(recipe.terms), "augment.mask_words > 0": recipe.augment.mask_words > 0}
    for key, value in flat(recipe.to_dict()).items():
        first, _, last = key.rpartition(".")
        of_loss = last in _LEARNT_FROM and first.removeprefix("loss.") in learned
        if (key.startswith(_FIXED) and last not in _NOISE) or of_loss or key.endswith(".learned"):
            values[key] = value
    return values
