"""Check the parts of a recipe: each is made once, and two samples run through them."""

import json
from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache, partial
from typing import Any

import torch

from ...pipeline.device import drawing
from ...pipeline.wording import reason
from ..modules import embedding
from ..modules.aggregators import AGGREGATORS, Aggregated
from ..modules.losses import LOSSES
from ..modules.similarity import SIMILARITIES
from .blocks import Block, arguments
from .own import Sources, part_of
from .schema import takes
from .trial import try_aggregator, try_loss, try_similarity


@torch.no_grad()
def check_parts(
    dim: int, aggregator: Mapping[str, Block], similarity: Block, terms: Mapping[str, Block], sources: Sources
) -> list[str]:
    """Return what the parts of a recipe, by their complete blocks, refuse, and which of them do not go together."""
    name, faults = similarity["name"], list[str]()
    compare = part_of(SIMILARITIES, name, sources)
    kinds = tuple(part_of(AGGREGATORS, block["name"], sources) for block in aggregator.values())
    with drawing(torch.device("cpu"), 0):  # a part may draw
        pair = _aggregated(dim, json.dumps(aggregator), kinds)
        faults += [made for made in pair if isinstance(made, str)]
        for (side, block), kind in zip(aggregator.items(), kinds, strict=True):
            if kind.embedding != compare.embedding:
                fitting = [one for one, part in AGGREGATORS.items() if part.embedding == compare.embedding]
                faults.append(
                    f"aggregator.{side} '{block['name']}' gives a {kind.embedding} and similarity '{name}' compares "
                    f"{compare.embedding}s (take one of {', '.join(fitting)}, or another similarity)"
                )
        sides = [made for made in pair if isinstance(made, Aggregated)]
        embeddings = None if faults else [made.embedding for made in sides]
        if ":" not in name:
            _try("similarity", compare, similarity, (), embeddings, faults)
        elif embeddings is not None:
            _tried("similarity", partial(try_similarity, compare, arguments(similarity), *embeddings), faults)
        samples = (torch.eye(2), torch.eye(2) > 0, *sides) if len(sides) == 2 else None
        for term, block in terms.items():
            part = part_of(LOSSES, term, sources)
            if ":" not in term:
                _try(f"loss.{term}", part, block, (dim, 2) if takes(part, "vocabulary_size") else (), samples, faults)
            elif samples is not None:
                _tried(f"loss.{term}", partial(try_loss, part, arguments(block), samples), faults)
            if part.log_odds and not compare.log_odds:
                fitting = [one for one, part in SIMILARITIES.items() if part.log_odds]
                faults.append(f"loss.{term} needs a similarity that gives log-odds: {', '.join(fitting)}")
    return faults if terms else [*faults, "loss needs at least one term with a weight above 0"]


@lru_cache(8)  # recipes of a tuning or an ablation differ in other values as well
def _aggregated(dim: int, aggregator: str, kinds: tuple[type[Any], ...]) -> tuple[Aggregated | str, ...]:
    """Return what each aggregator makes of two samples of zeros, the first a 2 by 2 map, or why it is refused.

    `aggregator` is the JSON of their blocks, and `kinds` are their classes.
    """
    made: list[Aggregated | str] = []
    length, global_ = torch.tensor([4, 1]), torch.zeros(2, dim)
    token = embedding.Sequence(torch.zeros(2, 4, dtype=torch.long), length)
    for (side, block), kind in zip(json.loads(aggregator).items(), kinds, strict=True):
        faults: list[str] = []
        if ":" in block["name"]:
            found = _tried(f"aggregator.{side}", partial(try_aggregator, kind, dim, arguments(block)), faults)
        else:
            samples = torch.zeros(2, 4, dim), length, global_
            found = _try(f"aggregator.{side}", kind, block, (dim, dim), samples, faults)
        made.append(faults[0] if faults else found._replace(global_=global_, token=token))
    return tuple(made)


def _tried(path: str, trial: Callable[[], Any], faults: list[str]) -> Any:
    """Return what the trial of a part of one's own gives, or None and a fault."""
    try:
        return trial()
    except ValueError as error:
        faults.append(f"{path}: {error}")
        return None


def _try(
    path: str, part: type, block: Block, sizes: tuple[int, ...], inputs: Sequence[Any] | None, faults: list[str]
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
