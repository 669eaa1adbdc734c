"""What an ablation varies: variants, each a resolved recipe with a name, from ``--vary`` or a ready-made grid."""

import itertools
import math
import re
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from hashlib import sha256
from pathlib import Path
from typing import Any
from urllib.parse import quote

import yaml

from ...pipeline.errors import RecipeError, nearest
from ..recipes.blocks import Recipe
from ..recipes.names import recipe_file
from ..recipes.recipe import NOT_LEARNT, faults_of, full_key, key_of, load_recipe, refused
from ..recipes.schema import get

FOLDER = Path(__file__).parent / "grids"
LONGEST = 200  # characters of a folder's name; file systems take 255 bytes
RECALLS = ("R@1", "R@5", "R@10")

Value = int | float | bool | str | None
_COMMA = re.compile(r",(?![^\[\]]*\])")  # but none within brackets: [words, bert] is one value
Paper = dict[str, dict[str, float]]  # by row, such as f30k, then by metric, such as rsum or image_to_text R@1


@dataclass(frozen=True)
class Variant:
    """One line of an ablation's table.

    Attributes:
        name: of its folder; no two variants share one.
        label: for the table.
        values: what it sets, by recipe key.
        recipe: resolved.
        paper: the paper's values, by row and metric.
        baseline: whether it is a recipe of its own that stands in the table.
    """

    name: str
    label: str
    values: dict[str, Value]
    recipe: Recipe
    paper: Paper
    baseline: bool = False


@dataclass(frozen=True)
class Plan:
    """All variants of an ablation.

    Attributes:
        description: what stays the same where values or seeds are added: recipe or grid, settings and varied keys.
        variants: in the order of the table.
        split: what they are evaluated on unless another split is asked for.
        source: the paper's table, of a grid.
        axes: the keys that are varied; those that take the same value stand together.
    """

    description: dict[str, Any]
    variants: tuple[Variant, ...]
    split: str = "test"
    source: str | None = None
    axes: tuple[tuple[str, ...], ...] = ()


def make_plan(
    recipe: str | None = None,
    vary: Sequence[str] = (),
    grid: str | None = None,
    settings: Sequence[str] = (),
    baselines: Sequence[str] = (),
) -> Plan:
    """Plan a grid, or what is varied of a recipe: `plan_grid` or `plan_variation`, whose errors it raises.

    Args:
        baselines: recipes that stand in the table as they are, but for the settings, which must fit them too. Where
            feature sets are varied, each has a row for every combination of them, unless its file names its own.

    Raises:
        RecipeError: neither is asked for, or both are; or a baseline is not there, or the settings do not fit it.
    """
    if grid is not None and not vary:
        plan = plan_grid(grid, recipe, settings)
    elif grid is None and vary and recipe is not None:
        plan = plan_variation(recipe, vary, settings)
    else:
        raise RecipeError("give --recipe with one --vary or more, or --grid")
    beside = _baselines(baselines, settings, plan.variants)
    return replace(plan, variants=(*beside, *plan.variants))


def _baselines(names: Sequence[str], settings: Sequence[str], beside: Sequence[Variant]) -> list[Variant]:
    """Return recipes as they are, each on every choice of feature sets `beside` it, but for those that it names."""
    variants, faults = [], []
    for name in dict.fromkeys(names):
        recipe_file(name)  # a name that does not exist is a sentence of its own
        try:
            recipe = load_recipe(name, settings)
            free = [key for key in ("data.image", "data.text") if get(recipe.to_dict(), key) == "auto"]
            choices = [{key: one.values[key] for key in free if key in one.values} for one in beside]
            for values in (one for number, one in enumerate(choices) if one not in choices[:number]):
                folder, label = f"baseline={quote(name, safe='')}", name
                if values:
                    folder, label = f"{folder},{_folder(values)}", f"{name}, {_label(values)}"
                found = load_recipe(name, [*settings, *_settings(values)])
                variants.append(Variant(_short(folder), label, values, found, {}, baseline=True))
        except RecipeError as error:
            faults.append(f"baseline '{name}': {'; '.join(faults_of(error))}")
    if faults:
        raise refused("the ablation", faults)
    return variants


def plan_variation(recipe: str, vary: Sequence[str], settings: Sequence[str] = ()) -> Plan:
    """Plan every combination of the varied keys' values.

    Args:
        recipe: a bundled name or the path of a YAML file.
        vary: ``KEY=V1,V2``, or ``KEY1,KEY2=V1,V2`` for keys that take the same value together. A list in brackets is
            one value.
        settings: ``KEY=VALUE``, for all variants.

    Raises:
        RecipeError: unknown keys and wrong values, of all variants at once; or a key that decides nothing in any.
    """
    faults: list[str] = []
    axes = [axis for text in vary if (axis := _axis(text, faults)) is not None]
    typed = [key for names, _ in axes for key in names]
    keys = [full_key(key) for key in typed]
    faults += [f"{key} is varied twice" for key in sorted(set(keys)) if keys.count(key) > 1]
    fixed = {key_of(setting) for setting in settings}
    faults += [f"{key} is varied and set as well: leave one out" for key in dict.fromkeys(keys) if key in fixed]
    faults += [
        f"{key} cannot be varied: it does not describe how a head learns"
        for key in dict.fromkeys(keys)
        if key.split(".")[0] in NOT_LEARNT
    ]
    rows = []
    for combination in itertools.product(*(values for _, values in axes)):
        chosen = zip(axes, combination, strict=True)
        values = {key: value for (names, _), value in chosen for key in names}
        rows.append((_folder(values), _label(values), values, recipe))
    variants = _resolve(rows, settings, faults)
    axes_in_full = tuple(tuple(full_key(name) for name in names) for names, _ in axes)
    with suppress(RecipeError):  # a file that is no recipe without the settings has no row of a paper
        published = _comparable(load_recipe(recipe))
        expected = {row: {"rsum": rsum} for row, rsum in published["expected"].items() if rsum is not None}
        for variant in variants:
            if _comparable(variant.recipe) == published:
                variant.paper.update(expected)
    description = {"recipe": recipe, "grid": None, "set": sorted(settings), "vary": sorted(typed)}
    return Plan(description, tuple(variants), axes=axes_in_full)


def plan_grid(name: str, recipe: str | None = None, settings: Sequence[str] = ()) -> Plan:
    """Plan the cells of a ready-made grid.

    Args:
        name: one that `grid_names` returns.
        recipe: in the place of the grid's own, for all cells that name none; their paper's values are left out.
        settings: ``KEY=VALUE`` for all cells; what a cell sets itself stands over them.

    Raises:
        RecipeError: there is no such grid; unknown keys and wrong values, of all cells at once.
    """
    grid = read_grid(name)
    base, cells = recipe or grid.get("recipe"), grid["cells"]
    if recipe is not None and all("recipe" in cell for cell in cells):
        raise RecipeError(f"grid '{name}' names a recipe for each of its cells: leave --recipe out")
    rows = [(_slug(cell["label"]), cell["label"], cell.get("set", {}), cell.get("recipe", base)) for cell in cells]
    variants = _resolve(rows, settings, [])
    for cell, variant in zip(cells, variants, strict=True):
        if recipe is None or "recipe" in cell:
            variant.paper.update({row: _paper(values) for row, values in cell.get("paper", {}).items()})
    description = {"recipe": recipe, "grid": name, "set": sorted(settings), "vary": []}
    return Plan(description, tuple(variants), grid.get("split", "test"), grid["source"])


def grid_names() -> list[str]:
    """Return the names of the ready-made grids."""
    return sorted(_grid_files())


def read_grid(name: str) -> dict[str, Any]:
    """Return a grid's file: ``source``, ``cells``, and optionally ``recipe`` and ``split``.

    A cell has a ``label`` and, where it needs them, ``set``, a ``recipe`` of its own, and ``paper``: by row either
    the RSUM or a mapping with ``rsum``, ``log_circular_variance``, ``image_to_text`` and ``text_to_image``, the last
    two lists of recall@1, 5 and 10 as far as they are printed.

    Raises:
        RecipeError: there is no grid of this name.
    """
    files = _grid_files()
    if name not in files:
        raise RecipeError(f"there is no grid '{name}'{nearest(name, sorted(files))}: {', '.join(sorted(files))}")
    grid: dict[str, Any] = yaml.safe_load(files[name].read_text(encoding="utf-8"))
    return grid


def _grid_files() -> dict[str, Path]:
    """Return the file of each grid: ``setdiv/table4.yaml`` is named ``setdiv-table4``."""
    return {f"{path.parent.name}-{path.stem}": path for path in FOLDER.glob("*/*.yaml")}


def _axis(text: str, faults: list[str]) -> tuple[list[str], list[Value]] | None:
    """Return the keys of one ``--vary`` and the values that they take."""
    names, equals, choices = text.partition("=")
    keys = [part.strip() for part in names.split(",")]
    texts = [part.strip() for part in _COMMA.split(choices)]
    if not equals or not all(keys) or not all(texts):
        faults.append(f"--vary '{text}' must have the form KEY=V1,V2, such as similarity.alpha=4,8,16")
        return None
    values = [_value(choice) for choice in texts]
    if choices.count("[") != choices.count("]"):
        faults.append(f"--vary '{text}' has half of a pair of brackets; a list is one value, such as [words, bert]")
    elif len({"none" if value is None else str(value) for value in values}) < len(values):
        faults.append(f"--vary '{text}' names a value twice")
    return keys, values


def _value(text: str) -> Value:
    """Read a value as JSON would print it, so that 1e-3 and 0.001 are the same cell, and so are all ways of a list."""
    if text.startswith("[") and text.endswith("]"):
        items = (item.strip(" '\"") for item in text[1:-1].split(","))
        return f"[{', '.join(items)}]"
    if text == "None" or text.lower() in ("true", "false", "null"):  # `none` may be a name, such as of positions
        return {"true": True, "false": False}.get(text.lower())
    try:
        number = float(text)
    except ValueError:
        return text
    if not math.isfinite(number):
        return text
    return int(number) if number.is_integer() and abs(number) < 2**53 else number


def _resolve(
    rows: Sequence[tuple[str, str, Mapping[str, Value], str]], settings: Sequence[str], faults: list[str]
) -> list[Variant]:
    """Return the variants of (folder, label, values, recipe); raise all faults of all of them at once."""
    variants = []
    for name, label, values, recipe in rows:
        recipe_file(recipe)  # a name that does not exist is a sentence of its own
        try:
            found = load_recipe(recipe, [*settings, *_settings(values)])
            variants.append(Variant(name, label, dict(values), found, {}))
        except RecipeError as error:
            faults += faults_of(error)
    if faults:
        raise refused("the ablation", faults)
    return variants


def _settings(values: Mapping[str, Value]) -> list[str]:
    return [f"{key}={value}" for key, value in values.items()]


def _folder(values: Mapping[str, Value]) -> str:
    """Return a folder's name for varied values: readable, safe, and another one for other values."""
    name = ",".join(f"{quote(key, safe='')}={quote(_text(value), safe='')}" for key, value in values.items())
    return _short(name)


def _short(name: str) -> str:
    return name if len(name) <= LONGEST else sha256(name.encode()).hexdigest()


def _slug(label: str) -> str:
    """Return a folder's name for a grid's label; a test sees to it that no two labels of a grid share one."""
    return re.sub(r"[^a-z0-9.=]+", "-", label.lower()).strip("-")


def _label(values: Mapping[str, Value]) -> str:
    return ", ".join(f"{key}={_text(value)}" for key, value in values.items())


def _text(value: Value) -> str:
    return str(value).lower() if isinstance(value, bool) or value is None else str(value)


def _comparable(recipe: Recipe) -> dict[str, Any]:
    """Return what a paper's row depends on: neither how it is computed nor what the feature sets are called."""
    values = recipe.to_dict()
    values["data"] = {key: value for key, value in values["data"].items() if key not in ("image", "text")}
    return {key: value for key, value in values.items() if key != "runtime"}


def _paper(values: float | Mapping[str, Any]) -> dict[str, float]:
    """Return a cell's values by metric: a number alone is the RSUM."""
    if not isinstance(values, Mapping):
        return {"rsum": values}
    flat: dict[str, float] = {}
    for key, value in values.items():
        if isinstance(value, list):
            flat |= {f"{key} {recall}": number for recall, number in zip(RECALLS, value, strict=False)}
        else:
            flat[key] = value
    return flat
