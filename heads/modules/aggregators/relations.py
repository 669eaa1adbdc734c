"""Aggregators that let the rows of a sample see each other: attention, a GRU, graph convolutions, a transformer.

Sources: the complex aggregators of VSE-infinity's Table 1, which gives nothing but their numbers of weights: 3.2M
(three projections of 1024 to 1024) for self-attention and 6.3M (a GRU of 1024) for Seq2Seq. Li et al., *Visual Semantic
Reasoning for Image-Text Matching* (VSRN, ICCV 2019), sections 3.2 and 3.3, and its public code; that table has it with
average pooling (by its number of weights: one layer) and with a GRU (four). Fu et al., *Learning Semantic Relationship
among Instances for Image-Text Matching* (HREM, CVPR 2023), its fragment-level relations, with the values of the public
code. There a sample of one row lets all samples after it in the batch give their maximum alone; here each has its two
largest values.
"""

from typing import Literal

import torch
from torch import Tensor, nn
from torch.nn import functional

from ..dropout import Dropout
from ..embedding import Sequence
from ..padding import last_row, mean_rows, softmax, valid_rows, zero_padding
from ..parts import Few, Rate, Share, Width
from ..projections import RowNorm, on_valid_rows
from ..recurrence import run_gru, run_onnx
from .aggregated import AGGREGATORS, Aggregated, Aggregator
from .pooling import Average, KMax, Pooling

LAYERS = 4  # graph convolutions, as in VSRN's public code

Then = Literal["gru", "average"]
Normalise = Literal["rows", "regions", "regions-after"]


@AGGREGATORS.register("self-attention", "a learned weight for each row")
class SelfAttention(Pooling):
    """One head of self-attention with a residual over the local rows, then their average (SelfAttn, Table 1)."""

    def __init__(self, local_dim: int, dim: int) -> None:
        super().__init__(local_dim, dim)
        self.query = nn.Linear(dim, dim, bias=False)
        self.key = nn.Linear(dim, dim, bias=False)
        self.value = nn.Linear(dim, dim, bias=False)

    def forward(self, local: Tensor, length: Tensor, global_: Tensor) -> Aggregated:
        """Return the average of the rows after attention, `[B, D]`, and the rows `[B, N, D]`, zero on padding."""
        rows = zero_padding(local, length)
        scores = self.query(rows) @ self.key(rows).transpose(1, 2) / rows.shape[2] ** 0.5
        attention = softmax(scores, valid_rows(local, length)[:, None], 2)
        rows = zero_padding(rows + attention.to(rows.dtype) @ self.value(rows).to(rows.dtype), length)
        return Aggregated(mean_rows(rows, length), rows=Sequence(rows, length))


@AGGREGATORS.register("seq2seq", "a weight for each row by a recurrent network: frames of videos")
class Seq2Seq(Aggregator):
    """A GRU reads the local rows in their order; its last state is the embedding (Seq2Seq, Table 1)."""

    def __init__(self, local_dim: int, dim: int) -> None:
        super().__init__(local_dim, dim)
        self.gru = nn.GRU(local_dim, dim, batch_first=True)

    def forward(self, local: Tensor, length: Tensor, global_: Tensor) -> Aggregated:
        """Return the GRU's state after the last valid row of `local [B, N, C]`, `[B, D]`; zeros for no rows."""
        if torch.compiler.is_exporting():
            return Aggregated(run_onnx(self.gru, local, length)[1][0])
        # Rows come before their padding: a GRU that reads forwards needs no packed batch (slow on CPUs).
        states, _ = run_gru(self.gru, zero_padding(local, length))
        return Aggregated(last_row(states, length))


class RegionGraphLayer(nn.Module):
    """One graph convolution with a residual over a fully connected graph of rows (VSRN eq. 2 and 3).

    What is added is normalised over all valid rows of the batch, as in the public code; it begins at zero.

    Args:
        dim: width D of the rows.
        divide: divide the affinities by the number of rows, as the public code does and the paper does not.
    """

    def __init__(self, dim: int, *, divide: bool) -> None:
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
        """Return the vector `[B, D]` and the rows after the graph `[B, N, C]`, zero on padding."""
        rows = zero_padding(local, length)
        if self.normalise != "regions-after":
            rows = functional.normalize(rows, dim=self.over)
        for layer in self.layers:
            rows = layer(rows, length)
        rows = functional.normalize(rows, dim=self.over)
        embedding = self.norm(self.read(rows, length, global_).embedding)
        return Aggregated(embedding, rows=Sequence(rows, length))


class TransformerLayer(nn.Module):
    """Attention of rows to each other and a perceptron, each added to its input and normalised (post-norm, as torch's).

    Args:
        dim: width D of the rows and of the perceptron's hidden layer.
        head_dim: width of a head; narrower rows have one head. ValueError where it does not divide a larger `dim`.
        dropout: share of the attention, of the hidden values and of both results that is zero while training.
    """

    def __init__(self, dim: int, head_dim: int, dropout: float) -> None:
        super().__init__()
        if dim % min(head_dim, dim):
            raise ValueError(f"heads of width {head_dim} do not divide rows of width {dim}: set head_dim")
        self.heads = max(1, dim // head_dim)
        self.project = nn.Linear(dim, 3 * dim)  # to queries, keys and values
        self.out = nn.Linear(dim, dim)
        self.mlp = nn.Sequential(nn.Linear(dim, dim), nn.ReLU(), Dropout(dropout), nn.Linear(dim, dim))
        self.dropout = Dropout(dropout)
        self.norms = nn.ModuleList(nn.LayerNorm(dim) for _ in range(2))
        nn.init.xavier_uniform_(self.project.weight)
        nn.init.zeros_(self.project.bias)
        nn.init.zeros_(self.out.bias)

    def forward(self, rows: Tensor, bias: Tensor) -> Tensor:
        """Return the new rows of `rows [..., N, D]`; `bias [..., H or 1, N or 1, N]` is added to their scores."""
        projected = self.project(rows).unflatten(-1, (3, self.heads, -1))
        queries, keys, values = projected.movedim(-3, 0).transpose(-3, -2).unbind()
        scores = queries @ keys.transpose(-2, -1) / keys.shape[-1] ** 0.5 + bias
        gathered = self.dropout(scores.softmax(-1).to(values.dtype)) @ values
        after_attention, after_mlp = self.norms
        rows = after_attention(rows + self.dropout(self.out(gathered.transpose(-3, -2).flatten(-2))))
        return after_mlp(rows + self.dropout(self.mlp(rows)))


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
