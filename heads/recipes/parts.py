"""Check the parts of a recipe: each is made once, and two samples run through them."""

import json
from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache, partial
from typing import Any, NamedTuple

import torch

from ...pipeline.device import drawing
from ...pipeline.wording import reason
from ..modules import embedding
from ..modules.aggregators import AGGREGATORS, Aggregated
from ..modules.losses import LOSSES
from ..modules.registry import Registry
from ..modules.similarity import SIMILARITIES
from .blocks import Block, arguments
from .own import Sources, part_of
from .schema import sizes
from .trial import try_aggregator, try_loss, try_similarity

LENGTH = torch.tensor([4, 1])  # of two samples, the first a 2 by 2 map


class _Named(NamedTuple):
    path: str
    name: str
    given: Block
    kind: type[Any]


def check_parts(
    dim: int, aggregator: Mapping[str, Block], similarity: Block, terms: Mapping[str, Block], sources: Sources
) -> list[str]:
    """Return what the parts of a recipe, by their complete blocks, refuse, and which of them do not go together.

    Parts that were tried in this process are not tried again.
    """
    of_each: list[tuple[str, Registry[Any], str, Block]] = [
        *((f"aggregator.{side}", AGGREGATORS, block["name"], block) for side, block in aggregator.items()),
        ("similarity", SIMILARITIES, similarity["name"], similarity),
        *((f"loss.{term}", LOSSES, term, block) for term, block in terms.items()),
    ]
    kinds = tuple(part_of(registry, name, sources) for _, registry, name, _ in of_each)
    return list(_faults(dim, json.dumps([(path, name, arguments(block)) for path, _, name, block in of_each]), kinds))


@lru_cache(64)
@torch.no_grad()
def _faults(dim: int, parts: str, kinds: tuple[type[Any], ...]) -> tuple[str, ...]:
    """Return the faults of parts, each a path, a name and arguments in JSON, with their classes."""
    faults: list[str] = []
    named = zip(json.loads(parts), kinds, strict=True)
    image, text, compare, *terms = (_Named(path, name, given, kind) for (path, name, given), kind in named)
    with drawing(torch.device("cpu"), 0):  # a part may draw
        sides = [_aggregated(dim, one, faults) for one in (image, text)]
        faults += [_misfit(one, compare) for one in (image, text) if one.kind.embedding != compare.kind.embedding]
        embeddings = None if faults else [side.embedding for side in sides if side is not None]
        _try(compare, (), embeddings, partial(try_similarity, compare.kind, compare.given), faults)
        samples = None if None in sides else (torch.eye(2), torch.eye(2) > 0, *sides)
        for term in terms:
            given = tuple(sizes(term.kind, dim, 2).values())
            _try(term, given, samples, partial(try_loss, term.kind, term.given), faults)
            if term.kind.log_odds and not compare.kind.log_odds:
                fitting = [one for one, part in SIMILARITIES.items() if part.log_odds]
                faults.append(f"{term.path} needs a similarity that gives log-odds: {', '.join(fitting)}")
    return tuple(faults if terms else [*faults, "loss needs at least one term with a weight above 0"])


def _aggregated(dim: int, one: _Named, faults: list[str]) -> Aggregated | None:
    """Return what an aggregator makes of two samples of zeros; None and a fault where it is refused."""
    global_ = torch.zeros(2, dim)
    samples = torch.zeros(2, 4, dim), LENGTH, global_
    made = _try(one, (dim, dim), samples, lambda *_: try_aggregator(one.kind, dim, one.given), faults)
    token = embedding.Sequence(torch.zeros(2, 4, dtype=torch.long), LENGTH)
    local = embedding.Sequence(*samples[:2]) if one.kind.uses_local else None
    return None if made is None else made._replace(global_=global_, token=token, local=local)


def _misfit(one: _Named, compare: _Named) -> str:
    fitting = [name for name, part in AGGREGATORS.items() if part.embedding == compare.kind.embedding]
    return (
        f"{one.path} '{one.name}' gives a {one.kind.embedding} and similarity '{compare.name}' compares "
        f"{compare.kind.embedding}s (take one of {', '.join(fitting)}, or another similarity)"
    )


def _try(
    one: _Named, sizes: tuple[int, ...], inputs: Sequence[Any] | None, trial: Callable[..., Any], faults: list[str]
) -> Any:
    """Return what a part makes of `inputs`, if any, or None and a fault; a user's goes through its `trial`."""
    try:
        if ":" in one.name:
            return None if inputs is None else trial(*inputs)
        with torch.device("meta"):  # without memory for its weights
            made = one.kind(*sizes, **one.given)
        if inputs is None:
            return None
        made.to_empty(device="cpu")
        for values in (*made.parameters(), *made.buffers()):
            values.zero_()  # whatever the memory held, scipy's matching refuses what is not finite
        return made(*inputs)
    except (ValueError, RuntimeError) as error:  # RuntimeError: more weights than memory holds
        faults.append(f"{one.path}: {reason(error)}")
        return None
