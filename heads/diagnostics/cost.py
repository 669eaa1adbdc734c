"""What it costs to compare an image with a caption once both are embedded (SetDiv, section 4.4)."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

from ..modules.embedding import Embedding, Sequence, each


@dataclass(frozen=True)
class Cost:
    """What a pair costs.

    Attributes:
        macs_a_pair: multiply-accumulates.
        image: the shape of one embedding; of a Gaussian that of its mean.
        text: the same.
    """

    macs_a_pair: int
    image: list[int]
    text: list[int]


def cost(images: Embedding, captions: Embedding, compare: Callable[[Any, Any], Tensor]) -> Cost:
    """Return what a pair costs, and what an embedding is.

    Counted are the multiply-accumulates of matrix products, as `compare` really makes them. SetDiv calls them FLOPs:
    16.4 K for sets of 4 elements of 1,024 dimensions. Torch's counter takes a multiplication and an addition for two.
    What is done once for an image, or once for a caption, is not of the pair and is not counted.

    Args:
        images: embeddings of I images. Of sequences, which differ in length, one of the median length is taken.
        captions: embeddings of C captions.
        compare: takes them to their similarity ``[I, C]``.
    """
    left, right = _one(images), _one(captions)

    def count(rows: int, columns: int) -> int:
        with torch.no_grad(), FlopCounterMode(display=False) as counter:
            compare(_times(left, rows), _times(right, columns))
        flops: int = counter.get_total_flops()
        return flops // 2

    # Work is a + b I + c C + d I C; d is what a pair costs.
    macs = count(2, 2) - count(2, 1) - count(1, 2) + count(1, 1)
    return Cost(macs, _shape(left), _shape(right))


def _one(embedding: Embedding) -> Embedding:
    """Return one sample; of sequences one of the median length, without its padding."""
    if not isinstance(embedding, Sequence):
        return each(lambda t: t[:1], embedding)
    length = embedding.length.sort()
    middle = length.indices[(len(length.indices) - 1) // 2]
    rows = int(embedding.length[middle])
    return Sequence(embedding.rows[middle][None, :rows], embedding.length[middle][None])


def _times(embedding: Embedding, count: int) -> Embedding:
    return each(lambda t: torch.cat([t] * count), embedding)


def _shape(embedding: Embedding) -> list[int]:
    tensor = embedding if isinstance(embedding, Tensor) else embedding[0]
    return list(tensor.shape[1:])
