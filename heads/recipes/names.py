"""The names and files of recipes, without torch; the package's docstring says where each name is."""

from functools import lru_cache
from pathlib import Path
from typing import Any, NamedTuple

import yaml

from ...pipeline.documents import read_yaml
from ...pipeline.errors import RecipeError, nearest

FOLDER = Path(__file__).parent / "systems"


class Layer(NamedTuple):
    """What a recipe says itself, without its base: its place (file and variant), and its values."""

    place: tuple[Path, str]
    values: dict[str, Any]


def recipe_names() -> list[str]:
    """Return the names of the bundled recipes: ``system`` or ``system/variant``."""
    names = []
    for file in sorted(FOLDER.glob("*.yaml"), key=lambda file: file.stem):
        names += [file.stem, *(f"{file.stem}/{variant}" for variant in _parse(file).get("variants") or ())]
    return names


def recipe_file(recipe: str) -> Path:
    """Return the YAML file of a recipe; RecipeError where there is no such recipe."""
    return _find(recipe)[0]


def when_to_take() -> dict[str, str]:
    """Return when to take each bundled system, by its name."""
    return {name: _parse(recipe_file(name))["when"] for name in recipe_names() if "/" not in name}


def headlines() -> list[dict[str, Any]]:
    """Return ``name``, ``reaches``, ``paper`` and ``expected`` RSUM, by row, of the bundled recipes, without torch."""
    found = []
    for name in recipe_names():
        said: dict[str, Any] = {}
        for layer in reversed(lineage(name)):
            said |= {"expected": {}} | layer.values
        found.append({"name": name, **{key: said[key] for key in ("reaches", "paper", "expected")}})
    return found


def lineage(recipe: str) -> list[Layer]:
    """Return what a recipe says itself, then what those say that it is based on, nearest first.

    RecipeError where a file is no recipe, or a base is missing or based on this one.
    """
    layers: list[Layer] = []
    place: tuple[Path, str] | None = _find(recipe)
    while place is not None:
        layer, base = _read(*place)
        layers.append(layer)
        place = None if base is None else _base(base, layer)
        if place in [one.place for one in layers]:
            raise RecipeError(f"recipe '{recipe}': base must be another recipe, not {base!r}, which is based on it")
    return layers


def _find(recipe: str) -> tuple[Path, str]:
    """Return the file of a name or path, and which of its variants is meant; an empty text: none."""
    system, _, variant = recipe.partition("/")
    file = FOLDER / f"{system}.yaml"
    if file.is_file() and (not variant or variant in _parse(file).get("variants", {})):
        return file, variant
    if Path(recipe).is_file():
        return Path(recipe).resolve(), ""
    if (Path(recipe) / "recipe.yaml").is_file():
        raise RecipeError(f"{recipe} is a run; take its recipe, {Path(recipe) / 'recipe.yaml'}")
    hint = nearest(recipe, recipe_names())
    raise RecipeError(f"there is no recipe '{recipe}'{hint}; take one that `xret recipes` lists, or a YAML file's path")


def _base(base: str, layer: Layer) -> tuple[Path, str]:
    file, variant = layer.place
    beside = file.parent / base
    if variant and base in _parse(file)["variants"]:
        return file, base
    return (beside.resolve(), "") if beside.is_file() else _find(base)


def _read(file: Path, variant: str) -> tuple[Layer, str | None]:
    values = {key: value for key, value in _parse(file).items() if key not in ("variants", "when")}
    if variant:
        values = {"base": file.stem, **_parse(file)["variants"][variant], "name": f"{file.stem}/{variant}"}
    base = values.pop("base", None)
    return Layer((file, variant), values), None if base is None else str(base)


def _parse(file: Path) -> dict[str, Any]:
    try:
        values = _bundled(file) if file.parent == FOLDER else read_yaml(file)
    except (OSError, yaml.YAMLError, ValueError) as error:
        raise RecipeError(f"recipe {file} is not valid YAML: {error}") from error
    if not isinstance(values, dict):
        raise RecipeError(f"recipe {file} must be a mapping, as `xret recipes show vsepp` prints one")
    return values


@lru_cache(64)
def _bundled(file: Path) -> Any:
    """Read a recipe of xret, which tests have checked, once in a process."""
    return yaml.load(file.read_bytes(), getattr(yaml, "CSafeLoader", yaml.SafeLoader))
