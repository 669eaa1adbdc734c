"""Aggregators without weights: the global feature as it is, and what can be read off the local rows.

Source: *Learning the Best Pooling Strategy for Visual Semantic Embedding* (VSE-infinity, CVPR 2021), sections 3.2
and 5.2.
"""

from abc import abstractmethod

import torch
from torch import Tensor

from ..embedding import Sequence
from ..padding import last_row, max_rows, mean_rows, valid_rows, zero_padding
from ..parameters import Few
from .aggregated import AGGREGATORS, Aggregated, Aggregator


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
