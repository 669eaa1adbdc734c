"""What several losses need."""

from collections.abc import Callable

import torch
from torch import Tensor

from ..aggregators.aggregated import Aggregated
from ..similarity.shared import unit


def element_cosines(elements: Tensor) -> Tensor:
    """Return the cosines of all pairs k < k' within each set `[B, K, D]`, `[B, K (K - 1) / 2]`."""
    rows = unit(elements)
    first, second = torch.triu_indices(elements.shape[1], elements.shape[1], 1, device=elements.device)
    return (rows @ rows.transpose(1, 2))[:, first, second]


def tensor_embedding(loss: str, side: str, aggregated: Aggregated) -> Tensor:
    """Return an embedding vector or set; ValueError where it is a Gaussian or a sequence."""
    if not isinstance(aggregated.embedding, Tensor):
        kind = type(aggregated.embedding).__name__.lower()
        raise ValueError(
            f"the {loss} loss needs vectors or sets, but the {side} aggregator gives a {kind}: "
            "choose another aggregator or leave the loss out"
        )
    return aggregated.embedding


def set_embedding(loss: str, side: str, aggregated: Aggregated) -> Tensor:
    """Return an embedding set `[B, K, D]`; ValueError where it is anything else."""
    embedding = aggregated.embedding
    if not isinstance(embedding, Tensor) or embedding.ndim != 3:
        raise ValueError(
            f"the {loss} loss needs embedding sets, but the {side} aggregator gives none: "
            "choose element-slots or leave the loss out"
        )
    return embedding


def slots_of(loss: str, side: str, aggregated: Aggregated) -> Tensor:
    """Return the slots `[B, K, D]`; ValueError where an aggregator has none."""
    if aggregated.slots is None:
        raise ValueError(
            f"the {loss} loss needs slots, but the {side} aggregator has none: "
            "choose element-slots or leave the loss out"
        )
    return aggregated.slots


def both(of: Callable[[str, Aggregated], Tensor], images: Aggregated, captions: Aggregated) -> Tensor:
    """Return the sum of a term of the image side and the same of the caption side."""
    return of("image", images) + of("text", captions)
