"""Which keys of a recipe decide nothing, because another key of their block leaves them unread."""

from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

from ..modules.adapters import ADAPTERS, WordsAdapter
from ..modules.losses import LOSSES
from .blocks import Recipe
from .recipe import default_of, key_of, refused
from .schema import fields, get


class Rule(NamedTuple):
    """Keys of a block that are read only with some values of another key, such as `such_as`, or of one of `or_by`."""

    keys: tuple[str, ...]
    by: str
    reads: Callable[[Any], bool]
    such_as: Any
    or_by: tuple[str, ...] = ()


class Unread(NamedTuple):
    """Why a key decides nothing: `by` has the value `found`; with `wanted`, or other values of `or_by`, it would."""

    by: str
    found: Any
    wanted: Any
    or_by: tuple[str, ...] = ()

    def may_change(self, varied: Iterable[str]) -> bool:
        """Return whether the key may decide something with other values of the `varied` keys."""
        return not {self.by, *self.or_by}.isdisjoint(varied)


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
        Rule(("warmup_after",), "warmup_epochs", bool, 1, or_by=("warmup_ratio",)),
    ),
    "optimizer": (
        Rule(("beta1", "beta2"), "name", lambda name: name != "sgd", "adamw"),
        Rule(("momentum",), "name", lambda name: name == "sgd", "sgd"),
        Rule(("decay",), "weight_decay", bool, 0.01),
        *(
            Rule((f"image_{part}_lr", f"text_{part}_lr", f"{part}_frozen"), f"{part}_lr", bool, 1)
            for part in ("adapter", "aggregator")
        ),
        *(Rule((f"{part}_frozen",), f"{part}_lr", bool, 1) for part in ("similarity", "loss")),
    ),
    "augment": (Rule(("image_varies",), "image", bool, 0.2),),
    # Other parts have no such keys, whose value is then None.
    "similarity": (
        Rule(("lambda_lse",), "pooling", lambda pooling: pooling != "average", "lse"),
        Rule(("top",), "inference", lambda inference: inference != "assignment", "max"),
    ),
    **{
        f"aggregator.{side}": (
            Rule(("position_dim", "hidden_dim"), "generator", lambda name: name != "interpolation", "cos-sin-bigru"),
        )
        for side in ("image", "text")
    },
    "loss.triplet": (
        Rule(("warmup_epochs", "warmup"), "negatives", lambda negatives: negatives != "all", "hardest"),
        Rule(("warmup",), "warmup_epochs", bool, 1),
    ),
    "loss.infonce": (Rule(("logarithm",), "learned", lambda learned: learned is not False, "true"),),
}


def unread(recipe: Recipe) -> dict[str, Unread]:
    """Return the keys of a recipe that decide nothing, each with the reason."""
    values, found = recipe.to_dict(), {}
    for block, rules in _RULES.items():
        for rule in rules:
            by, *or_by = (f"{block}.{one}" for one in (rule.by, *rule.or_by))
            if not any(rule.reads(get(values, one)) for one in (by, *or_by)):
                why = Unread(by, get(values, by), rule.such_as, tuple(or_by))
                found.update({f"{block}.{key}": why for key in rule.keys if f"{block}.{key}" not in found})
    for term in LOSSES.keys() - recipe.terms.keys():
        why = Unread(f"loss.{term}.weight", 0, 1)
        found.update({f"loss.{term}.{option}": why for option in fields(LOSSES[term])})
    return found


def no_effect(key: str, why: Unread) -> str:
    """Return the sentence that refuses a key which decides nothing."""
    others = "".join(f" or {other}" for other in why.or_by)
    return f"{key} has no effect while {why.by} is {why.found}: leave it out, or set {why.by}={why.wanted}{others}"


def require_effect(
    recipes: Sequence[Recipe],
    settings: Iterable[str] = (),
    axes: Iterable[Sequence[str]] = (),
    varied: Iterable[str] = (),
) -> None:
    """Refuse what a user asks for that decides nothing in all of some recipes.

    What stands in a recipe's file may decide nothing: one that is based on another keeps what it does not need.

    Args:
        recipes: resolved, with all of what follows.
        settings: ``KEY=VALUE``. One that gives a key its default switches nothing on, and is let through.
        axes: keys that take the same value together, of which one must decide something.
        varied: other keys of the same search; what another value of theirs would let in is let through.

    Raises:
        RecipeError: naming every such key, and what would let it in.
    """
    first, *others = (unread(recipe) for recipe in recipes)
    idle = {
        key: why for key, why in first.items() if not why.may_change(varied) and all(key in other for other in others)
    }
    values = recipes[0].to_dict()
    asked = (key for key in map(key_of, settings) if get(values, key) != default_of(values, key))
    keys = [key for key in asked if key in idle]
    keys += [axis[0] for axis in axes if all(key in idle for key in axis)]
    if keys:
        raise refused(f"recipe '{recipes[0].name}'", [no_effect(key, idle[key]) for key in keys])
