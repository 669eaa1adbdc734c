"""Row transformer: what stands out among the rows, and the mean of rows that have seen each other.

Source: Fu et al., *Learning Semantic Relationship among Instances for Image-Text Matching* (HREM, CVPR 2023), its
fragment-level relations, with the values of the public code. There a sample of one row lets all samples after it in the
batch give their maximum alone; here each has its two largest values.
"""

import torch
from torch import Tensor

from ..padding import mean_rows, valid_rows, zero_padding
from ..parameters import Few, Rate, Share, Width
from ..transformer import TransformerLayer
from .aggregated import AGGREGATORS
from .pooling import KMax, Pooling


@AGGREGATORS.register("row-transformer", "rows see each other, beside embedding-graph")
class RowTransformer(Pooling):
    """The k largest values of each feature, averaged, mixed with the mean of the rows after a transformer's layer.

    Args:
        residual: the share of the largest values in the sum.
        k: how many of them.
        head_dim, dropout: of the layer, see `TransformerLayer`.
    """

    def __init__(
        self, local_dim: int, dim: int, *, residual: Share = 0.8, k: Few = 2, head_dim: Width = 64, dropout: Rate = 0.1
    ) -> None:
        super().__init__(local_dim, dim)
        self.residual = residual
        self.largest = KMax(local_dim, dim, k=k)
        self.layer = TransformerLayer(dim, head_dim, dropout)

    def pool(self, local: Tensor, length: Tensor) -> Tensor:
        """Return the weighted sum of both."""
        # A finite number: a sample without rows must not become NaN.
        bias = ~valid_rows(local, length)[:, None, None] * (torch.finfo(torch.float32).min / 2)
        related = self.layer(zero_padding(local, length), bias)
        return self.residual * self.largest.pool(local, length) + (1 - self.residual) * mean_rows(related, length)
