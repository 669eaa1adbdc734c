"""Scoring a whole gallery in blocks of pairs, so that memory is bounded."""

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from ..embedding import Embedding, each, shape_of

SIDE = 512  # of a block of Gaussians or sequences, which are compared in float64 or bound their memory themselves
# Pairs of elements in a block: a temporary has 16 MiB in float32. glibc returns those above 32 MiB to the system each
# time, and getting them again costs more than most of the arithmetic.
CELLS = 1 << 22


@torch.no_grad()
def in_blocks(compare: Callable[[Any, Any], Tensor], images: Embedding, captions: Embedding) -> Tensor:
    """Compare all images with all captions, block by block.

    Args:
        compare: a similarity.
        images: I embeddings.
        captions: C embeddings of the same type.

    Returns:
        `[I, C]`, as one call of `compare` would give it. Beside it, memory holds a few temporaries the size of a block.
    """
    count, width = shape_of(images)[0], shape_of(captions)[0]
    step = side(images, captions)
    similarity: Tensor | None = None
    for left in range(0, width, step):
        columns = _some(captions, left, left + step)
        for top in range(0, count, step):
            block = compare(_some(images, top, top + step), columns)
            if similarity is None:
                similarity = block.new_empty((count, width))
            similarity[top : top + step, left : left + step] = block
    return compare(images, captions) if similarity is None else similarity


def side(images: Embedding, captions: Embedding) -> int:
    """Return how many images and how many captions a block of `in_blocks` has.

    The same number of both: each block normalises its rows and columns anew, and a square has the fewest of them.
    """
    if not (isinstance(images, Tensor) and isinstance(captions, Tensor)):
        return SIDE
    elements = [one.shape[1] if one.ndim == 3 else 1 for one in (images, captions)]
    return max(1, math.isqrt(CELLS // math.prod(elements)))


def _some(embedding: Embedding, begin: int, end: int) -> Embedding:
    return each(lambda x: x[begin:end], embedding)
