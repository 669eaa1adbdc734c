"""Recipes: a YAML file says which parts make a head and with which values it is trained.

The parts are the entries of the registries (`ADAPTERS`, `AGGREGATORS`, `SIMILARITIES`, `LOSSES`); the parameters of
a part are those arguments of its constructor that have a default, checked against their type annotations. A resolved
recipe has every parameter written out. No part ever sees a recipe: `model.build_model` hands over plain arguments.
"""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

import torch
import yaml

from ..pipeline.errors import RecipeError, nearest
from .adapters import ADAPTERS
from .aggregators import AGGREGATORS, Aggregated
from .losses import LOSSES
from .schema import REQUIRED, Field, Min, check, fields, get
from .similarity import SIMILARITIES

FOLDER = Path(__file__).parent / "recipes"
PARTS = {"aggregator.image": AGGREGATORS, "aggregator.text": AGGREGATORS, "similarity": SIMILARITIES}


@dataclass(frozen=True, kw_only=True)
class Data:
    """Which feature sets are read, and how samples are put into batches."""

    image: str = "auto"  # prefix of a feature set's name, or auto: the only one there
    text: str = "auto"
    unit: Literal["image", "caption"] = "image"  # image: a batch holds images with all their captions
    batch_size: Annotated[int, Min(2)] = 128  # in units


@dataclass(frozen=True, kw_only=True)
class Size:
    """How large the embedding is."""

    dim: Annotated[int, Min(1)] = 1024


@dataclass(frozen=True, kw_only=True)
class Optimizer:
    """AdamW and gradient clipping."""

    lr: Annotated[float, Min(0)] = 1e-3
    weight_decay: Annotated[float, Min(0)] = 0.0  # of matrices; biases and normalisations never decay
    clip: Annotated[float, Min(0)] | None = 2.0  # largest norm of the whole gradient
    aggregator_lr: Annotated[float, Min(0)] = 1.0  # times lr, for the parameters of both aggregators


@dataclass(frozen=True, kw_only=True)
class Schedule:
    """The learning rate of an epoch, constant within it."""

    name: Literal["cosine", "step"] = "cosine"  # cosine: from lr to 0 over all epochs
    epochs: Annotated[int, Min(1)] = 30
    step: Annotated[int, Min(1)] = 10  # step only: every so many epochs …
    gamma: Annotated[float, Min(0)] = 0.1  # … lr is multiplied by this


@dataclass(frozen=True, kw_only=True)
class Runtime:
    """How it is computed. `auto` precision: bfloat16 (or float16) on a GPU, float32 on a CPU."""

    precision: Literal["auto", "float32", "bfloat16", "float16"] = "auto"


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """A resolved recipe: every block is complete, every value has been checked.

    `adapter` has one block for each kind of feature set; the kinds of the sets in use pick two of them. `loss` has
    one block for each term that is computed.
    """

    name: str
    paper: str
    reaches: Literal["cache", "finetune"]  # can the paper's row come from frozen features?
    data: Data
    model: Size
    adapter: dict[str, dict[str, Any]]
    aggregator: dict[str, dict[str, Any]]
    similarity: dict[str, Any]
    loss: dict[str, dict[str, Any]]
    optimizer: Optimizer
    schedule: Schedule
    runtime: Runtime

    def to_dict(self) -> dict[str, Any]:
        """Return the recipe as plain nested values, fit for YAML and JSON."""
        return asdict(self)


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
    raise RecipeError(
        f"there is no recipe '{recipe}'{nearest(recipe, names)}: "
        f"give the path of a YAML file or one of {', '.join(names)}"
    )


def load_recipe(recipe: str, settings: Sequence[str] = ()) -> Recipe:
    """Read a recipe, change it by ``KEY=VALUE`` settings, and resolve it.

    A setting of a part's block is one of its name: ``aggregator.image=average``. Another name puts the part's other
    parameters back to that part's defaults; all names are set before all other keys, in whatever order they come.

    Args:
        recipe: a bundled name (``setdiv``) or the path of a YAML file.
        settings: dotted keys with values, such as ``loss.triplet.margin=0.1``.

    Raises:
        RecipeError: unknown keys and wrong values, of the file and of the settings, all of them at once.
    """
    file = recipe_file(recipe)
    try:
        values = yaml.safe_load(file.read_text(encoding="utf-8"))
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise RecipeError(f"recipe {file} is not valid YAML: {' '.join(str(error).split())}") from error
    if not isinstance(values, dict):
        raise RecipeError(f"recipe {file} must be a mapping with the keys {', '.join(_schema({}))}")
    faults = _apply(values, settings)
    return resolve(values, faults=faults, title=f"recipe '{recipe}'")


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
        complete["loss"] = {term: block for term, block in complete["loss"].items() if block["weight"] > 0}
        found += _try_parts(complete) + _check_embeddings(complete)
    if found:
        raise RecipeError(f"{title} cannot be used: {'; '.join(found)}")
    sections = {"data": Data, "model": Size, "optimizer": Optimizer, "schedule": Schedule, "runtime": Runtime}
    return Recipe(**{key: sections[key](**v) if key in sections else v for key, v in complete.items()})


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
        "data": fields(Data),
        "model": fields(Size),
        "adapter": {kind: fields(adapter) for kind, adapter in ADAPTERS.items()},
        "aggregator": {side: _part(values, f"aggregator.{side}") for side in ("image", "text")},
        "similarity": _part(values, "similarity"),
        "loss": {
            term: {"weight": Field(Annotated[float, Min(0)], 1.0 if term in named else 0.0), **fields(loss)}
            for term, loss in LOSSES.items()
        },
        "optimizer": fields(Optimizer),
        "schedule": fields(Schedule),
        "runtime": fields(Runtime),
    }


def _part(values: Mapping[str, Any], path: str) -> dict[str, Any]:
    name = get(values, f"{path}.name")
    registry = PARTS[path]
    parameters = fields(registry[name]) if isinstance(name, str) and name in registry else {}
    return {"name": Field(Literal[tuple(registry)], REQUIRED), **parameters}


# ---- settings ----


def _apply(values: dict[str, Any], settings: Sequence[str]) -> list[str]:
    """Write the settings into `values`; return what is wrong with those that could not be written."""
    faults, pairs = [], []
    for setting in settings:
        key, equals, value = setting.partition("=")
        if equals and key.strip(". "):
            key = key.strip()
            pairs.append((f"{key}.name" if key in PARTS or key == "schedule" else key, value.strip()))
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
    """Make every part once, without memory for its weights, so that its own checks speak now."""
    dim = values["model"]["dim"]
    parts: list[tuple[str, Any, Mapping[str, Any], tuple[int, ...]]] = [
        (f"aggregator.{side}", AGGREGATORS[block["name"]], block, (dim, dim))
        for side, block in values["aggregator"].items()
    ]
    parts += [("similarity", SIMILARITIES[values["similarity"]["name"]], values["similarity"], ())]
    parts += [(f"loss.{term}", LOSSES[term], block, ()) for term, block in values["loss"].items()]
    sides = [AGGREGATORS[block["name"]].embedding == "set" for block in values["aggregator"].values()]
    images, captions = (_two_samples(is_set) for is_set in sides)
    faults = [] if values["loss"] else ["loss needs at least one term with a weight above 0"]
    for path, part, block, sizes in parts:
        try:
            with torch.device("meta"):
                made = part(*sizes, **arguments(block))
            if path.startswith("loss."):  # does it get what it needs from these aggregators?
                made.to_empty(device="cpu")(torch.eye(2), torch.eye(2) > 0, images, captions)
        except (ValueError, RuntimeError) as error:  # RuntimeError: torch cannot count so many weights
            faults.append(f"{path}: {error}")
    return faults


def _two_samples(is_set: bool) -> Aggregated:
    zeros = torch.zeros((2, 2, 1) if is_set else (2, 1))
    return Aggregated(zeros, slots=zeros if is_set else None)


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
