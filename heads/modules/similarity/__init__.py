"""Similarities between image and caption embeddings. Larger is closer, always.

One file a family. Embeddings come as they are and are normalised here where the formula wants it. Every similarity
is computed in float32 at least, also inside autocast. Memory grows as K1 x K2 x I x C: `in_blocks` scores a gallery.
"""

from typing import Any

from .attention import CrossAttention, cross_attention
from .blocks import in_blocks
from .gaussian import (
    Kl,
    MinKl,
    SampledDistance,
    Wasserstein,
    negative_kl,
    negative_min_kl,
    negative_sampled_distance,
    negative_wasserstein,
)
from .matching import Assignment, assignment, matched, most_similar
from .samples import MatchProbability, MonteCarloMatch, match_probability, monte_carlo_log_odds, monte_carlo_match
from .sets import Chamfer, Cosine, Mil, SmoothChamfer, chamfer, cosine, mil, smooth_chamfer

SIMILARITIES: dict[str, type[Any]] = {
    "cosine": Cosine,
    "mil": Mil,
    "match-probability": MatchProbability,
    "chamfer": Chamfer,
    "smooth-chamfer": SmoothChamfer,
    "assignment": Assignment,
    "monte-carlo-match": MonteCarloMatch,
    "kl": Kl,
    "min-kl": MinKl,
    "wasserstein": Wasserstein,
    "sampled-distance": SampledDistance,
    "cross-attention": CrossAttention,
}

__all__ = [
    "SIMILARITIES",
    "Assignment",
    "Chamfer",
    "Cosine",
    "CrossAttention",
    "Kl",
    "MatchProbability",
    "Mil",
    "MinKl",
    "MonteCarloMatch",
    "SampledDistance",
    "SmoothChamfer",
    "Wasserstein",
    "assignment",
    "chamfer",
    "cosine",
    "cross_attention",
    "in_blocks",
    "match_probability",
    "matched",
    "mil",
    "monte_carlo_log_odds",
    "monte_carlo_match",
    "most_similar",
    "negative_kl",
    "negative_min_kl",
    "negative_sampled_distance",
    "negative_wasserstein",
    "smooth_chamfer",
]
