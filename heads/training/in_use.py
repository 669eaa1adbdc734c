"""Which keys of a recipe change nothing, for what the features are."""

from collections.abc import Iterable, Sequence
from fnmatch import fnmatchcase

import torch

from ...pipeline.errors import RecipeError
from ..model import Facts, block_of, build_model, facts_of_each
from ..recipes.blocks import Recipe
from ..recipes.recipe import key_of
from ..recipes.schema import get

Described = tuple[Recipe, Facts, Facts]  # a head: its recipe, its images and its captions
_ROWS_OF = {"augment.image": "image", "augment.image_varies": "image", "augment.text": "text"}
_SAYS_WHAT_IS_READ = ("augment.mix", "aggregator.image.name", "aggregator.text.name", "adapter.*.global")


def not_in_use(key: str, heads: Sequence[Described], varied: Iterable[str] = ()) -> str:
    """Return why a recipe's key changes none of the heads, for what their features are; else nothing.

    Args:
        key: of a recipe, such as ``adapter.grid.noise``, which is of one adapter, or ``augment.image``, of rows.
        heads: what is known of each.
        varied: other keys of a search; where another value of theirs may read rows, keys of rows are let through.
    """
    if key.startswith("adapter."):
        sides = [side for _, image, text in heads for side in (("image", image), ("text", text))]
        used = dict.fromkeys(f"adapter.{block_of(side, one)}" for side, facts in sides for one in facts_of_each(facts))
        unused = key.rpartition(".")[0] not in used
        return f"{key} is not in use with these features: take a key of {' or '.join(used)}" if unused else ""
    side = _ROWS_OF.get(key)
    may_read = any(fnmatchcase(one, pattern) for one in varied for pattern in _SAYS_WHAT_IS_READ)
    if side is None or may_read or any(_leaves_rows_out(side, *head) for head in heads):
        return ""
    what = "image" if side == "image" else "caption"
    return (
        f"{key} has no effect where one vector is read of each {what}: leave it out, or take a recipe that reads rows"
    )


def settings_not_in_use(settings: Iterable[str], heads: Sequence[Described], varied: Sequence[str] = ()) -> list[str]:
    """Return why settings change none of the heads, for what their features are.

    Args:
        settings: ``KEY=VALUE``. One that leaves no rows out anyway is let through.
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
    return key in _ROWS_OF and not any(get(recipe.to_dict(), key) for recipe, _, _ in heads)


def _leaves_rows_out(side: str, recipe: Recipe, image: Facts, text: Facts) -> bool:
    """Return whether a head reads rows of its images or captions that can be left out while it learns."""
    try:
        with torch.device("meta"):
            model = build_model(recipe, image, text)
    except RecipeError:  # whoever builds it for the training will say so
        return True
    branch = model.image if side == "image" else model.text
    fields = branch.fields if isinstance(branch.fields, tuple) else (branch.fields,)
    if recipe.augment.mix:  # what is averaged is blended as a vector
        fields = tuple(found for found, averaged in zip(fields, branch.averages, strict=True) if not averaged)
    return any(found & {"local", "token"} for found in fields)
