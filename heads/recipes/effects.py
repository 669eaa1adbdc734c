"""Which keys of a recipe decide nothing, because another key of their block leaves them unread."""

from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

from ..modules.adapters import ADAPTERS, WordsAdapter
from .blocks import Recipe
from .recipe import key_of, refused
from .schema import get


class Rule(NamedTuple):
    """Keys of a block that are read only with some values of another key, of which `such_as` is one."""

    keys: tuple[str, ...]
    by: str
    reads: Callable[[Any], bool]
    such_as: Any


class Unread(NamedTuple):
    """Why a key decides nothing: `by` has the value `found`; with `wanted` it would."""

    by: str
    found: Any
    wanted: Any


_LAYERS = (
    Rule(("hidden", "hidden_dropout"), "layers", lambda layers: layers != "linear", "mlp"),
    Rule(("batch_norm",), "layers", lambda layers: layers in ("mlp", "mlp-on-linear"), "mlp"),
    Rule(("depth",), "layers", lambda layers: layers == "blocks", "blocks"),
)
_WORDS = (
    Rule(("layers", *(key for rule in _LAYERS for key in rule.keys)), "encoder", lambda name: name == "bag", "bag"),
    Rule(("bidirectional", "state_dropout"), "encoder", lambda name: name == "gru", "gru"),
)
_RULES = {
    **{f"adapter.{kind}": (*(_WORDS if part is WordsAdapter else ()), *_LAYERS) for kind, part in ADAPTERS.items()},
    "schedule": (
        Rule(("by",), "name", lambda name: name in ("cosine", "linear"), "cosine"),
        Rule(("step", "gamma"), "name", lambda name: name == "step", "step"),
    ),
    "augment": (Rule(("image_varies",), "image", bool, 0.2),),
}


def unread(recipe: Recipe) -> dict[str, Unread]:
    """Return the keys of a recipe that decide nothing, each with the reason."""
    values, found = recipe.to_dict(), {}
    for block, rules in _RULES.items():
        for rule in rules:
            value = get(values, f"{block}.{rule.by}")
            if not rule.reads(value):
                why = Unread(f"{block}.{rule.by}", value, rule.such_as)
                found.update({f"{block}.{key}": why for key in rule.keys if f"{block}.{key}" not in found})
    return found


def no_effect(key: str, why: Unread) -> str:
    """Return the sentence that refuses a key which decides nothing."""
    return f"{key} has no effect while {why.by} is {why.found}: leave it out, or set {why.by}={why.wanted}"


def require_effect(settings: Iterable[str], recipes: Sequence[Recipe], varied: Iterable[str] = ()) -> None:
    """Raise RecipeError where a key of ``KEY=VALUE`` settings decides nothing in any of the recipes it is set in.

    It may where it is read with another value of a key that is `varied`. What stands in a recipe's file may decide
    nothing: a recipe that is based on another one keeps what it does not need.
    """
    keys = dict.fromkeys(key_of(setting) for setting in settings)
    first, *others = (unread(recipe) for recipe in recipes)
    faults = [
        no_effect(key, first[key])
        for key in keys
        if key in first and first[key].by not in varied and all(key in found for found in others)
    ]
    if faults:
        raise refused(f"recipe '{recipes[0].name}'", faults)
