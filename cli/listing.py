"""``xret list``: what there is to choose from, and when to take it."""

from pkgutil import resolve_name

import click

from ..heads.recipes.names import when_to_take
from .parsing import show

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
    show(entries, [f"{name:{width}}  {when}" for name, when in entries.items()])
