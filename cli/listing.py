"""``xret list``: what there is to choose from, and when to take it."""

import click

from ..pipeline.encoders.registry import listed
from .parsing import show

PARTS = ("aggregators", "similarities", "losses", "adapters", "protocols")  # each says itself when to take it
# Names, with when to take each. A test holds them against the registries.
LISTS: dict[str, dict[str, str]] = {
    "encoders": listed(),
    "recipes": {
        "linear": "to see whether a system is worth it: a linear layer a side",
        "cca": "few pairs, or seconds to spend: linear maps in closed form",
        "mlp": "the baseline that a system has to beat: linear and a perceptron",
        "vsepp": "a first number, and the published system that trains fastest",
        "vse-infty": "one vector for any vector database; it learns how to pool",
        "setdiv": "for ambiguous pictures and captions: several answers are right",
        "setdiv-small": "setdiv for few training pictures: regularised as mlp is",
        "maxmatch": "the vectors of a set must stay apart",
        "pvse": "to compare with the first of the set embeddings",
        "pcmepp": "an uncertainty with each embedding",
        "pcme": "to compare with the first of the probabilistic ones",
        "gaussian-vsepp": "an uncertainty for a model of vectors",
        "gaussian-vsrn": "an uncertainty for regions that relate to each other",
        "vsrn": "for regions that relate to each other; its epochs take long",
        "scan": "to see which word looks where; by far the slowest to compare",
        "fusemix": "for pairs of strong global features, which it blends",
        "lit": "for very many pairs, where images keep their global features",
        "sail": "for very many pairs of strong global features",
    },
}


@click.command("list")
@click.argument("what", type=click.Choice([*LISTS, *PARTS]), metavar="WHAT")
def list_(what: str) -> None:
    """List what there is to choose from, and when to take it.

    WHAT is encoders, recipes, protocols, or parts of recipes: aggregators, similarities, losses or adapters.

    \b
    xret list recipes
    xret list aggregators
    """
    entries = LISTS[what] if what in LISTS else _parts()[what]
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
