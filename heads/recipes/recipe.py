"""Recipes: a YAML file says which parts make a head and with which values it is trained.

The parts are the entries of the registries (`ADAPTERS`, `AGGREGATORS`, `SIMILARITIES`, `LOSSES`); the parameters of
a part are those arguments of its constructor that have a default, checked against their type annotations. A resolved
recipe has every parameter written out. No part ever sees a recipe: `model.build_model` hands over plain arguments.
"""

import difflib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal

import torch
import yaml

from ...pipeline.errors import RecipeError
from ..modules.adapters import ADAPTERS
from ..modules.aggregators import AGGREGATORS
from ..modules.embedding import Sequence as Sequence_
from ..modules.losses import LOSSES
from ..modules.similarity import SIMILARITIES
from .blocks import SECTIONS, Data, Expected, Recipe, Size
from .schema import REQUIRED, Field, Min, check, fields, get, takes

FOLDER = Path(__file__).parent / "systems"
PARTS = {"aggregator.image": AGGREGATORS, "aggregator.text": AGGREGATORS, "similarity": SIMILARITIES}
_RUN_UP_TO = 1 << 14  # width up to which the check lets samples run through the parts
_LOSS_KEYS = {"exclude_same_text": Field(bool, False)}  # of the block `loss`, beside its terms


def recipe_names() -> list[str]:
    """Return the names of the bundled recipes; a folder's recipes are named ``folder/name``."""
    return sorted(path.relative_to(FOLDER).with_suffix("").as_posix() for path in FOLDER.rglob("*.yaml"))


def recipe_file(recipe: str) -> Path:
    """Return the YAML file of a bundled recipe's name, or of a path.

    Raises:
        RecipeError: there is neither such a recipe nor such a file.
    """
    names = recipe_names()
    if recipe in names:
        return FOLDER / f"{recipe}.yaml"
    if Path(recipe).is_file():
        return Path(recipe)
    near = [f"'{name}'" for name in difflib.get_close_matches(recipe, names)]
    hint = f" (did you mean {', '.join(near[:-1])}{' or ' if near[1:] else ''}{near[-1]}?)" if near else ""
    raise RecipeError(f"there is no recipe '{recipe}'{hint}; take one that `xret recipes` lists, or a YAML file's path")


def load_recipe(recipe: str, settings: Sequence[str] = ()) -> Recipe:
    """Read a recipe, change it by ``KEY=VALUE`` settings, and resolve it.

    A file may name another recipe as its ``base``, by name or by a path from where it lies or from here, and then
    holds only what differs.

    A setting of a part's block is one of its name: ``aggregator.image=average``. Another name puts the part's other
    parameters back to that part's defaults; all names are set before all other keys, in whatever order they come.

    Args:
        recipe: a bundled name (``setdiv``) or the path of a YAML file.
        settings: dotted keys with values, such as ``loss.triplet.margin=0.1``.

    Raises:
        RecipeError: unknown keys and wrong values, of the file and of the settings, all of them at once.
    """
    values = _read(recipe_file(recipe))
    faults = _apply(values, settings)
    # Not in `resolve`, which reads the recipes of runs too: those that were trained so stay readable.
    if get(values, "data.unit") == "caption" and str(get(values, "data.captions")).lower() not in ("none", "null"):
        faults.append("data.captions has no effect on batches of captions: set data.unit=image, or data.captions=null")
    return resolve(values, faults=faults, title=f"recipe '{recipe}'")


def _read(file: Path, below: tuple[Path, ...] = ()) -> dict[str, Any]:
    """Return a file's values, laid over those of the recipe that it names as its base."""
    try:
        values = yaml.safe_load(file.read_text(encoding="utf-8"))
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise RecipeError(f"recipe {file} is not valid YAML: {' '.join(str(error).split())}") from error
    if not isinstance(values, dict):
        raise RecipeError(f"recipe {file} must be a mapping with the keys {', '.join(_schema({}))}")
    base = values.pop("base", None)
    if base is None:
        return values
    if not isinstance(base, str) or file in below:
        raise RecipeError(f"recipe {file}: base must be the name or path of another recipe, not {base!r}")
    beside = file.parent / base
    return _laid_over(values, _read(beside if beside.is_file() else recipe_file(base), (*below, file)))


def _laid_over(values: Mapping[str, Any], base: Mapping[str, Any], path: str = "") -> dict[str, Any]:
    """Return `base` with `values` over it; a part of another name keeps nothing of the base's parameters."""
    merged = dict(base)
    for key, value in values.items():
        inner, below = f"{path}{key}", base.get(key)
        if not (isinstance(value, Mapping) and isinstance(below, Mapping)):
            merged[key] = value
        elif inner in PARTS and value.get("name", below.get("name")) != below.get("name"):
            merged[key] = dict(value)
        else:
            merged[key] = _laid_over(value, below, f"{inner}.")
    return merged


def resolve(values: Mapping[str, Any], *, faults: Sequence[str] = (), title: str = "the recipe") -> Recipe:
    """Check nested values against the parts' parameters and write out every default.

    Args:
        values: as read from YAML or JSON.
        faults: what was already found wrong; reported together with the rest.
        title: how an error message begins.

    Raises:
        RecipeError: naming every fault.
    """
    found = list(faults)
    schema = _schema(values)
    complete = check(values, schema, found)
    if not found:
        block = complete["loss"]
        complete["loss"] = {key: value for key, value in block.items() if key in _LOSS_KEYS or value["weight"] > 0}
        found += _try_parts(complete)
    if found:
        raise RecipeError(f"{title} cannot be used: {'; '.join(found)}")
    return Recipe(**{key: SECTIONS[key](**v) if key in SECTIONS else v for key, v in complete.items()})


def arguments(block: Mapping[str, Any]) -> dict[str, Any]:
    """Return a part's block as keyword arguments of its constructor (``global`` becomes ``global_``)."""
    values = {key: value for key, value in block.items() if key not in ("name", "weight")}
    return {f"{key}_" if key == "global" else key: value for key, value in values.items()}


# ---- what a recipe may say ----


def _schema(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return the keys a recipe may have, nested; which parts `values` names decides their parameters."""
    terms = get(values, "loss")
    named = terms if isinstance(terms, Mapping) else {}
    return {
        "name": Field(str, REQUIRED),
        "paper": Field(str, ""),
        "reaches": Field(Literal["cache", "finetune"], "cache"),
        "expected": fields(Expected),
        "data": fields(Data),
        "model": fields(Size),
        "adapter": {kind: fields(adapter) for kind, adapter in ADAPTERS.items()},
        "aggregator": {side: _part(values, f"aggregator.{side}") for side in ("image", "text")},
        "similarity": _part(values, "similarity"),
        "loss": {
            **_LOSS_KEYS,
            **{
                term: {"weight": Field(Annotated[float, Min(0)], 1.0 if term in named else 0.0), **fields(loss)}
                for term, loss in LOSSES.items()
            },
        },
        **{key: fields(section) for key, section in SECTIONS.items() if key not in ("expected", "data", "model")},
    }


def _part(values: Mapping[str, Any], path: str) -> dict[str, Any]:
    name = get(values, f"{path}.name")
    registry = PARTS[path]
    parameters = fields(registry[name]) if isinstance(name, str) and name in registry else {}
    return {"name": Field(Literal[tuple(registry)], REQUIRED), **parameters}


# ---- settings ----


def full_key(key: str) -> str:
    """Return the key of a setting; that of a part's block stands for the part's name."""
    return f"{key}.name" if key in PARTS or key == "schedule" else key


def _apply(values: dict[str, Any], settings: Sequence[str]) -> list[str]:
    """Write the settings into `values`; return what is wrong with those that could not be written."""
    faults, pairs = [], []
    for setting in settings:
        key, equals, value = setting.partition("=")
        if equals and key.strip(". "):
            key = key.strip()
            pairs.append((full_key(key), value.strip()))
        else:
            faults.append(f"--set '{setting}' must have the form KEY=VALUE, such as optimizer.lr=0.001")
    named = [f"{path}.name" for path in PARTS]
    for key, value in sorted(pairs, key=lambda pair: pair[0] not in named):  # a stable sort: names first
        *blocks, last = key.split(".")
        block: Any = values
        for depth, step in enumerate(blocks):
            if block.get(step) is None:
                block[step] = {}
            if not isinstance(block[step], dict):
                faults.append(f"{key} cannot be set: {'.'.join(blocks[: depth + 1])} is a single value")
                break
            block = block[step]
        else:
            if key in named and block.get("name") != value:
                block.clear()
            if isinstance(block.get(last), dict):
                keys = ", ".join(f"{key}.{inner}" for inner in block[last])
                faults.append(f"{key} is a block and cannot be '{value}': set {keys}")
            else:
                block[last] = value
    return faults


# ---- checks that need the parts themselves ----


def _try_parts(values: Mapping[str, Any]) -> list[str]:
    """Make every part once and let two samples run through, so that the parts' own checks speak now."""
    dim, faults = values["model"]["dim"], []
    terms = {term: block for term, block in values["loss"].items() if term not in _LOSS_KEYS}
    if not terms:
        faults.append("loss needs at least one term with a weight above 0")

    def attempt(path: str, part: Any, block: Mapping[str, Any], sizes: tuple[int, ...], *inputs: Any) -> Any:
        try:
            with torch.device("meta"):  # without memory for its weights
                made = part(*sizes, **arguments(block))
            if not inputs or dim > _RUN_UP_TO:
                return None
            made.to_empty(device="cpu")
            for values in (*made.parameters(), *made.buffers()):
                values.zero_()  # whatever the memory held, scipy's matching refuses what is not finite
            return made(*inputs)
        except (ValueError, RuntimeError) as error:  # RuntimeError: torch cannot count so many weights
            faults.append(f"{path}: {str(error).partition(chr(10))[0]}")
            return None

    width = min(dim, _RUN_UP_TO)
    samples = torch.zeros(2, 2, width), torch.tensor([2, 1]), torch.zeros(2, width)
    similarity = SIMILARITIES[values["similarity"]["name"]]
    with torch.no_grad():
        sides = [
            attempt(f"aggregator.{side}", AGGREGATORS[block["name"]], block, (dim, dim), *samples)
            for side, block in values["aggregator"].items()
        ]
        mismatch = _check_embeddings(values)
        pair: tuple[Any, ...] = ()
        if None not in sides:
            images, captions = (side._replace(global_=samples[2]) for side in sides)
            pair = images, captions._replace(token=Sequence_(torch.zeros(2, 2, dtype=torch.long), samples[1]))
        embeddings = () if mismatch else tuple(side.embedding for side in pair)
        attempt("similarity", similarity, values["similarity"], (), *embeddings)
        for term, block in terms.items():
            if hasattr(LOSSES[term], "log_odds") and not hasattr(similarity, "log_odds"):
                found = [name for name, part in SIMILARITIES.items() if hasattr(part, "log_odds")]
                faults.append(f"loss.{term} needs a similarity that gives log-odds: {', '.join(found)}")
            sizes = (dim, 2) if takes(LOSSES[term], "vocabulary_size") else ()
            attempt(
                f"loss.{term}", LOSSES[term], block, sizes, *((torch.eye(2), torch.eye(2) > 0, *pair) if pair else ())
            )
    return [*faults, *mismatch]


def _check_embeddings(values: Mapping[str, Any]) -> list[str]:
    """Both aggregators must give the type of embedding that the similarity compares."""
    name = values["similarity"]["name"]
    wanted = SIMILARITIES[name].embedding
    fitting = [key for key, part in AGGREGATORS.items() if part.embedding == wanted]
    return [
        f"aggregator.{side} '{block['name']}' gives a {AGGREGATORS[block['name']].embedding} and similarity '{name}' "
        f"compares {wanted}s (take one of {', '.join(fitting)}, or another similarity)"
        for side, block in values["aggregator"].items()
        if AGGREGATORS[block["name"]].embedding != wanted
    ]
