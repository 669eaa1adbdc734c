"""Similarities between image and caption embeddings. Larger is closer, always.

One file a family. Embeddings come as they are and are normalised here where the formula wants it. Every similarity
is computed in float32 at least, also inside autocast. Memory grows as K1 x K2 x I x C: `in_blocks` scores a gallery.

Attributes:
    SIMILARITIES: the similarity of each name that a recipe may use. Its `embedding` says what it compares:
        `"vector"`, `"set"`, `"gaussian"` or `"sequence"`; its `score` is one line for readers: what a score is.
"""

from typing import Any

from .attention import CrossAttention
from .blocks import in_blocks
from .gaussian import KL, MinKL, SampledDistance, Wasserstein
from .matching import Assignment
from .samples import MatchProbability, MonteCarloMatch
from .sets import MIL, Chamfer, Cosine, SmoothChamfer

SIMILARITIES: dict[str, type[Any]] = {
    "cosine": Cosine,
    "mil": MIL,
    "match-probability": MatchProbability,
    "chamfer": Chamfer,
    "smooth-chamfer": SmoothChamfer,
    "assignment": Assignment,
    "monte-carlo-match": MonteCarloMatch,
    "kl": KL,
    "min-kl": MinKL,
    "wasserstein": Wasserstein,
    "sampled-distance": SampledDistance,
    "cross-attention": CrossAttention,
}

__all__ = [
    "SIMILARITIES",
    "Chamfer",
    "Cosine",
    "CrossAttention",
    "MonteCarloMatch",
    "SampledDistance",
    "SmoothChamfer",
    "Wasserstein",
    "in_blocks",
]
