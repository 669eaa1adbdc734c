"""What a tuning varies: keys of a recipe, each with a range or with choices.

A bundled space (`spaces/default.yaml`, and of a system that needs other keys `spaces/SYSTEM.yaml` laid over it) maps
keys to the same text that ``--space KEY=TEXT`` takes: ``LOW:HIGH``, ``LOW:HIGH:log`` or ``A,B,C``. There ``*`` in a key
stands for anything, as in ``adapter.*.dropout``, and a key that the recipe does not have, or whose part is not in use,
is left out. ``null`` takes a key of the default space out.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

import yaml

from ...pipeline.errors import RecipeError, nearest
from ..model import Facts, block_of, facts_of_each
from ..modules.losses import LOSSES
from ..recipes.blocks import Recipe
from ..recipes.recipe import NOT_LEARNT, PARTS, changed, faults_of, full_key, key_of, refused
from ..runs.config import flat
from ..series.checks import require_buildable

FOLDER = Path(__file__).parent / "spaces"
FORM = "KEY=LOW:HIGH, KEY=LOW:HIGH:log or KEY=A,B,C"

Value = int | float | bool | str | None
# Not varied, by their first part or whole: what names a recipe, how it is computed, and what decides a trial's cost.
_FIXED = (*NOT_LEARNT, "runtime")
_FIXED_KEYS = ("data.image", "data.text", "data.image_kind", "data.text_kind", "schedule.epochs", "schedule.patience")

_WEIGHTS = tuple(f"loss.{term}.weight" for term in LOSSES)  # also of a term that the recipe lacks


@dataclass(frozen=True)
class Range:
    """Numbers from `low` to `high`, both included; whole ones if `whole`; drawn by their logarithm if `log`."""

    low: float
    high: float
    log: bool
    whole: bool

    def __str__(self) -> str:
        return f"{self.low:.12g}:{self.high:.12g}{':log' if self.log else ''}"

    def nearest(self, value: Any) -> Any:
        """Return the number of the range that is nearest to a value; None where that is no number."""
        return None if type(value) not in (int, float) else min(max(value, self.low), self.high)


@dataclass(frozen=True)
class Choice:
    """One of some values."""

    values: tuple[Value, ...]

    def __str__(self) -> str:
        return ",".join(written(value) for value in self.values)

    def nearest(self, value: Any) -> Any:
        """Return the value if it is one of them, the nearest one of numbers, otherwise None."""
        if value in self.values:
            return value
        numbers = [one for one in self.values if type(one) in (int, float)]
        return min(numbers, key=lambda one: abs(one - value)) if numbers and type(value) in (int, float) else None


Space = dict[str, Range | Choice]  # by recipe key


def make_space(
    recipe: Recipe, image: Facts, text: Facts, own: Sequence[str] = (), settings: Sequence[str] = ()
) -> Space:
    """Return the bundled space of a recipe with the user's own keys laid over it.

    Args:
        recipe: resolved, with `settings`.
        image: what the feature set of images is; its kind picks the adapter in use.
        text: likewise.
        own: ``KEY=LOW:HIGH``, ``KEY=LOW:HIGH:log`` or ``KEY=A,B,C``.
        settings: ``KEY=VALUE``; keys that stay as they are set.

    Raises:
        RecipeError: a key is not the recipe's or not in use, a range is none, a value does not fit; all faults at once.
    """
    fixed = {key_of(setting) for setting in settings}
    varied = {key_of(word) for word in own}
    recipe = _with_terms(recipe, varied)
    used = _used_keys(recipe, image, text)
    texts = {key: said for key, said in bundled(recipe.name, used).items() if key not in fixed}
    faults: list[str] = []
    typed: dict[str, str] = {}
    for word in own:
        key, equals, said = (part.strip() for part in word.partition("="))
        key = full_key(key)
        if not (key and equals and said):
            faults.append(f"--space '{word}' must have the form {FORM}")
        elif fault := _refused_key(key, recipe, used, image, text):
            faults.append(fault)
        elif key in typed:
            faults.append(f"{key} is given twice")
        elif key in fixed:
            faults.append(f"{key} is given to --space and to --set: leave one out")
        else:
            typed[key] = said
    # Of a part whose name is varied: another part may not have the key.
    swapped = tuple(f"{part}." for part in PARTS if f"{part}.name" in typed)
    faults += [
        f"{key} cannot be varied beside {key.rpartition('.')[0]}.name: not every part has it"
        for key in typed
        if key.startswith(swapped) and not key.endswith(".name")
    ]
    texts = {key: said for key, said in texts.items() if not key.startswith(swapped)} | typed
    space = {key: found for key, said in texts.items() if (found := _read(key, said, recipe, faults)) is not None}
    faults += _refused_values(space, recipe, settings, image, text)
    if not space and not faults:
        faults.append(f"nothing is left to vary: give --space {FORM}")
    if faults:
        raise refused(f"the space of recipe '{recipe.name}'", faults)
    return space


def bundled(name: str, keys: Iterable[str]) -> dict[str, str]:
    """Return the text of each of `keys` that the bundled space of a recipe's system varies."""
    files = [FOLDER / "default.yaml", FOLDER / f"{name.split('/')[0]}.yaml"]
    patterns: dict[str, str | None] = {}
    for file in files:
        if file.is_file():
            patterns |= read_file(file)
    return {
        key: text for pattern, text in patterns.items() if text is not None for key in keys if fnmatchcase(key, pattern)
    }


def read_file(file: Path) -> dict[str, str | None]:
    """Return a bundled file's text by key; every scalar is text, for YAML 1.1 reads 1:30 as a number of base 60."""
    texts: dict[str, str] = yaml.load(file.read_text(encoding="utf-8"), yaml.BaseLoader)
    return {key: None if text == "null" else text for key, text in texts.items()}


def recipe_of(recipe: Recipe, settings: Sequence[str], values: Mapping[str, Value]) -> Recipe:
    """Return the recipe of a trial.

    A term of the loss has its options only while it has a weight, and a part its parameters only while it has its name.
    So what was set of them is set again beside the trial's values.

    Args:
        recipe: resolved, with `settings`.
        settings: ``KEY=VALUE``.
        values: by key.

    Raises:
        RecipeError: they do not fit.
    """
    undone = ("loss.", *(f"{part}." for part in PARTS))
    kept = [setting for setting in settings if key_of(setting).startswith(undone)]
    return changed(recipe, [*kept, *as_settings(values)])


def own_values(space: Space, recipe: Recipe) -> dict[str, Value]:
    """Return the recipe's own values of a space's keys, or the nearest numbers; a key without any is left out."""
    lacking = {key: 0.0 for key in _WEIGHTS if key.split(".")[1] not in recipe.terms}
    values = _values_of(_with_terms(recipe, space)) | lacking
    found = {key: dimension.nearest(values[key]) for key, dimension in space.items()}
    own_null = {
        key for key, one in space.items() if values[key] is None and isinstance(one, Choice) and None in one.values
    }
    return {key: value for key, value in found.items() if value is not None or key in own_null}


def as_settings(values: Mapping[str, Value]) -> list[str]:
    """Return values of keys as ``--set`` takes them."""
    return [f"{key}={written(value)}" for key, value in values.items()]


def written(value: Value) -> str:
    """Return a value as a recipe file and the command line have it."""
    if value is None:
        return "null"
    return str(value).lower() if isinstance(value, bool) else str(value)


def _values_of(recipe: Recipe) -> dict[str, Any]:
    """Return a recipe's values by key; a loss that it lacks has weight 0."""
    return dict.fromkeys(_WEIGHTS, 0.0) | flat(recipe.to_dict())


def _with_terms(recipe: Recipe, varied: Iterable[str]) -> Recipe:
    """Return a recipe with those terms of the loss, at weight 1, that it lacks and whose weight is varied."""
    return changed(recipe, [f"{key}=1" for key in _WEIGHTS if key in varied and key.split(".")[1] not in recipe.terms])


def _used_keys(recipe: Recipe, image: Facts, text: Facts) -> list[str]:
    """Return the keys that may be varied; of the adapters those of the feature sets."""
    sides = (("image", image), ("text", text))
    used = tuple(f"adapter.{block_of(side, one)}." for side, facts in sides for one in facts_of_each(facts))
    return [
        key
        for key in flat(recipe.to_dict())
        if key.split(".")[0] not in _FIXED
        and key not in _FIXED_KEYS
        and (not key.startswith("adapter.") or key.startswith(used))
    ]


def _refused_key(key: str, recipe: Recipe, used: list[str], image: Facts, text: Facts) -> str:
    """Return why a key cannot be varied; an empty text where it can."""
    if key in used or key in _WEIGHTS:
        return ""
    if key in ("schedule.epochs", "schedule.patience"):
        return f"{key} cannot be varied, since trials are compared epoch by epoch: --set it for all"
    if key in ("data.image", "data.text"):
        return (
            f"{key} cannot be varied, since trials share the features: tune each set of them with an --out of its own"
        )
    if key in flat(recipe.to_dict()):
        return f"{key} cannot be varied: it does not describe how a head learns on these features"
    return f"recipe '{recipe.name}' has no key {key}{nearest(key, used)}"


def _read(key: str, text: str, recipe: Recipe, faults: list[str]) -> Range | Choice | None:
    """Return what a text says of a key, or None and a fault; values are as the recipe reads them."""
    if ":" in text:
        return _range(key, text, recipe, faults)
    words = [word.strip() for word in text.split(",")]
    if len(words) < 2 or not all(words):
        faults.append(f"{key}={text} must be a range or several values: {FORM}; one value is for --set")
        return None
    values = [_value(key, word, recipe, faults) for word in words]
    if None in values:
        return None
    plain = tuple(value[0] for value in values if value)
    if len(set(plain)) < len(plain):
        faults.append(f"{key}={text} names a value twice")
        return None
    return Choice(plain)


def _range(key: str, text: str, recipe: Recipe, faults: list[str]) -> Range | None:
    low_text, high_text, *rest = (part.strip() for part in text.split(":"))
    try:
        low, high = float(low_text), float(high_text)
    except ValueError:
        low, high = math.nan, math.nan
    if not (math.isfinite(low) and math.isfinite(high)) or rest not in ([], ["log"]):
        faults.append(f"{key}={text} must be a range of numbers: LOW:HIGH or LOW:HIGH:log")
    elif low >= high:
        faults.append(f"{key}={text}: the first number must be below the second")
    elif rest and low <= 0:
        faults.append(f"{key}={text}: a logarithmic range begins above 0")
    else:
        ends = [_value(key, end, recipe, faults) for end in (low_text, high_text)]
        if None in ends:
            return None
        numbers = [end[0] for end in ends if end]
        if all(type(number) is int for number in numbers):
            return Range(int(low), int(high), bool(rest), whole=True)
        if all(type(number) in (int, float) for number in numbers):
            return Range(low, high, bool(rest), whole=False)
        faults.append(f"{key}={text}: the key takes no numbers; give its values as A,B,C")
    return None


def _value(key: str, text: str, recipe: Recipe, faults: list[str]) -> tuple[Value] | None:
    """Return a value as the recipe reads it, in a tuple, or None and the recipe's faults."""
    try:
        return (_values_of(changed(recipe, [f"{key}={text}"]))[key],)
    except RecipeError as error:
        faults += faults_of(error)
        return None


def _refused_values(space: Space, recipe: Recipe, settings: Sequence[str], image: Facts, text: Facts) -> list[str]:
    """Return why no head can be made with an end of a range or a choice, the other keys being the recipe's."""
    faults: list[str] = []
    for key, dimension in space.items():
        ends = dimension.values if isinstance(dimension, Choice) else (dimension.low, dimension.high)
        for value in ends:
            try:
                require_buildable(recipe_of(recipe, settings, {key: value}), image, text)
            except RecipeError as error:
                faults += faults_of(error)
    return faults
