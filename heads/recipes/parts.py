"""Check the parts of a recipe: each is made once, and two samples run through them."""

import json
from collections.abc import Mapping
from functools import lru_cache
from typing import Any

import torch

from ...pipeline.device import drawing
from ...pipeline.wording import reason
from ..modules.aggregators import AGGREGATORS, Aggregated
from ..modules.embedding import Sequence
from ..modules.losses import LOSSES
from ..modules.similarity import SIMILARITIES
from .blocks import Block, arguments
from .schema import takes


@torch.no_grad()
def check_parts(dim: int, aggregator: Mapping[str, Block], similarity: Block, terms: Mapping[str, Block]) -> list[str]:
    """Return what the parts of a recipe refuse, and which of them do not go together.

    Args:
        dim: width of the embedding.
        aggregator: the complete block of each side, first ``image``, then ``text``.
        similarity: its complete block.
        terms: the complete block of each loss term.
    """
    with drawing(torch.device("cpu"), 0):  # a part may draw
        return _check_parts(dim, aggregator, similarity, terms)


def _check_parts(dim: int, aggregator: Mapping[str, Block], similarity: Block, terms: Mapping[str, Block]) -> list[str]:
    mismatches = _mismatches(aggregator, similarity["name"])
    pair, refused = _aggregated(dim, json.dumps(aggregator))
    faults = list(refused)
    embeddings = tuple(made.embedding for made in pair) if pair and not mismatches else None
    _try("similarity", SIMILARITIES[similarity["name"]], similarity, (), embeddings, faults)
    for term, block in terms.items():
        sizes = (dim, 2) if takes(LOSSES[term], "vocabulary_size") else ()
        _try(f"loss.{term}", LOSSES[term], block, sizes, pair and (torch.eye(2), torch.eye(2) > 0, *pair), faults)
    if not terms:
        faults.append("loss needs at least one term with a weight above 0")
    return [*faults, *_without_log_odds(terms, similarity["name"]), *mismatches]


@lru_cache(8)  # recipes of a tuning or an ablation differ in other values as well
def _aggregated(dim: int, aggregator: str) -> tuple[tuple[Aggregated, ...] | None, tuple[str, ...]]:
    """Return what the aggregators make of two samples of zeros, the first a 2 by 2 map; None if one is refused.

    Then also why. `aggregator` is the JSON of their blocks.
    """
    faults: list[str] = []
    samples = torch.zeros(2, 4, dim), torch.tensor([4, 1]), torch.zeros(2, dim)
    pair = [
        _try(f"aggregator.{side}", AGGREGATORS[block["name"]], block, (dim, dim), samples, faults)
        for side, block in json.loads(aggregator).items()
    ]
    if None in pair:
        return None, tuple(faults)
    token = Sequence(torch.zeros(2, 4, dtype=torch.long), samples[1])
    return tuple(made._replace(global_=samples[2], token=token) for made in pair), ()


def _try(
    path: str, part: type, block: Block, sizes: tuple[int, ...], inputs: tuple[Any, ...] | None, faults: list[str]
) -> Any:
    """Make a part and, where there are `inputs`, call it; return what it gives, or None and a fault."""
    try:
        with torch.device("meta"):  # without memory for its weights
            made = part(*sizes, **arguments(block))
        if inputs is None:
            return None
        made.to_empty(device="cpu")
        for values in (*made.parameters(), *made.buffers()):
            values.zero_()  # whatever the memory held, scipy's matching refuses what is not finite
        return made(*inputs)
    except (ValueError, RuntimeError) as error:  # RuntimeError: more weights than memory holds
        faults.append(f"{path}: {reason(error)}")
        return None


def _mismatches(aggregator: Mapping[str, Block], similarity: str) -> list[str]:
    """Both aggregators must give the type of embedding that the similarity compares."""
    wanted = SIMILARITIES[similarity].embedding
    fitting = [name for name, part in AGGREGATORS.items() if part.embedding == wanted]
    given = {side: (block["name"], AGGREGATORS[block["name"]].embedding) for side, block in aggregator.items()}
    return [
        f"aggregator.{side} '{name}' gives a {embedding} and similarity '{similarity}' compares {wanted}s "
        f"(take one of {', '.join(fitting)}, or another similarity)"
        for side, (name, embedding) in given.items()
        if embedding != wanted
    ]


def _without_log_odds(terms: Mapping[str, Block], similarity: str) -> list[str]:
    """Some losses need a similarity that gives log-odds."""
    fitting = [name for name, part in SIMILARITIES.items() if hasattr(part, "log_odds")]
    return [
        f"loss.{term} needs a similarity that gives log-odds: {', '.join(fitting)}"
        for term in terms
        if hasattr(LOSSES[term], "log_odds") and similarity not in fitting
    ]
