"""Similarities of image and caption embeddings: `torch.nn.Module`s that give ``[images, captions]``, larger is closer.

    >>> images, captions = torch.randn(3, 4, 256), torch.randn(5, 4, 256)  # sets of 4
    >>> SmoothChamfer(alpha=16)(images, captions).shape
    torch.Size([3, 5])

`in_blocks` compares whole galleries in bounded memory.
"""

from typing import TYPE_CHECKING, Any

from .heads.modules.similarity import SIMILARITIES, in_blocks
from .heads.modules.similarity.attention import CrossAttention
from .heads.modules.similarity.gaussian import KL, MinKL, SampledDistance, Wasserstein
from .heads.modules.similarity.matching import Assignment
from .heads.modules.similarity.samples import MatchProbability, MonteCarloMatch
from .heads.modules.similarity.sets import MIL, Chamfer, Cosine, SmoothChamfer
from .heads.modules.similarity.shared import Similarity

__all__ = [
    "KL",
    "MIL",
    "Assignment",
    "Chamfer",
    "Cosine",
    "CrossAttention",
    "MatchProbability",
    "MinKL",
    "MonteCarloMatch",
    "SampledDistance",
    "Similarity",
    "SmoothChamfer",
    "Wasserstein",
    "in_blocks",
]

if not TYPE_CHECKING:  # an editor completes what stands above

    def __getattr__(name: str) -> Any:
        """Return a bundled part that does not stand above."""
        return SIMILARITIES.class_of(name, __name__)
