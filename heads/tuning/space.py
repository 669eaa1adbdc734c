"""What a tuning varies: keys of a recipe, each with a range or with choices.

The bundled `spaces.yaml` maps keys to the text that ``--space KEY=TEXT`` takes: ``LOW:HIGH``, ``LOW:HIGH:log`` or
``A,B,C``. There ``*`` in a key stands for anything; keys that do not count in a recipe are left out.
"""

from collections.abc import Mapping
from dataclasses import asdict
from fnmatch import fnmatchcase
from functools import partial
from pathlib import Path
from typing import Any

import yaml
from optuna.distributions import BaseDistribution, CategoricalDistribution, FloatDistribution, IntDistribution

from ...pipeline.errors import RecipeError, nearest
from ..model import Facts, fitted
from ..modules.adapters import KINDS
from ..modules.losses import LOSSES
from ..recipes.blocks import Recipe, role
from ..recipes.recipe import PARTS, changed, faults_of, load_recipe, refused
from ..recipes.schema import flat
from ..recipes.settings import full_key, normalised
from ..series import as_text

FILE = Path(__file__).parent / "spaces.yaml"
FORM = "KEY=LOW:HIGH, KEY=LOW:HIGH:log or KEY=A,B,C"

Space = dict[str, BaseDistribution]  # by recipe key
_EPOCHS = ("schedule.epochs", "schedule.patience")


def make_space(
    recipe: str, image: Facts, text: Facts, own: Mapping[str, Any], settings: Mapping[str, Any]
) -> tuple[Space, dict[str, Any]]:
    """Return the bundled space of a recipe with a user's keys laid over it, and the values of the first trial.

    The first trial is the recipe: a number outside its range is moved to the nearest end, a value that is no choice is
    left out, to be drawn. The kinds of the features pick the adapters in use; `own` has by key a text as above or a
    list of choices, and `settings` are fixed. RecipeError where a key cannot be varied, or the recipe does not take a
    value; all faults at once.
    """
    own = {full_key(key): given for key, given in own.items()}
    fixed, base = normalised(settings), fitted(load_recipe(recipe, settings), image, text)
    lacking = own.keys() & {f"loss.{term}.weight" for term in LOSSES.keys() - base.terms}  # may be varied all the same
    base = changed(base, dict.fromkeys(lacking, 1))
    values = flat(asdict(base)) | dict.fromkeys(lacking, 0.0)
    swapped = tuple(f"{part}." for part in PARTS if f"{part}.name" in own)  # another part may lack these keys
    refusal = partial(_refusal, recipe=base, values=values, fixed=fixed, swapped=swapped)
    texts = bundled(base.name, [key for key in flat(base.to_dict()) if not refusal(key)])
    space: Space = {}
    faults: list[str] = []
    for key, given in {**texts, **own}.items():
        if fault := refusal(key):
            faults.append(fault)
            continue
        try:
            space[key] = _distribution(key, given, base)
        except RecipeError as error:
            faults += faults_of(error)
    if faults or not space:
        raise refused(f"the space of recipe '{base.name}'", faults or [f"nothing is left to vary: give --space {FORM}"])
    return space, {key: first for key, one in space.items() for first in _nearest(values[key], one)}


def _refusal(
    key: str, *, recipe: Recipe, values: Mapping[str, Any], fixed: Mapping[str, Any], swapped: tuple[str, ...]
) -> str:
    """Return why a key of a recipe cannot be varied, an empty text where it can; see `make_space`."""
    block = key.rpartition(".")[0]
    if block.removeprefix("adapter.") in KINDS.keys() - recipe.adapter.keys():
        return f"{key} cannot be varied: these features use adapter.{' and adapter.'.join(sorted(recipe.adapter))}"
    if key in _EPOCHS:
        return f"{key} cannot be varied: trials are compared epoch by epoch; --set it for all"
    if role(key) != "learnt":
        return f"{key} cannot be varied: all trials have the same"
    if key in fixed:
        return f"{key} is given to --space and to --set: leave one out"
    if key.startswith(swapped) and not key.endswith(".name"):
        return f"{key} cannot be varied beside {block}.name: not every part has it"
    return "" if key in values else f"recipe '{recipe.name}' has no key {key}{nearest(key, [*flat(recipe.to_dict())])}"


def bundled(name: str, keys: list[str]) -> dict[str, str]:
    """Return the text of each of `keys` that the bundled space of a recipe's system varies."""
    # Every scalar stays text, for YAML 1.1 reads 1:30 as a number of base 60.
    spaces = yaml.load(FILE.read_text(encoding="utf-8"), yaml.BaseLoader)
    patterns = {**spaces["default"], **spaces.get(name.split("/")[0], {})}
    return {key: text for pattern, text in patterns.items() for key in keys if fnmatchcase(key, pattern)}


def describe(one: BaseDistribution) -> str:
    """Return what is varied as ``--space`` takes it."""
    if isinstance(one, IntDistribution | FloatDistribution):
        return f"{one.low:.12g}:{one.high:.12g}{':log' if one.log else ''}"
    return ",".join(map(as_text, ends(one)))


def ends(one: BaseDistribution) -> tuple[Any, ...]:
    """Return the choices, or both ends of a range."""
    if isinstance(one, IntDistribution | FloatDistribution):
        return one.low, one.high
    assert isinstance(one, CategoricalDistribution)
    return one.choices


def _distribution(key: str, given: Any, recipe: Recipe) -> BaseDistribution:
    """Return the distribution that a text or a list of choices describes; its values are as the recipe reads them."""

    def read(text: str) -> Any:
        return flat(asdict(changed(recipe, {key: text.strip()}))).get(key, 0.0)  # a loss of weight 0 is not there

    words = given.split(",") if isinstance(given, str) else [as_text(one) for one in given]
    if len(words) == 1 and ":" in words[0]:
        low, high, *rest = words[0].split(":")
        numbers = read(low), read(high)
        try:
            if rest not in ([], ["log"]) or not all(type(one) in (int, float) for one in numbers):
                raise ValueError("a range has the form LOW:HIGH or LOW:HIGH:log, with numbers")
            whole = all(type(one) is int for one in numbers)
            return (IntDistribution if whole else FloatDistribution)(numbers[0], numbers[1], log=bool(rest))
        except ValueError as error:
            raise RecipeError(f"{key}={given}: {str(error).rstrip('.')}") from error
    choices = [read(word) for word in words]
    if len(set(map(str, choices))) < max(2, len(choices)):
        raise RecipeError(f"{key}={given} must have the form {FORM}, with different values; one value is for --set")
    return CategoricalDistribution(choices)


def _nearest(value: Any, one: BaseDistribution) -> list[Any]:
    """Return in a list the value nearest to a recipe's own that can be drawn; an empty list if there is none."""
    if isinstance(one, IntDistribution | FloatDistribution):
        return [min(max(value, one.low), one.high)] if type(value) in (int, float) else []
    return [value] if value in ends(one) else []
