"""Many trainings from one cache, as an ablation and a tuning need them: their folder and their checks."""

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import torch

from ..pipeline.errors import RunError
from ..pipeline.files import write_text
from ..pipeline.reading.joined_sets import parts_of
from ..pipeline.reading.split import Split
from ..pipeline.store import FeatureCache
from .model import build_losses, build_model, feature_facts
from .recipes.blocks import Recipe, role
from .recipes.schema import difference
from .runs.features import Sets, sets_named


def make_folder(root: Path) -> None:
    """Make a folder; RunError if that is impossible."""
    try:
        root.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise RunError(f"{root} cannot be made: {error.strerror}; take another --out") from error


def claim(root: Path, what: str, description: Mapping[str, Any]) -> None:
    """Write into ``ablation.json`` or ``tuning.json`` what a locked folder is for; RunError if it is for another.

    The `description` stays the same while the folder is used.
    """
    file, own = root / f"{what}.json", json.loads(json.dumps(description))
    if not file.exists():
        if any(path.name != "lock" for path in root.iterdir()):
            raise RunError(f"{root} is not empty and holds no {what}; take another --out")
        write_text(file, json.dumps(own, indent=1, ensure_ascii=False) + "\n", RunError)
        return
    then = {key: own[key] for key in ("pictures",) if key in own}  # folders from before do not know them
    if differing := difference(then | json.loads(file.read_text(encoding="utf-8")), own):
        raise RunError(f"{root} belongs to another {what}: {differing}; take another --out")


def decisive(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return those values, by dotted key of a recipe, that numbers depend on, feature sets left out."""
    return {key: value for key, value in values.items() if role(key) in ("learnt", "rounded")}


def identity(recipe: Recipe) -> dict[str, Any]:
    """Return the `decisive` values of a recipe and of its runtime."""
    return decisive(recipe.flat())


def fitting_sets(cache: FeatureCache, recipe: Recipe, splits: Iterable[str]) -> Sets:
    """Return the feature sets that a recipe names, after building its head on the meta device.

    CacheError where none or several fit, the store lacks one of `splits`, or its features are not complete; RecipeError
    where no head can be made of the recipe for them.
    """
    sets = sets_named(cache, recipe.data.image, recipe.data.text)
    for split in splits:
        Split.of(*sets, split)
    with torch.device("meta"):
        build_model(recipe, feature_facts(sets[0]), feature_facts(sets[1]))
        build_losses(recipe, feature_facts(sets[1]))
    return sets


def set_names(sets: Sets) -> list[str]:
    """Return the names of the feature sets of both sides."""
    return [part.name for side in sets for part in parts_of(side)]


def skipped(sets: Sets) -> dict[str, int]:
    """Return how many samples that trainings read have no features; a repair of the store changes what is learnt."""
    return {split: Split.of(*sets, split).skipped for split in ("train", "val")}


def as_text(value: Any) -> str:
    """Return a value of a recipe as ``--set`` takes it."""
    if isinstance(value, list | tuple):
        return f"[{', '.join(map(as_text, value))}]"
    return "null" if value is None else str(value).lower() if isinstance(value, bool) else str(value)
