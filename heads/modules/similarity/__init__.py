"""Similarities between image and caption embeddings. Larger is closer, always.

One file a family. Embeddings come as they are and are normalised here where the formula wants it. Every similarity
is computed in float32 at least, also inside autocast. Memory grows as K1 x K2 x I x C: `in_blocks` scores a gallery.

Attributes:
    SIMILARITIES: the similarity of each name that a recipe may use.
"""

from ..parts import import_all
from .shared import SIMILARITIES, Similarity, in_blocks

import_all(__name__, __path__)

__all__ = ["SIMILARITIES", "Similarity", "in_blocks"]
