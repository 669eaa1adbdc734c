"""Metrics of retrieval from a similarity matrix ``[images, captions]``, with a stated rule for ties.

    table = recalls(similarity, caption_image)   # caption_image [C]: the image that each caption belongs to
    table.rsum, table.text_to_image["R@1"]

Where a query has other right items than its own, as in ECCV Caption, `map_at_r`, `r_precision` and `best_ranks` take
which are right, bool ``[queries, gallery]``; `relevance` makes that of ids. `inverted_softmax` holds back items that
answer too many queries, by the scores of a bank of training queries; `skewness` measures how unevenly they do. A class
that derives from `Protocol` is what `xret eval --protocol module:Class` measures by.
"""

from .heads.evaluation.hubness import inverted_softmax, skewness
from .heads.evaluation.metrics import (
    Ranks,
    Recalls,
    Table,
    Ties,
    chance,
    log_circular_variance,
    median_rank,
    ranks,
    recall,
    recalls,
)
from .heads.evaluation.precision import best_ranks, map_at_r, plausible_matches, r_precision
from .heads.evaluation.protocols import Protocol, relevance

__all__ = [
    "Protocol",
    "Ranks",
    "Recalls",
    "Table",
    "Ties",
    "best_ranks",
    "chance",
    "inverted_softmax",
    "log_circular_variance",
    "map_at_r",
    "median_rank",
    "plausible_matches",
    "r_precision",
    "ranks",
    "recall",
    "recalls",
    "relevance",
    "skewness",
]
