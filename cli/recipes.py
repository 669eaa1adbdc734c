"""``xret recipes`` and ``xret list``: what can be trained, and what there is to choose from."""

import re
from collections.abc import Iterator, Mapping
from itertools import takewhile
from pathlib import Path
from pkgutil import resolve_name
from textwrap import wrap
from typing import Any

import click

from ..heads.recipes.names import when_to_take
from .parsing import RECIPE, STORE, settings_option, show


@click.group(invoke_without_command=True)
@click.pass_context
def recipes(context: click.Context) -> None:
    """List the bundled recipes with the RSUM of their paper's row.

    A variant is listed below its system, as /DATA-BACKBONE, and named SYSTEM/DATA-BACKBONE; it holds the paper's values
    for that backbone.
    "cache": frozen features can reach the row; "finetune": its backbones are trained as well.

    \b
    xret recipes
    xret recipes show setdiv/f30k-butd-bigru
    """
    if context.invoked_subcommand is not None:
        return
    from ..heads.evaluation.paper_rows import ROWS
    from ..heads.recipes.names import headlines

    known = headlines()
    names = {recipe["name"]: re.sub("^.*/", "  /", recipe["name"]) for recipe in known}
    width = max(map(len, names.values()))
    rows = [name for name, row in ROWS.items() if row.images is not None]  # that recipes expect a value of
    lines = [f"{'RSUM of the paper':{width}}{''.join(f'{ROWS[row].title:>9}' for row in rows)}  reaches"]
    for recipe in known:
        variant = "/" in recipe["name"]
        expected = [recipe["expected"].get(row) for row in rows]
        numbers = "".join(f"{'-' if rsum is None else format(rsum, 'g'):>9}" for rsum in expected)
        lines.append(f"{names[recipe['name']]:{width}}{numbers}  {recipe['reaches']}")
        if not variant:
            lines += wrap(recipe["paper"], 80, initial_indent="    ", subsequent_indent="    ")
    show(known, lines)


@recipes.command("show")
@click.argument("name", type=RECIPE, metavar="NAME|FILE")
@click.option("--for", "store", type=STORE, help="Show what counts for the features of this store alone.")
@settings_option("of the recipe")
def show_one(name: str, store: str | None, settings: dict[str, Any]) -> None:
    """Print a recipe with all values that count, and their sources.

    The output is a recipe file itself. A value without a source is the recipe's own, or a default of its part.

    \b
    xret recipes show setdiv --for rsicd.zarr
    xret recipes show setdiv > mine.yaml
    """
    from ..heads.recipes.names import lineage

    layers = lineage(name)  # before torch is imported
    from ..heads.model import feature_facts, fitted
    from ..heads.recipes.recipe import load_recipe
    from ..heads.runs.features import sets_named
    from ..pipeline.store import FeatureCache

    recipe = load_recipe(name, settings)
    if store is not None:
        sets = sets_named(FeatureCache.open(store), recipe.data.image, recipe.data.text)
        recipe = fitted(recipe, *map(feature_facts, sets))
    sources: dict[str, str] = {}
    for layer in reversed(layers):  # what a variant says overrides what its base says
        kept = {key: source for key, source in sources.items() if not key.startswith("expected.")}
        sources = kept | _sources(*layer.place)
    file, variant = layers[0].place
    lines = file.read_text(encoding="utf-8").splitlines()
    first = lines.index(f"  {variant}:") + 1 if variant else 0
    head = takewhile(lambda line: line.startswith("#"), map(str.strip, lines[first:]))
    values = recipe.to_dict()
    show(values, [*head, *_lines(values, {key: source for key, source in sources.items() if key not in settings})])


def _sources(file: Path, variant: str) -> dict[str, str]:
    """Return the comment beside each value of a recipe's file or its variant, by the key's dotted path.

    A value that an alias takes from elsewhere has the comment there, unless it has one of its own.
    """
    import yaml

    text = file.read_text(encoding="utf-8")
    lines = text.splitlines()

    def comment(node: yaml.Node) -> str:
        return lines[node.start_mark.line].partition(" #")[2].strip()

    def within(block: Any, path: str = "") -> Iterator[tuple[str, str]]:
        for key, value in block.value:
            inner = path if key.value == "<<" else f"{path}{key.value}."
            if not isinstance(value, yaml.MappingNode):
                yield inner[:-1], comment(key) or comment(value)
                continue
            if inner != path:
                yield inner[:-1], "" if value.flow_style else comment(key)  # that of a block on a line is of its values
            yield from within(value, inner)

    prefix = f"variants.{variant}."
    root = yaml.compose(text, yaml.SafeLoader)
    assert root is not None, "a recipe has keys"
    texts = dict(within(root))
    return {key.removeprefix(prefix): source for key, source in texts.items() if not variant or key.startswith(prefix)}


def _lines(values: Mapping[str, Any], sources: Mapping[str, str], path: tuple[str, ...] = ()) -> Iterator[str]:
    """Write nested values as YAML, each with its source."""
    import yaml

    for key, value in values.items():
        inner = (*path, key)
        block = isinstance(value, Mapping) and value
        on_a_line = "" if block else yaml.safe_dump(value, width=1000, default_flow_style=True)
        scalar = on_a_line.removesuffix("...\n").strip()
        text = f"{'  ' * len(path)}{yaml.safe_dump(key).split()[0]}: {scalar}".rstrip()
        source = sources.get(".".join(inner))
        yield f"{text:27}  # {source}" if source else text
        if block:
            yield from _lines(value, sources, inner)


PARTS = {  # by the registries in which they say when to take them
    "aggregators": "modules.aggregators:AGGREGATORS",
    "similarities": "modules.similarity:SIMILARITIES",
    "losses": "modules.losses:LOSSES",
    "adapters": "modules.adapters:ADAPTERS",
    "protocols": "evaluation.protocols:PROTOCOLS",
}


@click.command("list")
@click.argument("what", type=click.Choice(["encoders", "recipes", *PARTS]), metavar="WHAT")
def list_(what: str) -> None:
    """List what there is to choose from, and when to take it.

    WHAT is encoders, recipes, protocols, or parts of recipes: aggregators, similarities, losses or adapters.

    \b
    xret list recipes
    xret list aggregators
    """
    from ..pipeline.encoders.registry import listed

    if what in PARTS:
        entries = resolve_name(f"xret.heads.{PARTS[what]}").when
    else:
        entries = listed() if what == "encoders" else when_to_take()
    width = max(map(len, entries))
    indent, lines = " " * (width + 2), (f"{name:{width}}  {when}" for name, when in entries.items())
    show(entries, [part for line in lines for part in wrap(line, 80, subsequent_indent=indent)])
