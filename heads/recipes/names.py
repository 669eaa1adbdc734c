"""The names and files of recipes, without torch; the package's docstring has the rule for bundled ones."""

import difflib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ...pipeline.documents import DocumentError, read_yaml
from ...pipeline.errors import RecipeError

FOLDER = Path(__file__).parent / "systems"


def recipe_files() -> dict[str, Path]:
    """Return the file of every bundled recipe, by its name; variants follow their system."""
    named = {}
    for file in FOLDER.rglob("*.yaml"):
        variant = file.parent.with_suffix(".yaml").is_file()
        named[f"{file.parent.name}/{file.stem}" if variant else file.stem] = file
    return dict(sorted(named.items(), key=lambda entry: entry[0].split("/")))


def recipe_names() -> list[str]:
    """Return the names of the bundled recipes: ``system`` or ``system/variant``."""
    return list(recipe_files())


def recipe_file(recipe: str) -> Path:
    """Return the YAML file of a bundled recipe's name, or of a path.

    Raises:
        RecipeError: there is neither such a recipe nor such a file.
    """
    bundled = recipe_files()
    if recipe in bundled:
        return bundled[recipe]
    if Path(recipe).is_file():
        return Path(recipe)
    if (Path(recipe) / "recipe.yaml").is_file():
        raise RecipeError(f"{recipe} is a run; take its recipe, {Path(recipe) / 'recipe.yaml'}")
    near = [f"'{name}'" for name in difflib.get_close_matches(recipe, bundled)]
    hint = f" (did you mean {', '.join(near[:-1])}{' or ' if near[1:] else ''}{near[-1]}?)" if near else ""
    raise RecipeError(f"there is no recipe '{recipe}'{hint}; take one that `xret recipes` lists, or a YAML file's path")


@dataclass(frozen=True)
class Headline:
    """What a list of recipes says of one.

    Attributes:
        name: of the recipe.
        reaches: ``cache`` or ``finetune``.
        paper: where it was published.
        expected: RSUM of the paper's row, by `evaluation.paper_rows.ROWS`; None where it has none.
    """

    name: str
    reaches: str
    paper: str
    expected: dict[str, float | None]


def headlines() -> list[Headline]:
    """Return what the bundled recipes say of themselves; their parts are not looked at, which would take torch."""
    found = []
    for name in recipe_names():
        said: dict[str, Any] = {}
        for own in reversed(lineage(name).values()):
            said |= own | {"expected": said.get("expected", {}) | own.get("expected", {})}
        found.append(Headline(name, said["reaches"], said["paper"], said["expected"]))
    return found


def lineage(recipe: str) -> dict[Path, dict[str, Any]]:
    """Return the file of a recipe and those of the recipes it is based on, nearest first, with what each says itself.

    Raises:
        RecipeError: a file is no recipe, or names a base that is not there or is based on it.
    """
    said: dict[Path, dict[str, Any]] = {}
    file = recipe_file(recipe)
    while True:
        values = said[file] = _read(file)
        base = values.pop("base", None)
        if base is None:
            return said
        beside = file.parent / str(base)
        above = beside.resolve() if beside.is_file() else recipe_file(str(base))
        if above in said:
            raise RecipeError(f"recipe {file}: base must be the name or path of another recipe, not {base!r}")
        file = above


def _read(file: Path) -> dict[str, Any]:
    try:
        values = read_yaml(file)
    except DocumentError as error:
        raise RecipeError(f"recipe {file} is not valid YAML: {error}") from error
    if not isinstance(values, dict):
        raise RecipeError(f"recipe {file} must be a mapping, as `xret recipes show vsepp` prints one")
    apart: dict[str, Any] = _apart(values)
    return apart


def _apart(values: Any) -> Any:
    """Return nested values of which none is another one: what YAML calls by an alias is the same object."""
    if isinstance(values, dict):
        return {key: _apart(value) for key, value in values.items()}
    return [_apart(value) for value in values] if isinstance(values, list) else values
