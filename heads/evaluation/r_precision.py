"""How good a similarity matrix is where a query has any number of right items: R-Precision, mAP@R, best rank.

Rows are queries, columns the gallery's items; for text to image, pass the transposes. A row without a right item asks
nothing and is left out. R is the number of a query's right items. mAP@R is that of Musgrave et al., *A Metric
Learning Reality Check*, section 3.2, which ECCV Caption took over; plausible matches are those of PCME (*Probabilistic
Embeddings for Cross-Modal Retrieval*, section 4.1).

Ties are counted as in `metrics.recall`: where n items score the same and m of them are right, the first t of them
hold max(0, t - (n - m)) right ones (`pessimistic`), min(t, m) (`optimistic`) or t m / n (`mean`, the expectation over
all orders).
"""

from collections.abc import Callable
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from . import metrics
from .metrics import Ranks, Ties


def best_ranks(similarity: Tensor, relevant: Tensor) -> Ranks:
    """Count, for every query, the items ahead of its best right item and those tied with it.

    Args:
        similarity: `[Q, G]`, larger is closer.
        relevant: which items are right, bool `[Q, G]`.

    Returns:
        Counts of the queries that ask, for `metrics.recall` and `metrics.median_rank`.

    Raises:
        ValueError: no query has a right item.
    """

    def of(scores: Tensor, right: Tensor, _: Tensor) -> Tensor:
        best = scores.masked_fill(~right, -torch.inf).amax(1, keepdim=True)
        level = scores == best
        own = _count(level & right)
        return torch.cat([_count(scores > best), _count(level) - own, own], 1)

    return Ranks(*_by_query(of, similarity, relevant, None, torch.empty(0, 3, dtype=torch.int64)).T)


def r_precision(
    similarity: Tensor, relevant: Tensor, ties: Ties = "pessimistic", count: Tensor | None = None
) -> Tensor:
    """Return for every query that asks the share of right ones among its first R items, float64.

    Args:
        similarity: `[Q, G]`, larger is closer.
        relevant: which items are right, bool `[Q, G]`.
        ties: see above.
        count: R of each query, int64 `[Q]`, where some right items are not in the gallery; None: those that are.

    Raises:
        ValueError: no query has a right item.
    """

    def of(scores: Tensor, right: Tensor, count: Tensor) -> Tensor:
        position = count.clamp(max=scores.shape[1])[:, None]
        value = _highest(scores, int(position.max())).gather(1, position - 1)
        above, level = scores > value, scores == value
        at = _Level(_count(above & right), _count(level & right), _count(level), position - _count(above))
        return at.hits(ties)[:, 0] / count

    return _by_query(of, similarity, relevant, count, torch.empty(0, dtype=torch.float64))


def map_at_r(similarity: Tensor, relevant: Tensor, ties: Ties = "pessimistic", count: Tensor | None = None) -> Tensor:
    """Return for every query that asks the mean over r = 1 … R of the precision of its first r items, counted as 0
    where the r-th item is wrong, float64.

    Arguments and errors as for `r_precision`.
    """

    def of(scores: Tensor, right: Tensor, count: Tensor) -> Tensor:
        width = min(int(count.max()), scores.shape[1])
        positions = torch.arange(1, width + 1, device=scores.device).expand(len(scores), -1)
        gain = _Level.up_to(scores, right, width).right_hits(ties) / positions
        return gain.masked_fill(positions > count[:, None], 0).sum(1) / count

    return _by_query(of, similarity, relevant, count, torch.empty(0, dtype=torch.float64))


class _Level(NamedTuple):
    """What surrounds positions of a ranking: the items of equal score that a position lies among; all int64 `[Q, T]`.

    Attributes:
        before: right items that score higher.
        right: right ones among the equal items.
        size: equal items.
        inside: how many of them stand up to the position, itself included.
    """

    before: Tensor
    right: Tensor
    size: Tensor
    inside: Tensor

    @classmethod
    def up_to(cls, scores: Tensor, right: Tensor, width: int) -> "_Level":
        """Return the levels at the first `width` positions."""
        value = -_highest(scores, width)
        higher = torch.searchsorted(value, value)
        size = torch.searchsorted(value, value, right=True) - higher
        last = value[:, -1:]  # there may be more items of this score than those within `width`
        size = torch.where(value == last, _count(scores == -last), size)
        count = _count(right)
        own = -_highest(scores.masked_fill(~right, -torch.inf), int(count.max()))
        before = torch.searchsorted(own, value)
        # -inf fills up the rows that have fewer right items, and may be a score as well.
        level = torch.searchsorted(own, value, right=True).minimum(count) - before
        return cls(before, level, size, torch.arange(1, width + 1, device=scores.device) - higher)

    def hits(self, ties: Ties) -> Tensor:
        """Return how many right items stand up to the position, float64."""
        if ties == "pessimistic":
            found = (self.inside - (self.size - self.right)).clamp(min=0)
        elif ties == "optimistic":
            found = self.inside.minimum(self.right)
        else:
            found = self.inside * self.right / self.size.double()
        return (self.before + found).double()

    def right_hits(self, ties: Ties) -> Tensor:
        """Return the same where a right item stands at the position itself, else 0; in the `mean` its expectation."""
        if ties == "pessimistic":
            return self.hits(ties) * (self.inside > self.size - self.right)
        if ties == "optimistic":
            return self.hits(ties) * (self.inside <= self.right)
        # A right one stands there with the probability m / n; then m - 1 others share the n - 1 other places.
        others = (self.inside - 1) * (self.right - 1) / (self.size - 1).clamp(min=1).double()
        return self.right / self.size.double() * (self.before + 1 + others)


def _by_query(
    measure: Callable[[Tensor, Tensor, Tensor], Tensor],
    similarity: Tensor,
    relevant: Tensor,
    count: Tensor | None,
    like: Tensor,
) -> Tensor:
    """Measure the queries that ask, a few at a time; what is returned has the type and the columns of `like`."""
    asked = relevant.any(1).nonzero()[:, 0]
    if not len(asked):
        raise ValueError("no query has a right item in the gallery")
    # Made beforehand: small pieces between the large ones of each step would keep their memory from being used again.
    found = like.new_empty((len(asked), *like.shape[1:]), device=similarity.device)
    step = max(1, metrics.BLOCK // similarity.shape[1])
    for first in range(0, len(asked), step):
        rows = asked[first : first + step]
        scores = similarity[rows.to(similarity.device)].contiguous()  # of a transpose it is not
        right = relevant[rows].to(similarity.device).contiguous()
        total = right.sum(1) if count is None else count[rows.to(count.device)].to(similarity.device)
        found[first : first + step] = measure(scores, right, total)
    return found


def _highest(scores: Tensor, width: int) -> Tensor:
    """Return the `width` highest scores of each row, falling `[Q, width]`; which item has them does not matter."""
    if width * 16 < scores.shape[1] or scores.is_cuda:
        return scores.topk(width, 1).values
    # Of values alone, numpy's sort is several times as fast.
    return torch.from_numpy(np.sort(scores.numpy(), axis=1)).flip(1)[:, :width].contiguous()


def _count(true: Tensor) -> Tensor:
    return true.sum(1, keepdim=True)


def plausible_matches(codes: Tensor, zeta: int) -> Tensor:
    """Return which images match: their object codes differ in at most `zeta` places (PCME), bool `[I, I]`.

    Args:
        codes: which object classes an image shows, bool `[I, L]`.
        zeta: 0, 1 and 2 in PMRP.
    """
    shown = codes.float()  # exact: whole numbers up to L
    shared = shown @ shown.T
    size = shown.sum(1)
    return size[:, None] + size[None, :] - 2 * shared <= zeta
