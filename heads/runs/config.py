"""`config.json` of a run: the recipe and the facts of the features, all that is needed to build the model again."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, get_type_hints

import yaml

from ...pipeline.errors import RecipeError, RunError
from ...pipeline.wording import some_of
from ..model import Facts, FeatureFacts
from ..recipes.blocks import Recipe
from ..recipes.recipe import resolve
from ..recipes.schema import convert
from .info import RunInfo, several

_NAMED = 5  # of what differs


def write_config(folder: Path, recipe: Mapping[str, Any], image: Facts, text: Facts) -> None:
    """Write `config.json` in a new folder, and `recipe.yaml` for readers."""
    (folder / "config.json").write_text(config_text(recipe, image, text), encoding="utf-8")
    (folder / "recipe.yaml").write_text(recipe_text(recipe), encoding="utf-8")


def config_text(recipe: Mapping[str, Any], image: Facts, text: Facts) -> str:
    """Return `config.json`."""
    sides = {
        side: [asdict(one) for one in facts] if isinstance(facts, tuple) else asdict(facts)
        for side, facts in (("image", image), ("text", text))
    }
    return as_json({"recipe": recipe, **sides})


def recipe_text(recipe: Mapping[str, Any]) -> str:
    """Return `recipe.yaml`."""
    return yaml.safe_dump(recipe, sort_keys=False, allow_unicode=True)


def config_of(values: Any, info: RunInfo, title: str) -> tuple[Recipe, Facts, Facts]:
    """Return what `write_config` was given, of images and of captions, from the content of `config.json`.

    Raises:
        RunError: its recipe is none of this version; `title` begins the sentence.
        ValueError: it is something else, or does not fit `info`.
    """
    if not isinstance(values, dict) or not isinstance(recipe := values.get("recipe"), dict):
        raise ValueError("there is no recipe")
    try:
        resolved = resolve(recipe, title=title)
    except RecipeError as error:
        raise RunError(str(error)) from error
    image, text = (_facts(values.get(side), len(names)) for side, names in info.sides.items())
    return resolved, image, text


def _facts(told: Any, sets: int) -> Facts:
    kinds = get_type_hints(FeatureFacts, include_extras=True)
    try:
        found = tuple(FeatureFacts(**{key: convert(one[key], kinds[key]) for key in one}) for one in several(told))
    except (KeyError, TypeError) as error:
        raise ValueError("a fact is missing or unknown") from error
    if len(found) != sets:
        raise ValueError("run.json names another number of feature sets")
    for facts in found:
        words, rows = facts.vocabulary_size is not None, facts.channels is not None
        wanted = facts.kind == "words", facts.kind not in ("words", "global"), facts.kind != "words"
        if wanted != (words, rows, facts.global_channels is not None):
            raise ValueError(f"a feature set of kind {facts.kind!r} has other widths")
    return found[0] if len(found) == 1 else found


def difference(then: dict[str, Any], now: dict[str, Any], ignored: Sequence[str] = ()) -> str:
    """Say in which dotted keys, but for those `ignored`, nested values differ; an empty text where in none."""
    before, after = flat(then), flat(now)
    differing = [
        f"{key} is {before.get(key, 'absent')} there and {after.get(key, 'absent')} now"
        for key in sorted({*before, *after})
        if before.get(key) != after.get(key) and key not in ignored
    ]
    return "; ".join(some_of(differing, _NAMED))


def flat(values: dict[str, Any], path: str = "") -> dict[str, Any]:
    """Return nested values by their dotted keys."""
    out: dict[str, Any] = {}
    for key, value in values.items():
        out |= flat(value, f"{path}{key}.") if isinstance(value, dict) else {f"{path}{key}": value}
    return out


def as_json(value: Any) -> str:
    """Return a value as the files of a run have it."""
    return json.dumps(value, indent=1, ensure_ascii=False) + "\n"
