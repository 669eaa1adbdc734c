"""Maximal pair assignment: elements are matched one to one so that their cosines sum to the most.

Source: *Maximal Matching Matters* (MaxMatch), section 3.3, eq. 2-4. The matching is solved on the cosines, not on their
exponentials, and is held fixed in gradients.
"""

import math
from itertools import combinations

import numpy as np
import torch
from torch import Tensor

from .shared import SIMILARITIES, Similarity, element_cosines

# The dynamic programme is used up to this number of sums for a pair of sets (sets of 8). Microseconds a pair on one
# CPU core, programme / scipy: sets of 4: 0.1 / 2, 7: 2 / 5, 8: 6 / 6, 9: 10 / 6; on a GPU it wins for larger sets too.
SUMS = 1024
PAIRS = 1 << 16  # of sets, matched at a time: what the programme holds of them stays near a CPU's caches


@torch.no_grad()
def match(cosines: Tensor) -> Tensor:
    """Return the column of each row, all different, so that their cosines sum to the most (MaxMatch eq. 2).

    Of `cosines [I, K1, K2, C]`, of the elements of every pair of sets, with K1 <= K2: int64 `[I, K1, C]`. Of equally
    good matchings always the same one is taken.
    """
    count, k1, k2, width = cosines.shape
    if _sums(k1, k2) > SUMS:
        return _match_by_scipy(cosines)
    if torch.compiler.is_compiling():  # a traced graph knows no number of sets
        return _match_by_subsets(cosines)
    step = max(1, PAIRS // max(width, 1))
    found = cosines.new_empty((count, k1, width), dtype=torch.int64)
    for begin in range(0, count, step):
        found[begin : begin + step] = _match_by_subsets(cosines[begin : begin + step])
    return found


@SIMILARITIES.register("assignment", "sets that are matched one to one")
class Assignment(Similarity):
    """The score of the best matching, the mean of exp(cosine) - 1 over matched pairs (MaxMatch eq. 4).

        >>> Assignment()(torch.eye(2)[None], torch.eye(2).flip(0)[None])  # both elements find their own
        tensor([[1.7183]])

    Sets of different sizes, which the paper does not have, have as many pairs as the smaller one has elements.
    MaxMatch section 3.4 leaves the matching out of inference, for the "top-k most similar embeddings", and names no k.
    Its appendix F has the entire sets "during training and inference", unlike the one pair of `mil`. The matching takes
    them entire, and ranks as the mean of the K most similar pairs does or better.
    """

    embedding = "set"
    score = "the mean of exp(cosine) - 1 over pairs of elements, from -0.63 to 1.72"
    of_cosines = True

    def forward(self, images: Tensor, captions: Tensor) -> Tensor:
        """Compare `images [I, K1, D]` with `captions [C, K2, D]`: `[I, C]`."""
        cosines = element_cosines(images, captions)
        if cosines.shape[1] > cosines.shape[2]:
            cosines = cosines.transpose(1, 2)
        pairs = cosines.gather(2, match(cosines)[:, :, None]).squeeze(2)
        return (pairs.exp() - 1).sum(1) / pairs.shape[1]


def _sums(k1: int, k2: int) -> int:
    """Return how many sums the dynamic programme forms for a pair of sets."""
    return sum(size * math.comb(k2, size) for size in range(1, k1 + 1))


def _match_by_subsets(cosines: Tensor) -> Tensor:
    """Match by dynamic programming over subsets of columns, all pairs of sets at once.

    After k rows there is for every subset of k columns the best sum of cosines that uses just these, and the way
    there, written as one number: row r's column in its r-th group of bits.
    """
    k1, k2 = cosines.shape[1:3]
    bits = (k2 - 1).bit_length()
    number = torch.float32 if bits * k1 <= 24 else torch.float64  # holds the way exactly, up to 53 bits
    start = torch.zeros((), dtype=number, device=cosines.device)
    best: dict[tuple[int, ...], tuple[Tensor, Tensor]] = {
        (column,): (cosines[:, 0, column], start + column) for column in range(k2)
    }
    for row in range(1, k1):
        shorter = best
        best = {}
        for subset in combinations(range(k2), row + 1):
            options = []
            for column in subset:
                total, way = shorter[tuple(other for other in subset if other != column)]
                options.append((total + cosines[:, row, column], way + (column << bits * row)))
            best[subset] = _best_of(options)
    way = _best_of(list(best.values()))[1].expand_as(cosines[:, 0, 0]).long()
    return torch.stack([(way >> bits * row) & ((1 << bits) - 1) for row in range(k1)], 1)


def _best_of(options: list[tuple[Tensor, Tensor]]) -> tuple[Tensor, Tensor]:
    """Return per pair of sets the option of the largest total, the first of equals, as total and way."""
    best, way = options[0]
    for total, other in options[1:]:
        # A blend by 0 or 1 is exact, and on a CPU many times faster than torch.where.
        better = torch.gt(total, best, out=torch.empty_like(total, dtype=way.dtype))
        best, way = torch.maximum(best, total), torch.lerp(way, other, better)
    return best, way


def _match_by_scipy(cosines: Tensor) -> Tensor:
    """Match pair by pair, where the sets are too large for the dynamic programme."""
    from scipy.optimize import linear_sum_assignment  # type: ignore[import-untyped]

    count, k1, _, width = cosines.shape
    pairs = cosines.permute(0, 3, 1, 2).flatten(0, 1).double().cpu().numpy()
    # The rows come back sorted, and every row of the smaller side is matched.
    columns = [linear_sum_assignment(pair, maximize=True)[1] for pair in pairs]
    found = torch.tensor(np.stack(columns) if columns else np.empty((0, k1), np.int64), dtype=torch.int64)
    return found.view(count, width, k1).transpose(1, 2).to(cosines.device)
