"""Aggregators that let the local rows see each other: self-attention, and a GRU that reads them in order.

Source: the complex aggregators of VSE-infinity's Table 1, which gives nothing but their numbers of weights:
3.2M (three projections of 1024 to 1024) for self-attention and 6.3M (a GRU of 1024) for Seq2Seq.
"""

import torch
from torch import Tensor, nn

from ..embedding import Sequence
from ..padding import last_row, mean_rows, softmax, valid_rows, zero_padding
from ..recurrence import run_gru, run_onnx
from .aggregated import AGGREGATORS, Aggregated, Aggregator
from .pooling import Pooling


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
