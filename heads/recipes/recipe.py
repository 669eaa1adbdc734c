"""Recipes: a YAML file says which parts make a head and with which values it is trained.

The parts are the entries of the registries (`ADAPTERS`, `AGGREGATORS`, `SIMILARITIES`, `LOSSES`); the parameters of
a part are those arguments of its constructor that have a default, checked against their type annotations. A resolved
recipe has every parameter written out. No part ever sees a recipe: `model.build_model` hands over plain arguments.
"""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Annotated, Any, Literal

from ...pipeline.errors import RecipeError
from ..modules.adapters import ADAPTERS, KINDS
from ..modules.aggregators import AGGREGATORS
from ..modules.losses import LOSSES
from ..modules.parts import Registry, at_least
from ..modules.similarity import SIMILARITIES
from .blocks import SECTIONS, Data, Recipe, role
from .names import lineage
from .own import Sources, digest_of, known_sources, part_of, sources_of
from .schema import REQUIRED, Field, check, conditions_of, fields, flat, get
from .settings import Settings, nested
from .trial import check_parts

PARTS: dict[str, Registry[Any]] = {
    **{f"adapter.{kind}": ADAPTERS for kind in KINDS},
    "aggregator.image": AGGREGATORS,
    "aggregator.text": AGGREGATORS,
    "similarity": SIMILARITIES,
}
EXPECTED = ("coco_1k", "coco_5k", "f30k")  # of papers: COCO's mean of five folds, its 5,000 images, Flickr30K
_REFUSAL = " cannot be used: "  # what stands between what is refused and its faults
# Of the block `loss`, beside its terms: what another image's caption is that has the text of one of the image's own.
_LOSS_KEYS = {"same_text": Field(Literal["negative", "excluded", "positive"], "negative")}
# Checkpoints hold sums and the optimiser's state of the terms in this order, wherever these register; others follow.
_ORDER = (
    *("caption-generation", "distillation", "diversity", "triplet", "embedding-graph", "information-bottleneck"),
    *("uniformity", "infonce", "soft-contrastive", "matching-bce", "mmd", "global-discriminative"),
    *("intra-set-divergence", "sigmoid"),
)


def load_recipe(recipe: str, settings: Settings | Sequence[str] = (), trust: bool = False) -> Recipe:
    """Read a recipe, change it by settings, and resolve it.

    A file may name another recipe as its ``base``, by name or by a path from where it lies or from here, and then
    holds only what differs. Settings are dotted keys with values, such as ``{"loss.triplet.margin": 0.1}``; see
    `changed`. RecipeError names unknown keys and wrong values, of the file and of the settings, all of them at once;
    or code that a run's recipe brings along and that was not trained with here, unless `trust` lets it run.
    """
    values: dict[str, Any] = {}
    layers = lineage(recipe)
    for layer in reversed(layers):
        values = _laid_over(layer.values, {**values, "expected": {}})  # the paper's row is of one recipe alone
    folders = [layer.place[0].parent for layer in layers]
    if trust or not ("code" in values or any((folder / "run.json").exists() for folder in folders)):
        return _with(values, settings, recipe, folders=folders)
    sources = known_sources(recipe, own_names(values), folders, values.get("code") or {})
    return _with(values, settings, recipe, sources=sources)


def changed(recipe: Recipe, settings: Settings | Sequence[str]) -> Recipe:
    """Return a resolved recipe with settings, the same as if `load_recipe` had been given them too.

    A setting of a part's block is one of its name: ``aggregator.image``. Another name puts the part's other parameters
    back to that part's defaults. A setting of a loss does not add it, but for its weight. Errors as of `load_recipe`.
    """
    values = {key: value for key, value in asdict(recipe).items() if key not in ("code", "sources", "conditions")}
    return _with(values, settings, recipe.name, sources=recipe.sources)


def without_effect(settings: Settings, recipe: Recipe) -> dict[str, str]:
    """Return a warning for each setting that does not count in a recipe, which is fitted to its features, by key.

    A loss's weight is none of them: it may be what removed the term.
    """
    there, warnings = recipe.flat(), {}
    for key in flat(nested(settings)):
        block, _, last = key.rpartition(".")
        kind, _, part = block.partition(".")
        if not recipe.schedule.epochs and kind in ("optimizer", "loss", "augment"):
            warnings[key] = f"{key} changes nothing: schedule.epochs is 0"
            continue
        if key in there or role(key) == "described" or (kind == "loss" and last == "weight"):
            continue
        if kind == "loss" and part not in recipe.loss:
            why = f"the loss has no such term; {block}.weight adds it"
        elif kind == "adapter" and part not in recipe.adapter:
            why = "no feature set in use is of its kind"
        elif kind == "finetune":
            why = "finetune.image_lr and finetune.text_lr are 0"
        else:
            other = recipe.conditions[key][0]
            while other not in there:
                other = recipe.conditions[other][0]
            why = f"{other} is {there[other]}"
        warnings[key] = f"{key} changes nothing: {why}"
    return warnings


def _with(values: dict[str, Any], settings: Settings | Sequence[str], name: str, **where: Any) -> Recipe:
    """Lay settings over nested values and resolve them; `where` user-defined parts are, see `resolve`."""
    asked, title = nested(settings), f"recipe '{name}'"
    terms, known = asked.get("loss"), values.get("loss")
    if isinstance(terms, dict) and isinstance(known, Mapping | None):
        new = [term for term in terms if isinstance(terms[term], dict) and term not in (known or {})]
        asked["loss"] = {**terms, **{term: {"weight": 0.0, **terms[term]} for term in new}}
    recipe = resolve(_laid_over(asked, values), title=title, **where)
    # Not in `resolve`, which also reads the recipes of runs: those that were trained so stay readable.
    if found := _contradictions(recipe):
        raise refused(title, found)
    return recipe


def _laid_over(values: Mapping[str, Any], base: Mapping[str, Any], path: str = "") -> dict[str, Any]:
    """Return `base` with `values` over it; a part of another name keeps nothing of the base's parameters."""
    merged = dict(base)
    for key, value in values.items():
        inner, below = f"{path}{key}", base.get(key)
        if not isinstance(value, Mapping):
            merged[key] = value
            continue
        if not isinstance(below, Mapping | None):
            raise RecipeError(
                f"{inner} is a single value, {below!r}, and {inner}.{next(iter(value), '')} cannot be set"
            )
        below = below or {}
        named = below.get("name", KINDS.get(key))  # an adapter that is not named is its kind's
        if inner in PARTS and value.get("name", named) != named:
            below = {}
        merged[key] = _laid_over(value, below, f"{inner}.")
    return merged


def resolve(
    values: Mapping[str, Any],
    *,
    title: str = "the recipe",
    folders: Sequence[Path] = (),
    sources: Sources | None = None,
) -> Recipe:
    """Check nested values against the parts' parameters and write out every default; RecipeError with every fault.

    The error begins with `title`. Modules of user-defined parts are looked for in `folders` first, but for `sources`,
    which were found already.
    """
    faults: list[str] = []
    values = {key: value for key, value in values.items() if key != "code"}
    try:
        found = sources_of(own_names(values), folders, sources or {})
        schema = _schema(values, found)
    except RecipeError as error:  # of a user-defined part: what its block may hold is not known
        raise refused(title, [str(error)]) from error
    complete = check(values, schema, faults)
    if not faults:
        same_text = {key: complete["loss"].pop(key) for key in _LOSS_KEYS}
        terms = {term: block for term, block in complete["loss"].items() if block["weight"] > 0}
        complete["loss"] = same_text | terms
        faults = check_parts(complete["model"]["dim"], complete["aggregator"], complete["similarity"], terms, found)
    if faults:
        raise refused(title, faults)
    complete["expected"] = {row: rsum for row, rsum in complete["expected"].items() if rsum is not None}
    made = {key: SECTIONS[key](**v) if key in SECTIONS else v for key, v in complete.items()}
    return with_kinds(Recipe(**made, sources=found, conditions=conditions_of(schema)), made["data"])


def with_kinds(recipe: Recipe, data: Data) -> Recipe:
    """Return a recipe with these `data`, and without the adapters of kinds that they do not admit."""
    image, text = ({block_of(side, kind) for kind in data.kinds(side)} for side in ("image", "text"))
    any_kind = not (image and text)
    adapter = {kind: block for kind, block in recipe.adapter.items() if any_kind or kind in image | text}
    recipe = replace(recipe, data=data, adapter=adapter)
    needed = {name.partition(":")[0] for name in own_names(recipe.to_dict())}
    sources = {module: file for module, file in recipe.sources.items() if module in needed}
    return replace(recipe, sources=sources, code={module: digest_of(module, file) for module, file in sources.items()})


def block_of(side: str, kind: str) -> str:
    """Return the kind whose block of ``adapter`` counts: their own, and for global features alone grid or tokens."""
    return kind if kind != "global" else "grid" if side == "image" else "tokens"


def refused(title: str, faults: Sequence[str]) -> RecipeError:
    """Return the error of what cannot be used, with each fault once."""
    return RecipeError(f"{title}{_REFUSAL}{'; '.join(dict.fromkeys(faults))}")


def faults_of(error: RecipeError) -> list[str]:
    """Return the faults that an error lists, or its sentence."""
    return (str(error).partition(_REFUSAL)[2] or str(error)).split("; ")


def _contradictions(recipe: Recipe) -> list[str]:
    """Return what is wrong with values that fit, each alone, and not together."""
    data, optimizer, faults = recipe.data, recipe.optimizer, []
    if optimizer.ema is not None and optimizer.swa_epochs:
        faults.append("optimizer.ema and optimizer.swa_epochs are two averages of the weights; choose one")
    if not recipe.schedule.epochs and recipe.model.residual == "none":
        faults.append("schedule.epochs must be at least 1, or model.residual be what is evaluated without a training")
    if recipe.augment.mix and (data.unit, data.captions) != ("image", 1):
        faults.append("augment.mix blends pairs: set data.unit=image and data.captions=1, or augment.mix=0")
    if recipe.augment.mix and recipe.loss["same_text"] != "negative":
        faults.append("augment.mix makes captions that have no text of their own: set loss.same_text=negative")
    return faults


def own_names(values: Mapping[str, Any]) -> list[str]:
    """Return the names of user-defined parts."""
    terms = get(values, "loss")
    named = [*(get(values, f"{path}.name") for path in PARTS), *(terms if isinstance(terms, Mapping) else ())]
    return [name for name in named if isinstance(name, str) and ":" in name]


def _schema(values: Mapping[str, Any], sources: Sources) -> dict[str, Any]:
    """Return the keys a recipe may have, nested; which parts `values` names decides their parameters."""
    named = get(values, "loss")
    named = named if isinstance(named, Mapping) else {}
    terms = {
        term: {
            "weight": Field(Annotated[float, at_least(0)], 1.0 if term in named else 0.0),
            **_parameters(LOSSES, "loss", term, sources),
        }
        for term in (*_ORDER, *sorted(LOSSES.keys() - {*_ORDER}), *(term for term in named if ":" in str(term)))
    }
    return {
        "name": Field(str, REQUIRED),
        "paper": Field(str, ""),
        "reaches": Field(Literal["cache", "finetune"], "cache"),
        "expected": {row: Field(float | None, None) for row in EXPECTED},
        **{key: fields(section) for key, section in SECTIONS.items()},  # type: ignore[arg-type] # a class is hashable
        "adapter": {kind: _part(values, f"adapter.{kind}", sources, name) for kind, name in KINDS.items()},
        "aggregator": {side: _part(values, f"aggregator.{side}", sources) for side in ("image", "text")},
        "similarity": _part(values, "similarity", sources),
        "loss": {**_LOSS_KEYS, **terms},
    }


def _part(values: Mapping[str, Any], path: str, sources: Sources, default: Any = REQUIRED) -> dict[str, Any]:
    """Return the keys of the block of a part: its name, and its parameters, where there is such a part."""
    name, registry = get(values, f"{path}.name") or default, PARTS[path]
    bundled = registry if default is REQUIRED else (default,)  # an adapter of another kind reads other features
    own = [name] if isinstance(name, str) and ":" in name else []
    there = own or (isinstance(name, str) and name in bundled)
    parameters = _parameters(registry, path, name, sources) if there else {}
    return {"name": Field(Literal[(*bundled, *own)], default), **parameters}


def _parameters(registry: Registry[Any], path: str, name: str, sources: Sources) -> Mapping[str, Field]:
    try:
        return fields(part_of(registry, name, sources))  # type: ignore[arg-type] # likewise
    except ValueError as error:
        raise RecipeError(f"{path} '{name}': {error}") from error
