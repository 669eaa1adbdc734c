"""Which keys of a recipe change nothing, for what the features are."""

import re
from collections.abc import Iterable, Iterator, Sequence
from fnmatch import fnmatchcase

import torch
from torch import nn

from ...pipeline.errors import RecipeError
from ..model import Facts, Model, block_of, build_losses, build_model, facts_of_each
from ..recipes.blocks import Recipe
from ..recipes.effects import require_effect
from ..recipes.recipe import default_of, key_of
from ..recipes.schema import get
from .optimisation import components_of

Described = tuple[Recipe, Facts, Facts]  # a head: its recipe, its images and its captions
_ROWS_OF = {"augment.image": "image", "augment.image_varies": "image", "augment.text": "text"}
_SAYS_WHAT_IS_READ = ("augment.mix", "aggregator.image.name", "aggregator.text.name", "adapter.*.global")
_OF_WEIGHTS = re.compile(r"optimizer\.(?P<part>\w+)_(lr|frozen)")
_SAYS_WHAT_HAS_WEIGHTS = {
    "adapter": (),
    "aggregator": ("aggregator.*.name", "model.residual"),
    "similarity": ("similarity.name",),
    "loss": ("loss.*.weight", "loss.infonce.learned"),
}
_SAYS_WHO_READS_THE_GLOBAL = (
    *(f"aggregator.*.{name}" for name in ("name", "of", "global_feature")),
    "loss.global-discriminative.weight",
    "model.residual",
)
_AS_THEY_ARE = {"global": "cached", "global_layer": "shared"}  # of an adapter of global features alone


def not_in_use(key: str, heads: Sequence[Described], varied: Iterable[str] = ()) -> str:
    """Return why a recipe's key changes none of the heads, for what their features are; else nothing.

    Args:
        key: of a recipe, such as ``adapter.grid.noise``, which is of one adapter, ``augment.image``, of rows, or
            ``optimizer.aggregator_lr``, of weights.
        heads: what is known of each.
        varied: other keys of a search; what another value of theirs may let in is let through.
    """
    varied = tuple(varied)
    if key.startswith("adapter."):
        return _not_adapted(key, heads, varied)
    if side := _ROWS_OF.get(key):
        if _any_of(varied, _SAYS_WHAT_IS_READ) or any(_leaves_rows_out(side, *head) for head in heads):
            return ""
        what = "image" if side == "image" else "caption"
        return (
            f"{key} has no effect where one vector is read of each {what}: leave it out, or take a recipe that reads "
            "rows"
        )
    if found := _OF_WEIGHTS.fullmatch(key):
        part = found["part"]
        if _any_of(varied, _SAYS_WHAT_HAS_WEIGHTS[part.rpartition("_")[2]]):
            return ""
        if any(_has_weights(part, *head) for head in heads):
            return ""
        return f"{key} has no effect where the {part.replace('_', ' ')} has nothing that learns: leave it out"
    return ""


def _any_of(keys: Iterable[str], patterns: Sequence[str]) -> bool:
    return any(fnmatchcase(key, pattern) for key in keys for pattern in patterns)


def _not_adapted(key: str, heads: Sequence[Described], varied: Sequence[str]) -> str:
    (block, _, name), kinds = key.rpartition("."), _kinds_adapted(heads)
    if block not in kinds:
        return f"{key} is not in use with these features: take a key of {' or '.join(kinds)}"
    if name not in _AS_THEY_ARE:
        return ""
    if kinds[block] == {"global"}:
        return f"{key} has no effect on features that are global alone: leave it out"
    if _any_of(varied, _SAYS_WHO_READS_THE_GLOBAL) or (name == "global_layer" and f"{block}.global" in varied):
        return ""
    if block == "adapter.words" and _may_be_a_bag(heads, varied):
        return ""  # which has one global feature and must be told so
    if not (shared := [shared for head in heads for shared in _shares_of_the_global(block, *head)]):
        return (
            f"{key} has no effect where the global feature is not read: leave it out, or take an aggregator that reads "
            "it, such as pie-net"
        )
    if name == "global_layer" and not any(shared):
        return f"{key} has no effect where rows and global feature have no layers to share: leave it out"
    return ""


def _may_be_a_bag(heads: Sequence[Described], varied: Sequence[str]) -> bool:
    return "adapter.words.encoder" in varied or any(
        recipe.adapter["words"]["encoder"] == "bag" for recipe, _, _ in heads
    )


def _kinds_adapted(heads: Sequence[Described]) -> dict[str, set[str]]:
    """Return the kinds of the heads' features by the block of a recipe that counts for them."""
    kinds: dict[str, set[str]] = {}
    for _, image, text in heads:
        for side, facts in (("image", image), ("text", text)):
            for one in facts_of_each(facts):
                kinds.setdefault(f"adapter.{block_of(side, one)}", set()).add(one.kind)
    return kinds


def settings_not_in_use(settings: Iterable[str], heads: Sequence[Described], varied: Sequence[str] = ()) -> list[str]:
    """Return why settings change none of the heads, for what their features are.

    Args:
        settings: ``KEY=VALUE``. One that switches nothing on is let through, as ``augment.image=0``, or ``cached`` of
            features that are global alone.
        heads: made with the settings.
        varied: as of `not_in_use`.
    """
    found = [not_in_use(key, heads, varied) for key in map(key_of, settings) if not _holds_anyway(key, heads)]
    return list(dict.fromkeys(filter(None, found)))


def require_in_use(settings: Sequence[str], recipe: Recipe, image: Facts, text: Facts) -> None:
    """Refuse settings that decide nothing about a head; see `settings_not_in_use` and `effects.require_effect`.

    Raises:
        RecipeError: naming every such key.
    """
    if idle := settings_not_in_use(settings, [(recipe, image, text)]):
        raise RecipeError("; ".join(idle))
    require_effect([recipe], settings)


def _holds_anyway(key: str, heads: Sequence[Described]) -> bool:
    """Return whether a setting gives its key the value that counts without it."""
    block, _, name = key.rpartition(".")
    values = [get(recipe.to_dict(), key) for recipe, _, _ in heads]
    if key.startswith("adapter."):
        kinds = _kinds_adapted(heads).get(block)
        if not kinds or name not in _AS_THEY_ARE:
            return False
        if kinds == {"global"}:
            return all(value == _AS_THEY_ARE[name] for value in values)
    return all(value == default_of(recipe.to_dict(), key) for value, (recipe, _, _) in zip(values, heads, strict=True))


def _on_meta(recipe: Recipe, image: Facts, text: Facts) -> tuple[Model, nn.ModuleDict] | None:
    """Return a head and its losses without memory for weights, or None where they cannot be built."""
    try:
        with torch.device("meta"):
            return build_model(recipe, image, text), build_losses(recipe, text)
    except RecipeError:  # whoever builds it for the training will say so
        return None


def _shares_of_the_global(block: str, recipe: Recipe, image: Facts, text: Facts) -> Iterator[bool]:
    """Yield, of each feature set of a block whose global feature a head reads, whether rows can share its layers."""
    if (built := _on_meta(recipe, image, text)) is None:
        yield True
        return
    model, losses = built
    of_a_loss = any(loss.uses_global for loss in losses.values())
    for side, branch, facts in (("image", model.image, image), ("text", model.text, text)):
        read = branch.aggregator.uses_global or (of_a_loss and branch.residual is None)
        for one, adapter in zip(facts_of_each(facts), branch.adapters, strict=True):
            if read and one.kind != "global" and f"adapter.{block_of(side, one)}" == block:
                same_width = adapter.global_ != "cached" or one.global_channels == one.channels
                yield bool(branch.aggregator.uses_local) and same_width


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
