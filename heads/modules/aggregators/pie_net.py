"""PIE-Net: an embedding set by K-head self-attention, each head a residual to the global feature.

Source: Song, Soleymani: *Polysemous Visual-Semantic Embedding for Cross-Modal Retrieval* (PVSE, CVPR 2019), section
3; the widths are its published code's.
"""

from torch import Tensor, nn

from ..padding import softmax, valid_rows, zero_padding
from ..parameters import Few
from .aggregated import AGGREGATORS, Aggregated, Aggregator


@AGGREGATORS.register("pie-net", "a few attended vectors around the global one")
class PIENet(Aggregator):
    """K attention maps over the local rows, each pooled into a residual that is added to the global feature.

    The hidden width of the attention is half of the local rows' width, as published.

    Args:
        slots: size K of the set; 2 as published for COCO.
    """

    uses_global = True
    embedding = "set"

    def __init__(self, local_dim: int, dim: int, *, slots: Few = 2) -> None:
        super().__init__(local_dim, dim)
        hidden = max(local_dim // 2, 1)
        self.hidden = nn.Linear(local_dim, hidden, bias=False)
        self.score = nn.Linear(hidden, slots, bias=False)
        self.residual = nn.Linear(local_dim, dim)
        self.norm = nn.LayerNorm(dim)
        for layer in (self.hidden, self.score, self.residual):
            nn.init.xavier_uniform_(layer.weight)
        nn.init.zeros_(self.residual.bias)

    def forward(self, local: Tensor, length: Tensor, global_: Tensor) -> Aggregated:
        """Aggregate `local [B, N, C]`, of which the first `length[b]` rows count, and `global_ [B, D]`.

        Returns:
            The set `[B, K, D]`, the residuals `[B, K, D]` as slots, and the attention `[1, B, 1, K, N]`, which adds
            up to one over the rows.
        """
        rows = zero_padding(local, length)
        scores = self.score(self.hidden(rows).tanh()).transpose(1, 2)
        attention = softmax(scores, valid_rows(local, length)[:, None], 2)
        residual = self.residual(attention.to(rows.dtype) @ rows).sigmoid()
        return Aggregated(self.norm(global_[:, None] + residual), residual, attention[None, :, None])
