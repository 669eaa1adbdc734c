"""Which trainings can be stacked: those whose recipes differ in numbers alone, of heads that ``vmap`` can compute."""

from collections.abc import Hashable, Sequence
from typing import Any

import torch
from torch import nn

from ...pipeline.reading.joined_sets import parts_of
from ...pipeline.reading.split import Split
from ...pipeline.store import FeatureCache
from ..model import Branch, Model, build_losses, build_model, feature_facts, losses_of
from ..modules.losses import Loss
from ..recipes.blocks import Recipe, role
from ..runs.features import sets_named
from .optimisation import components_of

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
