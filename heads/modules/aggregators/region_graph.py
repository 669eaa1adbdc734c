"""Region graph: the local rows inform each other by graph convolutions, then a GRU reads them.

Source: Li et al., *Visual Semantic Reasoning for Image-Text Matching* (VSRN, ICCV 2019), sections 3.2 and 3.3, and its
public code; VSE-infinity's Table 1 has it with average pooling (by its number of weights: one layer) and with a GRU
(four).
"""

from typing import Literal

from torch import Tensor, nn
from torch.nn import functional

from ..embedding import Sequence
from ..padding import valid_rows, zero_padding
from ..projections import RowNorm, on_valid_rows
from .aggregated import AGGREGATORS, Aggregated, Aggregator
from .pooling import Average
from .sequence_pooling import Seq2Seq

LAYERS = 4  # graph convolutions, as in the public code

Then = Literal["gru", "average"]
Normalise = Literal["rows", "regions", "regions-after"]


class RegionGraphLayer(nn.Module):
    """One graph convolution with a residual over a fully connected graph of rows (VSRN eq. 2 and 3).

    What is added is normalised over all valid rows of the batch, as in the public code; it begins at zero.

    Args:
        dim: width D of the rows.
        divide: divide the affinities by the number of rows, as the public code does and the paper does not.
    """

    def __init__(self, dim: int, *, divide: bool = True) -> None:
        super().__init__()
        self.theta = nn.Linear(dim, dim)
        self.phi = nn.Linear(dim, dim)
        self.value = nn.Linear(dim, dim)
        self.out = nn.Linear(dim, dim)
        self.norm = RowNorm(dim)
        self.divide = divide
        nn.init.zeros_(self.norm.weight)
        nn.init.zeros_(self.norm.bias)

    def affinity(self, rows: Tensor, length: Tensor) -> Tensor:
        """Return how much each row takes from each other, `[B, N, N]`; zero from padding."""
        scores = self.theta(rows) @ self.phi(rows).transpose(1, 2)
        scores = scores.masked_fill(~valid_rows(rows, length)[:, None], 0)
        return scores / length.to(scores).clamp(min=1)[:, None, None] if self.divide else scores

    def forward(self, rows: Tensor, length: Tensor) -> Tensor:
        """Return the new rows of `rows [B, N, D]`, whose padding must be finite; zeros on padding."""
        values = self.value(rows)
        change = self.out(self.affinity(rows, length).to(values.dtype) @ values)
        change = on_valid_rows(self.norm, change, length).to(change.dtype)
        return zero_padding(rows + change, length)


@AGGREGATORS.register("region-graph", "regions that stand in relation to each other")
class RegionGraph(Aggregator):
    """Graph convolutions over the local rows, then a GRU's last state or their average.

    Args:
        divide: see `RegionGraphLayer`.
        then: `gru`: the state after the last row (VSRN; VSE-infinity's Seq2Seq); `average`: of the rows, where
            `local_dim` must be `dim`.
        normalise: what is divided by its norm before and after the graph. `rows`: each row, as the paper means it.
            `regions`: each channel, over all rows of a sample; so VSRN's public code, whose `l2norm` sums over dim 1 of
            `[B, N, D]`. `regions-after`: that after the graph alone, and the embedding goes through a batch
            normalisation; so that code on Flickr30K.
    """

    def __init__(
        self, local_dim: int, dim: int, *, divide: bool = True, then: Then = "gru", normalise: Normalise = "rows"
    ) -> None:
        super().__init__(local_dim, dim)
        self.normalise, self.over = normalise, 2 if normalise == "rows" else 1
        self.layers = nn.ModuleList(RegionGraphLayer(local_dim, divide=divide) for _ in range(LAYERS))
        self.read = (Seq2Seq if then == "gru" else Average)(local_dim, dim)
        self.norm = RowNorm(dim) if normalise == "regions-after" else nn.Identity()

    def forward(self, local: Tensor, length: Tensor, global_: Tensor) -> Aggregated:
        """Aggregate `local [B, N, C]`, of which the first `length[b]` rows count.

        Returns:
            The vector `[B, D]` and the rows after the graph `[B, N, C]`, zero on padding.
        """
        rows = zero_padding(local, length)
        if self.normalise != "regions-after":
            rows = functional.normalize(rows, dim=self.over)
        for layer in self.layers:
            rows = layer(rows, length)
        rows = functional.normalize(rows, dim=self.over)
        embedding = self.norm(self.read(rows, length, global_).embedding)
        return Aggregated(embedding, rows=Sequence(rows, length))
