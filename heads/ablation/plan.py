"""What an ablation varies: variants, each a resolved recipe with a name, from varied keys or a paper's grid."""

import itertools
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import lru_cache
from hashlib import sha256
from pathlib import Path
from typing import Any
from urllib.parse import quote

import yaml

from ...pipeline.errors import RecipeError, nearest
from ..recipes.blocks import Recipe, role
from ..recipes.names import recipe_file
from ..recipes.recipe import faults_of, load_recipe, refused
from ..recipes.settings import full_key, normalised, value_of
from ..series import as_text, decisive

FOLDER = Path(__file__).parent / "grids"
LONGEST = 200  # characters of a folder's name; file systems take 255 bytes
RECALLS = ("R@1", "R@5", "R@10")

Value = int | float | bool | str | None
Paper = dict[str, dict[str, float]]  # by row, such as f30k, then by metric, such as rsum or image_to_text R@1


@dataclass(frozen=True)
class Variant:
    """One line of an ablation's table.

    `name` is that of its folder, `label` that of its line; it sets `values`, by recipe key, which give the resolved
    `recipe`; `paper` are the paper's values. A `baseline` is a recipe of its own beside the variants.
    """

    name: str
    label: str
    values: dict[str, Value]
    recipe: Recipe
    paper: Paper
    baseline: bool = False


@dataclass(frozen=True)
class Plan:
    """All variants of an ablation, baselines first.

    `description` stays the same if values, baselines or seeds are added. `split` is evaluated, by the mean over all
    cached `views` of an image or by the first alone. A grid has a `source`, the paper's table.
    """

    description: dict[str, Any]
    variants: tuple[Variant, ...]
    split: str = "test"
    views: bool = False
    source: str | None = None


_Row = tuple[str, str, dict[str, Value], str, Paper]  # a variant with the name of its recipe


def make_plan(
    recipe: str | Path | None = None,
    vary: Mapping[str, Sequence[Any]] | None = None,
    grid: str | None = None,
    settings: Mapping[str, Any] | None = None,
    baselines: str | Sequence[str] = (),
    split: str | None = None,
    views: bool = False,
) -> Plan:
    """Plan every combination of the varied keys' values, or the cells of a paper's grid.

    Arguments are those of `xret.ablate`. With `grid` a `recipe` replaces that of all cells that name none, and the
    paper's values are left out. Keys of `vary` that commas join take the same value together. If feature sets are
    varied, a baseline has a row for every combination of them, unless its file names its own. RecipeError where not one
    of `grid` and `vary` with `recipe` is given; or of unknown names, keys and wrong values, all of them at once.
    """
    fixed = {key: _plain(value) for key, value in normalised(settings or {}).items()}
    both = fixed.keys() & {*_full_keys(vary or {})}
    faults = [f"{key} is given to --vary and to --set: leave one out" for key in sorted(both)]
    rows = _rows(recipe, vary or {}, grid, faults)
    variants = _resolved(rows, fixed, faults)
    beside: list[Variant] = []
    for name in dict.fromkeys([baselines] if isinstance(baselines, str) else map(str, baselines)):
        beside += _baseline(name, fixed, rows, faults)
    if faults:
        raise refused("the ablation", faults)
    if grid is None:
        _put_paper(variants, str(recipe))
    recipes = sorted({variant.recipe.name for variant in variants})
    description = {"recipes": recipes, "grid": grid, "set": decisive(fixed), "vary": sorted(_full_keys(vary or {}))}
    facts = {} if grid is None else read_grid(grid)
    return Plan(description, (*beside, *variants), split or facts.get("split", "test"), views, facts.get("source"))


def _rows(
    recipe: str | Path | None, vary: Mapping[str, Sequence[Any]], grid: str | None, faults: list[str]
) -> list[_Row]:
    if grid is not None and not vary:
        return list(_grid_rows(grid, recipe))
    if grid is not None or not vary or recipe is None:
        raise RecipeError("give --recipe with one --vary or more, or --grid")
    rows, keys = list(_varied_rows(str(recipe), vary)), _full_keys(vary)
    if not rows:
        raise RecipeError("--vary names a key without a value; give it one or more")
    if len({*keys}) < len(keys) or len({row[0] for row in rows}) < len(rows):
        faults.append("--vary names a key or a value twice")
    return rows


def _full_keys(vary: Mapping[str, Any]) -> list[str]:
    return [full_key(key.strip()) for names in vary for key in names.split(",")]


def grid_names() -> list[str]:
    """Return the names of the papers' grids."""
    return sorted(_grids())


def read_grid(name: str) -> dict[str, Any]:
    """Return a grid: ``source``, ``cells``, and optionally ``recipe`` and ``split``; RecipeError where it is unknown.

    Its ``sets`` only give YAML's names to settings, for the cells.

    A cell has a ``label`` and, where it needs them, ``set``, a ``recipe`` of its own, and ``paper``: by row either
    the RSUM or a mapping with ``rsum``, ``log_circular_variance``, ``image_to_text`` and ``text_to_image``, the last
    two lists of recall@1, 5 and 10 as far as they are printed.
    """
    grids = _grids()
    if name not in grids:
        raise RecipeError(f"there is no grid '{name}'{nearest(name, sorted(grids))}: {', '.join(sorted(grids))}")
    return grids[name]


@lru_cache(1)
def _grids() -> dict[str, dict[str, Any]]:
    """Return every grid: that of ``table4`` in ``setdiv.yaml`` is named ``setdiv-table4``."""
    files = {path.stem: yaml.safe_load(path.read_text(encoding="utf-8")) for path in FOLDER.glob("*.yaml")}
    return {f"{paper}-{table}": grid for paper, grids in files.items() for table, grid in grids.items()}


def _grid_rows(name: str, recipe: str | Path | None) -> Iterator[_Row]:
    grid = read_grid(name)
    if recipe is not None and all("recipe" in cell for cell in grid["cells"]):
        raise RecipeError(f"grid '{name}' names a recipe for each of its cells: leave --recipe out")
    for cell in grid["cells"]:
        known = recipe is None or "recipe" in cell
        paper = {row: _paper(values) for row, values in cell.get("paper", {}).items()} if known else {}
        folder = re.sub(r"[^a-z0-9.=]+", "-", cell["label"].lower()).strip("-")
        used = cell.get("recipe", recipe or grid.get("recipe"))
        yield folder, cell["label"], cell.get("set", {}), str(used), paper


def _paper(values: float | Mapping[str, Any]) -> dict[str, float]:
    """Return a cell's values by metric: a number alone is the RSUM."""
    if not isinstance(values, Mapping):
        return {"rsum": values}
    found: dict[str, float] = {}
    for key, value in values.items():
        named = zip(RECALLS, value, strict=False) if isinstance(value, list) else None
        found |= {key: value} if named is None else {f"{key} {recall}": number for recall, number in named}
    return found


def _varied_rows(recipe: str, vary: Mapping[str, Sequence[Any]]) -> Iterator[_Row]:
    axes = []
    for names, choices in vary.items():
        keys = [key.strip() for key in names.split(",")]
        axes.append([dict.fromkeys(keys, _plain(one)) for one in ([choices] if isinstance(choices, str) else choices)])
    for combination in itertools.product(*axes):
        own = {key: value for one in combination for key, value in one.items()}
        yield _folder(own), _label(own), own, recipe, {}


def _baseline(name: str, fixed: Mapping[str, Value], rows: Sequence[_Row], faults: list[str]) -> list[Variant]:
    """Return a recipe as it is, on every choice of feature sets in `rows`, but for those that it names itself."""
    recipe_file(name)  # a wrong name is a sentence alone
    try:
        data = load_recipe(name, fixed).data
    except RecipeError as error:
        faults += [f"baseline '{name}': {fault}" for fault in faults_of(error)]
        return []
    free = [key for key, own in (("data.image", data.image), ("data.text", data.text)) if own == "auto"]
    found: dict[str, _Row] = {}
    for _, _, values, _, _ in rows:
        sets = {key: values[key] for key in free if key in values}
        label = f"{name}, {_label(sets)}" if sets else name
        found[label] = _folder({"baseline": name} | sets), label, sets, name, {}
    return [replace(variant, baseline=True) for variant in _resolved(list(found.values()), fixed, faults)]


def _resolved(rows: Sequence[_Row], fixed: Mapping[str, Value], faults: list[str]) -> list[Variant]:
    variants = []
    for name, label, values, recipe, paper in rows:
        recipe_file(recipe)  # a wrong name is a sentence alone
        try:
            found = load_recipe(recipe, {**fixed, **normalised(values)})
            variants.append(Variant(name, label, values, found, paper))
        except RecipeError as error:
            faults += faults_of(error)
    return variants


def _put_paper(variants: Sequence[Variant], recipe: str) -> None:
    """Put the paper's RSUM beside the variant that is the recipe itself."""

    def learnt(recipe: Recipe) -> dict[str, Any]:
        return {key: value for key, value in recipe.flat().items() if role(key) == "learnt"}

    with suppress(RecipeError):  # a file may be a recipe with the settings only
        own = load_recipe(recipe)
        for variant in variants:
            if learnt(variant.recipe) == learnt(own):
                variant.paper.update({row: {"rsum": rsum} for row, rsum in own.expected.items()})


def _plain(value: Any) -> Value:
    """Return a value as all its spellings have it: 1e-3 and 0.001, 1 and 1.0, [a,b] and ["a", "b"]."""
    if isinstance(value, list | tuple) or str(value).startswith("["):
        items = value if isinstance(value, list | tuple) else value.strip("[]").split(",")
        return as_text([str(item).strip(" '\"") for item in items])
    found: Value = value_of(value)
    return int(found) if isinstance(found, float) and found.is_integer() else found


def _folder(values: Mapping[str, Value]) -> str:
    """Return a folder's name for varied values: readable, safe, and another one for other values."""
    name = ",".join(f"{quote(key, safe='')}={quote(as_text(value), safe='')}" for key, value in values.items())
    return name if len(name) <= LONGEST else sha256(name.encode()).hexdigest()


def _label(values: Mapping[str, Value]) -> str:
    return ", ".join(f"{key}={as_text(value)}" for key, value in values.items())
