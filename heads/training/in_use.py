"""Which keys of a recipe change nothing, for what the features are."""

import re
from collections.abc import Iterable, Sequence
from fnmatch import fnmatchcase

import torch
from torch import nn

from ...pipeline.errors import RecipeError
from ..model import Facts, Model, block_of, build_losses, build_model, facts_of_each
from ..recipes.blocks import Recipe
from ..recipes.recipe import default_of, key_of
from ..recipes.schema import get
from .optimisation import components_of

Described = tuple[Recipe, Facts, Facts]  # a head: its recipe, its images and its captions
_ROWS_OF = {"augment.image": "image", "augment.image_varies": "image", "augment.text": "text"}
_SAYS_WHAT_IS_READ = ("augment.mix", "aggregator.image.name", "aggregator.text.name", "adapter.*.global")
_RATES = re.compile(r"optimizer\.(?P<part>\w+)_(lr|frozen)")


def not_in_use(key: str, heads: Sequence[Described], varied: Iterable[str] = ()) -> str:
    """Return why a recipe's key changes none of the heads, for what their features are; else nothing.

    Args:
        key: of a recipe, such as ``adapter.grid.noise``, which is of one adapter, ``augment.image``, of rows, or
            ``optimizer.aggregator_lr``, of weights.
        heads: what is known of each.
        varied: other keys of a search; what another value of theirs may let in is let through.
    """
    if key.startswith("adapter."):
        return _not_adapted(key, heads)
    if side := _ROWS_OF.get(key):
        if _any_of(varied, _SAYS_WHAT_IS_READ) or any(_leaves_rows_out(side, *head) for head in heads):
            return ""
        what = "image" if side == "image" else "caption"
        return (
            f"{key} has no effect where one vector is read of each {what}: leave it out, or take a recipe that reads "
            "rows"
        )
    if rate := _RATES.fullmatch(key):
        part = rate["part"]
        if _any_of(varied, (f"{part.rpartition('_')[2]}.*", "model.residual")):
            return ""
        if any(_has_weights(part, *head) for head in heads):
            return ""
        return f"{key} has no effect where the {part.replace('_', ' ')} has no weights: leave it out"
    return ""


def _not_adapted(key: str, heads: Sequence[Described]) -> str:
    block = key.rpartition(".")[0]
    kinds: dict[str, set[str]] = {}  # of features, by the block that counts for them
    for _, image, text in heads:
        for side, facts in (("image", image), ("text", text)):
            for one in facts_of_each(facts):
                kinds.setdefault(f"adapter.{block_of(side, one)}", set()).add(one.kind)
    if block not in kinds:
        return f"{key} is not in use with these features: take a key of {' or '.join(kinds)}"
    if key.endswith(".global") and kinds[block] == {"global"}:
        return f"{key} has no effect on features that are global alone, which are taken as they are: leave it out"
    return ""


def _any_of(keys: Iterable[str], patterns: Sequence[str]) -> bool:
    return any(fnmatchcase(key, pattern) for key in keys for pattern in patterns)


def settings_not_in_use(settings: Iterable[str], heads: Sequence[Described], varied: Sequence[str] = ()) -> list[str]:
    """Return why settings change none of the heads, for what their features are.

    Args:
        settings: ``KEY=VALUE``. Of rows and weights, one that gives a key its default is let through, and of global
            features alone, one that takes them as they are.
        heads: made with the settings.
        varied: as of `not_in_use`.
    """
    found = [not_in_use(key, heads, varied) for key in map(key_of, settings) if not _switched_off(key, heads)]
    return list(dict.fromkeys(filter(None, found)))


def require_in_use(settings: Iterable[str], recipe: Recipe, image: Facts, text: Facts) -> None:
    """Refuse settings that change nothing of a head, for what its features are; see `settings_not_in_use`.

    Raises:
        RecipeError: naming every such key.
    """
    if idle := settings_not_in_use(settings, [(recipe, image, text)]):
        raise RecipeError("; ".join(idle))


def _switched_off(key: str, heads: Sequence[Described]) -> bool:
    values = [recipe.to_dict() for recipe, _, _ in heads]
    if key.startswith("adapter."):
        return key.endswith(".global") and all(get(one, key) == "cached" for one in values)
    return all(get(one, key) == default_of(one, key) for one in values)


def _on_meta(recipe: Recipe, image: Facts, text: Facts) -> tuple[Model, nn.ModuleDict] | None:
    """Return a head and its losses without memory for weights, or None where they cannot be built."""
    try:
        with torch.device("meta"):
            return build_model(recipe, image, text), build_losses(recipe, text)
    except RecipeError:  # whoever builds it for the training will say so
        return None


def _has_weights(part: str, recipe: Recipe, image: Facts, text: Facts) -> bool:
    """Return whether a component, or the part of it that is of one side, has weights that learn."""
    if (built := _on_meta(recipe, image, text)) is None:
        return True
    modules = [module for *names, module in components_of(*built) if part in names]
    return any(parameter.requires_grad for module in modules for parameter in module.parameters())


def _leaves_rows_out(side: str, recipe: Recipe, image: Facts, text: Facts) -> bool:
    """Return whether a head reads rows of its images or captions that can be left out while it learns."""
    if (built := _on_meta(recipe, image, text)) is None:
        return True
    model, _ = built
    branch = model.image if side == "image" else model.text
    fields = branch.fields if isinstance(branch.fields, tuple) else (branch.fields,)
    if recipe.augment.mix:  # what is averaged is blended as a vector
        fields = tuple(found for found, averaged in zip(fields, branch.averages, strict=True) if not averaged)
    return any(found & {"local", "token"} for found in fields)
