"""How good a similarity matrix is where a query has any number of right items: R-Precision, mAP@R, best rank.

Rows are queries, columns the gallery's items; for text to image, pass the transposes. A row without a right item asks
nothing and is left out. R is the number of a query's right items. mAP@R is that of Musgrave et al., *A Metric
Learning Reality Check*, section 3.2, which ECCV Caption took over; plausible matches are those of PCME (*Probabilistic
Embeddings for Cross-Modal Retrieval*, section 4.1). `eccv_caption` computes the same of one given order; these count
ties by any rule.

Where n items score the same and m of them are right, the first t of them hold max(0, t - (n - m)) right ones
(`pessimistic`), min(t, m) (`optimistic`) or t m / n (`mean`, the expectation over all orders).
"""

from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor

from . import metrics
from .metrics import Ranks, Ties


def best_ranks(similarity: Tensor, relevant: Tensor) -> Ranks:
    """Count, for every query that asks, the items ahead of its best right item and those tied with it.

    `similarity` is `[Q, G]`, larger is closer, and `relevant`, bool `[Q, G]`, which items are right. ValueError if no
    query has a right item.
    """

    def counts(scores: Tensor, right: Tensor, _: Tensor) -> Tensor:
        best = scores.masked_fill(~right, -torch.inf).amax(1, keepdim=True)
        level = scores == best
        tied_right = _count(level & right)
        return torch.cat([_count(scores > best), _count(level) - tied_right, tied_right], 1)

    return Ranks(*_by_query(counts, similarity, relevant, None).T)


def r_precision(
    similarity: Tensor, relevant: Tensor, ties: Ties = "pessimistic", count: Tensor | None = None
) -> Tensor:
    """Return for every query that asks the share of right ones among its first R items, float64.

    `count` is R of each query, int64 `[Q]`, where some right items are not in the gallery; None: those that are. Other
    arguments and errors as of `best_ranks`.
    """

    def precision(scores: Tensor, right: Tensor, count: Tensor) -> Tensor:
        position = count.clamp(max=scores.shape[1])[:, None]
        value = _sorted(scores).gather(1, position - 1)
        above, level = scores > value, scores == value
        inside, tied_right, size = position - _count(above), _count(level & right), _count(level)
        among = {
            "pessimistic": (inside - (size - tied_right)).clamp(min=0),
            "optimistic": inside.minimum(tied_right),
            "mean": inside * tied_right / size.double(),
        }[ties]
        return ((_count(above & right) + among).double() / count[:, None])[:, 0]

    return _by_query(precision, similarity, relevant, count)


def map_at_r(similarity: Tensor, relevant: Tensor, ties: Ties = "pessimistic", count: Tensor | None = None) -> Tensor:
    """Return for every query that asks the mean over r = 1 … R of the precision of its first r items, counted as 0
    where the r-th item is wrong, float64.

    Arguments and errors as for `r_precision`.
    """

    def average(scores: Tensor, right: Tensor, count: Tensor) -> Tensor:
        position = torch.arange(1, 1 + min(int(count.max()), scores.shape[1]), device=scores.device)
        falling, right_scores = (-_sorted(rows) for rows in (scores, scores.masked_fill(~right, -torch.inf)))
        value = falling[:, : len(position)].contiguous()
        above, before = torch.searchsorted(falling, value), torch.searchsorted(right_scores, value)
        inside, size = position - above, torch.searchsorted(falling, value, right=True) - above
        # `right_scores` ends with -inf for the wrong items, which may be a score as well.
        level = torch.searchsorted(right_scores, value, right=True).minimum(_count(right)) - before
        if ties == "pessimistic":  # right items among the first r, where the r-th is one
            gain = (before + inside - (size - level)).double() * (inside > size - level)
        elif ties == "optimistic":
            gain = (before + inside).double() * (inside <= level)
        else:  # it is one with the probability m / n; then m - 1 others share the n - 1 other places
            others = (inside - 1) * (level - 1) / (size - 1).clamp(min=1).double()
            gain = level / size.double() * (before + 1 + others)
        return (gain / position).masked_fill(position > count[:, None], 0).sum(1) / count

    return _by_query(average, similarity, relevant, count)


def plausible_matches(codes: Tensor, zeta: int) -> Tensor:
    """Return which images match, bool `[I, I]`: their object codes, bool `[I, L]`, differ in at most `zeta` places.

    PCME takes a zeta of 0, 1 and 2.
    """
    shown = codes.float()  # exact: whole numbers up to L
    size = shown.sum(1)
    return size[:, None] + size[None, :] - 2 * shown @ shown.T <= zeta


def _by_query(
    measure: Callable[[Tensor, Tensor, Tensor], Tensor], similarity: Tensor, relevant: Tensor, count: Tensor | None
) -> Tensor:
    """Measure the queries that ask, a few at a time, by their scores, right items and R."""
    asked = relevant.any(1).nonzero()[:, 0]
    if not len(asked):
        raise ValueError("no query has a right item in the gallery")
    measured = []
    for rows in asked.split(max(1, metrics.BLOCK // similarity.shape[1])):
        scores = similarity[rows.to(similarity.device)].contiguous()  # of a transpose it is not
        right = relevant[rows].to(similarity.device).contiguous()
        total = right.sum(1) if count is None else count[rows.to(count.device)].to(similarity.device)
        measured.append(measure(scores, right, total))
    return torch.cat(measured)


def _sorted(scores: Tensor) -> Tensor:
    if scores.is_cuda:
        return scores.sort(1, descending=True).values
    return torch.from_numpy(np.sort(scores.numpy(), axis=1)).flip(1)  # of values alone, several times as fast


def _count(true: Tensor) -> Tensor:
    return true.sum(1, keepdim=True)
