"""``xret recipes``: what can be trained."""

import re
from collections.abc import Iterator, Mapping
from contextlib import suppress
from itertools import takewhile
from textwrap import wrap
from typing import Any

import click

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

    texts = [layer.text for layer in lineage(name)]  # before torch is imported
    from ..heads.model import feature_facts, fitted
    from ..heads.recipes.recipe import load_recipe
    from ..heads.runs.features import sets_named
    from ..pipeline.store import FeatureCache

    recipe = load_recipe(name, settings)
    if store is not None:
        sets = sets_named(FeatureCache.open(store), recipe.data.image, recipe.data.text)
        recipe = fitted(recipe, *map(feature_facts, sets))
    sources: dict[str, str] = {}
    for text in reversed(texts):  # what a variant says overrides what its base says
        sources = {key: one for key, one in sources.items() if not key.startswith("expected.")} | _sources(text)
    head = takewhile(lambda line: line.startswith("#"), texts[0].splitlines())
    values = recipe.to_dict()
    show(values, [*head, *_lines(values, {key: source for key, source in sources.items() if key not in settings})])


def _sources(text: str) -> dict[str, str]:
    """Return the comment after each key of a file that is indented by two spaces, by the key's dotted path.

    Where a key takes the values of an anchor, it takes their comments, too. That of a block on a line is of its values.
    """
    import yaml

    from ..heads.recipes.schema import flat

    sources: dict[str, str] = {}
    anchors: dict[str, str] = {}
    path: list[str] = []
    for line in text.splitlines():
        if found := re.match(r'((?:  )*)"?([\w-]+|<<)"?:\s*(?:([&*])([^\s,\]}]+))?', line):
            path[len(found[1]) // 2 :] = [found[2]]
            key, comment = ".".join(path).removesuffix(".<<"), line.partition(" #")[2].strip()
            if found[3] == "*" and (before := anchors.get(found[4])):
                taken = {one: source for one, source in sources.items() if one.startswith(f"{before}.")}
                sources |= {f"{key}{one.removeprefix(before)}": source for one, source in taken.items()}
                comment = comment or ("" if taken else sources[before])
            if found[2] != "<<":
                sources[key] = comment
            if found[3] == "&":
                anchors[found[4]] = key
            if line[found.end() :].startswith("{"):
                with suppress(yaml.YAMLError):  # it has an alias, or goes on in the next line
                    within = flat(yaml.safe_load(line.strip())[found[2]])
                    sources |= {f"{key}.{inner}": comment for inner in within} | {key: ""}
    return sources


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
