"""``xret list``: what there is to choose from, and when to take it."""

import click

from ..heads.recipes.names import when_to_take
from .parsing import show

PARTS = ("aggregators", "similarities", "losses", "adapters", "protocols")  # each says itself when to take it


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

    entries = listed() if what == "encoders" else when_to_take() if what == "recipes" else _parts()[what]
    width = max(map(len, entries))
    show(entries, [f"{name:{width}}  {when}" for name, when in entries.items()])


def _parts() -> dict[str, dict[str, str]]:
    """Return the lines of the parts; this imports torch."""
    from ..heads.evaluation.protocols import PROTOCOLS
    from ..heads.modules.adapters import ADAPTERS
    from ..heads.modules.aggregators import AGGREGATORS
    from ..heads.modules.losses import LOSSES
    from ..heads.modules.similarity import SIMILARITIES

    registries = AGGREGATORS, SIMILARITIES, LOSSES, ADAPTERS, PROTOCOLS
    return dict(zip(PARTS, (registry.when for registry in registries), strict=True))
