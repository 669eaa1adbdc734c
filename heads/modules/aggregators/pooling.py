"""Aggregators of rows by themselves: the global feature as it is, means and maxima, sorted values, powers.

Sources: *Learning the Best Pooling Strategy for Visual Semantic Embedding* (VSE-infinity, CVPR 2021), sections 3.2 and
5.2; for its baselines Zhang, Hare, Pruegel-Bennett: *FSPool: Learning Set Representations with Featurewise Sort
Pooling* (ICLR 2020), section 3, and Radenovic, Tolias, Chum: *Fine-tuning CNN Image Retrieval with No Human Annotation*
(TPAMI 2019), eq. 3, whose code VSE-infinity finds unstable: its gradients explode.
"""

import math
from abc import abstractmethod

import torch
from torch import Tensor, nn
from torch.nn import functional

from ..embedding import Sequence
from ..padding import last_row, max_rows, mean_rows, valid_rows, zero_padding
from ..parts import Few
from .aggregated import AGGREGATORS, Aggregated, Aggregator

PIECES = 20  # of each function of FSPool, as published
BEGIN = 3.0  # GeM's exponent at first, as published
FLOOR = 1e-6  # GeM's mean is one of positive values: what lies below counts as this, as in the published code


def sorted_rows(local: Tensor, length: Tensor) -> Tensor:
    """Sort each feature of the first `length[b]` rows from large to small, `[B, N, C]`; zeros after them."""
    rows = local.masked_fill(~valid_rows(local, length)[..., None], -torch.inf)
    # Faster on a CPU where what is sorted lies side by side in memory.
    ordered = rows.transpose(1, 2).contiguous().sort(dim=2, descending=True).values
    return zero_padding(ordered.transpose(1, 2), length)


@AGGREGATORS.register("global", "the global feature alone, of encoders trained for it as CLIP is")
class Global(Aggregator):
    """The global feature is the embedding (VSE++: the average-pooled map, the last GRU state)."""

    uses_local = False
    uses_global = True

    def forward(self, local: Tensor | None, length: Tensor, global_: Tensor) -> Aggregated:
        """Return `global_ [B, D]` unchanged."""
        return Aggregated(global_)


class Pooling(Aggregator):
    """An aggregator whose vector is as wide as the local rows; ValueError where that is not `dim`."""

    def __init__(self, local_dim: int, dim: int) -> None:
        super().__init__(local_dim, dim)
        if local_dim != dim:
            raise ValueError(
                f"{type(self).__name__} keeps the width of the local rows, "
                f"which is {local_dim} and not {dim}: let the adapter project them (words: local 'gru')"
            )

    def forward(self, local: Tensor, length: Tensor, global_: Tensor) -> Aggregated:
        """Return what `pool` makes of the first `length[b]` rows of `local [B, N, D]`, `[B, D]`."""
        return Aggregated(self.pool(local, length))

    @abstractmethod
    def pool(self, local: Tensor, length: Tensor, /) -> Tensor:
        """Return a vector of the valid rows of each sample, `[B, D]`; zeros where there are none."""


@AGGREGATORS.register("average", "the mean of the rows: grids, and where in doubt")
class Average(Pooling):
    """The average of a sample's local rows (AvgPool, VSE-infinity section 3.2)."""

    pool = staticmethod(mean_rows)


@AGGREGATORS.register("max", "what stands out in one row alone")
class Max(Pooling):
    """The maximum of a sample's local rows, one feature at a time (MaxPool, VSE-infinity section 3.2)."""

    pool = staticmethod(max_rows)


@AGGREGATORS.register("k-max", "the mean of the k largest values: between mean and maximum")
class KMax(Pooling):
    """The mean of the K largest values of each feature (K-MaxPool, VSE-infinity section 3.2).

    A sample with fewer rows than K gives the mean of all of them; zeros where it has none.

    Args:
        k: number K; VSE-infinity's Table 5 finds 2 for regions and bi-GRU, its section 3.1 20 for grids.
    """

    def __init__(self, local_dim: int, dim: int, *, k: Few = 2) -> None:
        super().__init__(local_dim, dim)
        self.k = k

    def pool(self, local: Tensor, length: Tensor) -> Tensor:
        """Return the mean of the K largest values."""
        rows = local.masked_fill(~valid_rows(local, length)[..., None], -torch.inf)
        largest = rows.topk(min(self.k, local.shape[1]), dim=1).values
        return mean_rows(largest, length.clamp(max=largest.shape[1]))


@AGGREGATORS.register("cls", "the first row: a class token")
class First(Pooling):
    """The first local row: the state of BERT's [CLS] token (CLS, VSE-infinity section 5.2)."""

    def pool(self, local: Tensor, length: Tensor) -> Tensor:
        """Return the first row."""
        return zero_padding(local[:, :1], length)[:, 0]


@AGGREGATORS.register("last", "the last row: the end of a sequence")
class Last(Pooling):
    """The last valid local row: the last state of a GRU where the rows are its outputs."""

    pool = staticmethod(last_row)


@AGGREGATORS.register("rows", "the rows themselves, for cross-attention")
class Rows(Aggregator):
    """The local rows themselves, for similarities that compare them one by one (SCAN)."""

    embedding = "sequence"

    def forward(self, local: Tensor, length: Tensor, global_: Tensor) -> Aggregated:
        """Return `local [B, N, C]` with its lengths."""
        return Aggregated(Sequence(local, length))


def interpolation(length: Tensor, number: int, pieces: int, dtype: torch.dtype) -> Tensor:
    """Return the share of each knot of a piecewise linear function on [0, 1] at each of N rows, `[B, N, pieces + 1]`.

    Of `length [B]` rows the first stands at 0 and the last, as all after it, at 1; a single row at 0. Times the values
    at the knots `[pieces + 1, W]` it gives the function `[B, N, W]` at the rows.
    """
    exact = torch.promote_types(dtype, torch.float32)
    rank = torch.arange(number, device=length.device, dtype=exact)
    knot = torch.arange(pieces + 1, device=length.device, dtype=exact)
    place = (rank / (length[:, None] - 1).clamp(min=1)).clamp(max=1)
    return (1 - (place[..., None] * pieces - knot).abs()).clamp(min=0).to(dtype)


@AGGREGATORS.register("fspool", "sorted values with learned weights; samples with many rows")
class FSPool(Pooling):
    """A weighted sum of each feature's sorted values; the weights are a learned function of the relative rank.

    Every feature has its own piecewise linear function, so that sets of any size can be pooled. The weights need
    not add up to one.
    """

    def __init__(self, local_dim: int, dim: int) -> None:
        super().__init__(local_dim, dim)
        self.weight = nn.Parameter(torch.randn(PIECES + 1, dim))

    def pool(self, local: Tensor, length: Tensor) -> Tensor:
        """Return the weighted sum of the sorted rows."""
        rows = sorted_rows(local, length)
        shares = interpolation(length.to(local.device), local.shape[1], len(self.weight) - 1, rows.dtype)
        # Summed over the rows first: as many terms as there are knots remain, however long the sample.
        return ((shares.transpose(1, 2) @ rows) * self.weight).sum(1)


def generalised_mean(local: Tensor, length: Tensor, p: Tensor) -> Tensor:
    """Return `(mean of x^p)^(1/p)` over the first `length[b]` rows of `local [B, N, C]`, `[B, C]`; zeros for no rows.

    The scalar p is above 0. Values below 1e-6, all negative ones among them, count as 1e-6 and get no gradient. The
    largest value of a feature is divided out before the power is taken and multiplied back after the root, which
    changes neither value nor gradient: no power overflows, and the mean lies between 1/N and 1, however large p is.
    """
    valid = valid_rows(local, length)
    # Roots and powers need float32.
    dtype = torch.promote_types(local.dtype, torch.float32)
    rows = local.to(dtype).masked_fill(~valid[..., None], 0).clamp(min=FLOOR)
    largest = rows.amax(1, keepdim=True).detach()
    powers = (rows / largest).pow(p.to(dtype)).masked_fill(~valid[..., None], 0)
    empty = ~valid.any(1)[:, None]
    # An empty sample has the mean 0, whose root has no finite slope.
    mean = (powers.sum(1) / length.to(powers).clamp(min=1)[:, None]).masked_fill(empty, 1)
    return (largest[:, 0] * mean.pow(1 / p.to(dtype))).masked_fill(empty, 0).to(local.dtype)


@AGGREGATORS.register("gem", "a learned power between mean and maximum")
class GeM(Pooling):
    """Generalised mean pooling: one learned exponent, from the average (p = 1) to the maximum (p to infinity).

    The exponent is 1 + softplus of the weight, so that it stays above 1, where no slope grows without bound.
    """

    def __init__(self, local_dim: int, dim: int) -> None:
        super().__init__(local_dim, dim)
        self.weight = nn.Parameter(
            torch.tensor(BEGIN - 1 + math.log(-math.expm1(1 - BEGIN)))
        )  # the inverse of softplus

    @property
    def p(self) -> Tensor:
        """The exponent, a scalar."""
        return 1 + functional.softplus(self.weight)

    def pool(self, local: Tensor, length: Tensor) -> Tensor:
        """Return the generalised mean."""
        return generalised_mean(local, length, self.p)
