"""Scoring a whole gallery in blocks of pairs, so that memory is bounded."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from ..embedding import Embedding, each

IMAGES, CAPTIONS = 512, 1024  # of a block at most: large enough for the matrix product to run at full speed
# Pairs of elements in a block: 16 MiB a temporary in float32. glibc gives larger ones than 32 MiB back to the system
# each time, and getting them again costs more than most of the arithmetic.
CELLS = 1 << 22


@torch.no_grad()
def in_blocks(compare: Callable[[Any, Any], Tensor], images: Embedding, captions: Embedding) -> Tensor:
    """Compare all images with all captions, block by block.

    Args:
        compare: a similarity.
        images: I embeddings.
        captions: C embeddings of the same type.

    Returns:
        `[I, C]`, as one call of `compare` would give it. A block and a few temporaries of its size come on top.
    """
    # Once a piece of nearly 32 MiB was freed, never touched, glibc keeps all temporaries of the blocks at hand.
    torch.empty(31 << 20, dtype=torch.uint8)
    count, width = _count(images), _count(captions)
    step = height(images, captions)
    similarity: Tensor | None = None
    for left in range(0, width, CAPTIONS):
        columns = _some(captions, left, left + CAPTIONS)
        for top in range(0, count, step):
            block = compare(_some(images, top, top + step), columns)
            if similarity is None:
                similarity = block.new_empty((count, width))
            similarity[top : top + step, left : left + CAPTIONS] = block
    return compare(images, captions) if similarity is None else similarity


def height(images: Embedding, captions: Embedding) -> int:
    """Return how many images a block of `in_blocks` has."""
    return max(1, min(IMAGES, CELLS // (CAPTIONS * _elements(images) * _elements(captions))))


def _some(embedding: Embedding, begin: int, end: int) -> Embedding:
    return each(lambda x: x[begin:end], embedding)


def _count(embedding: Embedding) -> int:
    return len(embedding if isinstance(embedding, Tensor) else embedding[0])


def _elements(embedding: Embedding) -> int:
    """Return the size of sets; 1 for the others (sequences bound their memory themselves)."""
    return embedding.shape[1] if isinstance(embedding, Tensor) and embedding.ndim == 3 else 1
