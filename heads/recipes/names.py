"""The names and files of the bundled recipes; the package's docstring has the rule."""

import difflib
from pathlib import Path

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
    near = [f"'{name}'" for name in difflib.get_close_matches(recipe, bundled)]
    hint = f" (did you mean {', '.join(near[:-1])}{' or ' if near[1:] else ''}{near[-1]}?)" if near else ""
    raise RecipeError(f"there is no recipe '{recipe}'{hint}; take one that `xret recipes` lists, or a YAML file's path")
