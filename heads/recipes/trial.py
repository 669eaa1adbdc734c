"""Check the parts of a recipe before any training: each is made once, and two samples run through them.

What a user's own part gives is also held against what is expected of it.
"""

import json
import sys
from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache, partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only

from ...pipeline.device import drawing
from ...pipeline.wording import raised, reason
from ..modules.adapters import Adapted
from ..modules.aggregators import AGGREGATORS, Aggregated
from ..modules.embedding import Embedding, Gaussian, each, kind_of, tensors_of
from ..modules.embedding import Sequence as Rows
from ..modules.losses import LOSSES
from ..modules.padding import valid_rows
from ..modules.parts import Registry
from ..modules.similarity import SIMILARITIES
from .blocks import Block, arguments
from .own import Sources, part_of
from .schema import sizes

LENGTH = torch.tensor([4, 1])  # valid rows of two samples, the first a 2 by 2 map


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


@lru_cache(1024)
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
    token = Rows(torch.zeros(2, 4, dtype=torch.long), LENGTH)
    local = Rows(*samples[:2]) if one.kind.uses_local else None
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


def try_aggregator(part: type[Any], dim: int, given: Mapping[str, Any]) -> Aggregated:
    """Return what an aggregator makes of two samples; ValueError where it is not what the class says."""
    made, place = _made(part, (dim, dim), given), _place(part)
    inputs = torch.randn(2, 4, dim), LENGTH, torch.randn(2, dim)
    found = _called(made, *inputs)
    if not isinstance(found, Aggregated):
        raise ValueError(f"{place}.forward must return xret.nn.Aggregated, not {type(found).__name__}")
    embedding, wanted = found.embedding, part.embedding
    kind = kind_of(embedding) if isinstance(embedding, Tensor | Gaussian | Rows) else type(embedding).__name__
    shapes = {"vector": f"[B, {dim}]", "set": f"[B, K, {dim}]", "gaussian": f"[B, {dim}]", "sequence": "[B, N, D]"}
    tensor = embedding if isinstance(embedding, Tensor) else embedding[0] if kind in shapes else None
    fits = tensor is not None and tensor.shape[0] == 2 and (kind == "sequence" or tensor.shape[-1] == dim)
    if kind != wanted or not fits:
        given_shape = kind if tensor is None else f"{kind} {list(tensor.shape)}"
        raise ValueError(
            f"{place}.forward must give a {wanted} {shapes.get(wanted, '')} of B = 2 samples, as its `embedding` says,"
            f" and gave a {given_shape}"
        )
    _require_finite(place, embedding)
    _require_kept(place, embedding, _called(_made_again(made, part, (dim, dim), given), *inputs).embedding)
    _require_own(place, embedding, _called(made, *map(_second, (_refilled(inputs[0]), *inputs[1:]))).embedding)
    return found


@torch.no_grad()
def try_adapter(part: type[Any], sizes: Sequence[int | None], given: Mapping[str, Any]) -> None:
    """Let an adapter adapt two samples; ValueError where it gives something else than `Adapted` of its shapes."""
    with drawing(torch.device("cpu"), 0), torch.device("cpu"):
        made, place, length, dim = _made(part, sizes, given), _place(part), LENGTH, sizes[-1]
        fields = part.fields(made, True)
        if not (isinstance(fields, set) and fields <= {"local", "global", "token"}):
            raise ValueError(f"{place}.fields must return a set of 'local', 'global' or 'token', and gave {fields!r}")
        inputs = _cached(fields, *sizes[:-1])
        found = _called(made, length, *inputs)
        local_dim = getattr(made, "local_dim", None)
        rows, global_ = (found.local, found.global_) if isinstance(found, Adapted) else (None, None)
        if not isinstance(found, Adapted) or global_ is None or global_.shape != (2, dim):
            raise ValueError(f"{place}.forward must return xret.nn.Adapted with global_ [B, {dim}] of B = 2 samples")
        if rows is not None and (rows.ndim != 3 or rows.shape[::2] != (2, local_dim)):
            raise ValueError(f"{place}.forward must give rows [B, N, local_dim], and gave {list(rows.shape)}")
        _require_finite(place, global_)
        _require_kept(place, global_, _called(_made_again(made, part, sizes, given), length, *inputs).global_)
        if inputs[0] is not None:
            others = (value if value is None else _second(value) for value in inputs[1:])
            _require_own(place, global_, _called(made, _second(length), _second(_refilled(inputs[0])), *others).global_)


def _cached(fields: set[str], channels: int | None, *more: int | None) -> tuple[Tensor | None, ...]:
    """Return local and global features of two samples in float16, as stores have them, or token ids of words."""
    if not more:
        return None, None, torch.ones(2, 4, dtype=torch.long)
    local = torch.randn(2, 4, channels).half() if channels is not None and "local" in fields else None
    global_ = torch.randn(2, more[0]).half() if more[0] is not None and "global" in fields else None
    return local, global_, None


def try_similarity(part: type[Any], given: Mapping[str, Any], images: Embedding, captions: Embedding) -> None:
    """Compare two images with three captions; ValueError where that gives no finite `[2, 3]`, each pair by itself.

    The embeddings are drawn in the shapes of those given.
    """
    place, made = _place(part), _made(part, (), given)
    images, captions = (each(_drawn, side) for side in (images, captions))
    three = each(lambda values: values[[0, 1, 0]], captions)
    scores = _called(made, images, three)
    if not isinstance(scores, Tensor) or scores.shape != (2, 3):
        gave = list(scores.shape) if isinstance(scores, Tensor) else type(scores).__name__
        raise ValueError(f"{place}.forward must give [images, captions], here [2, 3], and gave {gave}")
    _require_finite(place, scores)
    _require_kept(place, scores, _called(_made_again(made, part, (), given), images, three))
    if not _close(_called(made, each(_second, images), each(_second, captions)), scores[1:, 1:2]):
        raise ValueError(f"{place}.forward must score each image with each caption whatever others it is given")


def try_loss(part: type[Any], given: Mapping[str, Any], *samples: Any) -> None:
    """Compute a loss; ValueError where it is no finite scalar, or no gradient comes through it."""
    place, made = _place(part), _made(part, (), given)
    with torch.enable_grad():
        value = _called(made, *(tree_map_only(Tensor, _learnt, sample) for sample in samples))
    if not isinstance(value, Tensor) or value.ndim:
        gave = list(value.shape) if isinstance(value, Tensor) else type(value).__name__
        raise ValueError(f"{place}.forward must give a scalar, and gave {gave}")
    if not value.requires_grad:
        raise ValueError(
            f"{place}.forward gives a loss that is not attached to its inputs, so that nothing would learn"
        )
    _require_finite(place, value)


def _place(part: type[Any]) -> str:
    file = getattr(sys.modules.get(part.__module__), "__file__", None)  # a notebook has none
    return f"{file or part.__module__}: {part.__name__}"


def _made(part: type[Any], sizes: Sequence[Any], given: Mapping[str, Any]) -> nn.Module:
    try:
        made: nn.Module = part(*sizes, **given)
    except Exception as error:  # whatever its lines do
        raise ValueError(f"{_place(part)} cannot be made ({raised(error)})") from error
    return made.eval()


def _made_again(made: nn.Module, part: type[Any], sizes: Sequence[Any], given: Mapping[str, Any]) -> nn.Module:
    again = _made(part, sizes, given)
    again.load_state_dict(made.state_dict())
    return again


def _called(made: nn.Module, *inputs: Any) -> Any:
    try:
        return made(*inputs)
    except Exception as error:
        shapes = ", ".join(f"{list(x.shape)} {x.dtype}" for x in inputs if isinstance(x, Tensor))
        raise ValueError(f"{_place(type(made))}.forward fails on a trial batch {shapes} ({raised(error)})") from error


def _refilled(rows: Tensor) -> Tensor:
    padding = ~valid_rows(rows, LENGTH)
    return torch.where(padding[..., None], 100 * torch.randn_like(rows), rows)


def _require_finite(place: str, embedding: Embedding) -> None:
    tensors = [embedding] if isinstance(embedding, Tensor) else list(embedding)
    if not all(values.isfinite().all() for values in tensors):
        raise ValueError(f"{place}.forward gives values that are not finite on a trial batch")


def _require_kept(place: str, values: Embedding, again: Embedding) -> None:
    if not all(map(_close, tensors_of(values).values(), tensors_of(again).values())):
        raise ValueError(
            f"{place} gives other values when it is made again with the same weights: register what it draws as a "
            "buffer, and draw nothing in evaluation"
        )


def _require_own(place: str, embedding: Embedding, alone: Embedding) -> None:
    """Raise ValueError where the second sample `alone`, with other values on its padding, is embedded otherwise."""
    if isinstance(embedding, Rows):  # what stands after its lengths means nothing
        return
    if not all(map(_close, tensors_of(each(_second, embedding)).values(), tensors_of(alone).values())):
        raise ValueError(
            f"{place}.forward reads padding or other samples: the embedding of sample b is made of its first "
            "length[b] rows alone (xret.nn.valid_rows)"
        )


def _learnt(values: Tensor) -> Tensor:
    return values.detach().requires_grad_(values.is_floating_point()).clone()  # of a leaf nothing may be overwritten


def _drawn(values: Tensor) -> Tensor:
    return torch.randn_like(values) if values.is_floating_point() else values


def _second(values: Tensor) -> Tensor:
    return values[1:2]


def _close(one: Tensor, two: Tensor) -> bool:
    return one.shape == two.shape and torch.allclose(one, two, rtol=1e-3, atol=1e-4)
