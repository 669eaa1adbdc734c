"""GPO: pooling by learned coefficients over each feature's sorted values.

Source: *Learning the Best Pooling Strategy for Visual Semantic Embedding* (VSE-infinity, CVPR 2021), eq. 2-5; its
ablations are Table 10 (generators), Table 11 (coefficients of each dimension) and Table 12 (features as input).
The published code counts positions from 0 and the paper from 1; it has one linear layer without bias where eq. 5 has
an MLP, averages the directions of the GRU, and divides the scores by 0.1 before the softmax: so it is done here. A GPO
has then 12,704 weights, where section 5 speaks of 0.1M in total.
"""

from typing import Literal

import torch
from torch import Tensor, nn

from ....pipeline.device import may_wait
from ..padding import softmax, valid_rows
from ..positions import sinusoids
from ..recurrence import run_packed
from .aggregated import AGGREGATORS
from .pooling import PIECES, Pooling, interpolation, sorted_rows

Generator = Literal["cos-sin-bigru", "cos-sin-mlp", "index-bigru", "interpolation"]

POSITION_DIM, HIDDEN_DIM = 32, 32  # of a rank's encoding and of the generator (section 5)
TEMPERATURE = 0.1  # divides the scores before the softmax over the ranks
INDICES = 256  # of the learned matrix: positions after the last share its row


def cos_sin_positions(number: int, width: int, like: Tensor) -> Tensor:
    """Return the encodings `[N, width]` of the positions 0 to N - 1 (eq. 4), on the device and in the dtype of `like`.

    Columns 2i and 2i + 1 hold sine and cosine of the position over 10000^(2i/width).
    """
    steps = torch.arange(number, device=like.device, dtype=torch.promote_types(like.dtype, torch.float32))
    return sinusoids(steps, width).to(like.dtype)


@AGGREGATORS.register("gpo", "learns how to pool: the best vector of regions and frames")
class GPO(Pooling):
    """Generalised pooling operator: a generator turns each rank and the number of rows into a coefficient.

        >>> GPO(8, 8)(torch.randn(2, 5, 8), torch.tensor([5, 3]), torch.randn(2, 8)).embedding.shape
        torch.Size([2, 8])

    Args:
        generator: what scores the ranks (Table 10): a bi-GRU or an MLP over their cosine and sine encodings, a bi-GRU
            over a learned row for each rank, or a learned vector that is interpolated to the number of rows.
        per_dimension: coefficients for every dimension instead of shared ones (Table 11).
        feature_input: the generator also reads the values of each rank, so that its coefficients depend on the sample
            (Table 12). Not for `interpolation`, which reads nothing.
    """

    def __init__(
        self,
        local_dim: int,
        dim: int,
        *,
        generator: Generator = "cos-sin-bigru",
        per_dimension: bool = False,
        feature_input: bool = False,
    ) -> None:
        super().__init__(local_dim, dim)
        if feature_input and generator == "interpolation":
            raise ValueError("GPO: feature_input is true, but must be false where generator is 'interpolation'")
        self.generator, self.per_dimension, self.feature_input = generator, per_dimension, feature_input
        inputs = POSITION_DIM + dim * feature_input
        outputs = dim if per_dimension else 1
        if generator == "interpolation":
            self.knots = nn.Parameter(torch.zeros(PIECES + 1, outputs))  # begins as average pooling
        elif generator == "cos-sin-mlp":
            self.mlp = nn.Sequential(
                nn.Linear(inputs, HIDDEN_DIM), nn.ReLU(), nn.Linear(HIDDEN_DIM, outputs, bias=False)
            )
        else:
            self.gru = nn.GRU(inputs, HIDDEN_DIM, batch_first=True, bidirectional=True)
            self.linear = nn.Linear(HIDDEN_DIM, outputs, bias=False)
        if generator == "index-bigru":
            self.index = nn.Embedding(INDICES, POSITION_DIM)

    def pool(self, local: Tensor, length: Tensor) -> Tensor:
        """Return the weighted sum of the sorted rows (eq. 2)."""
        rows, length = sorted_rows(local, length), length.to(local.device).clamp(min=1)
        if may_wait(rows):
            rows = rows[:, : int(length.max())]
        samples, number = rows.shape[:2]
        if self.feature_input:
            weights = self._coefficients(length, number, rows)
        elif may_wait(rows):  # samples of the same length share their coefficients
            lengths, which = length.unique(return_inverse=True)
            weights = self._coefficients(lengths, number).index_select(0, which)
        elif rows.is_cpu or number > samples:  # a traced graph knows neither number
            weights = self._coefficients(length, number)
        else:
            every = torch.arange(1, number + 1, device=length.device)
            weights = self._coefficients(every, number).index_select(0, length - 1)
        weights = weights.to(rows.dtype)
        return (weights * rows).sum(1) if self.per_dimension else (weights[:, None] @ rows)[:, 0]

    def coefficients(self, length: Tensor, number: int) -> Tensor | None:
        """Return the weight of each rank, from the largest value to the smallest; None with `feature_input`.

        Every sample's first `length[b]` add up to one, the others are 0; a length of 0 counts as 1.
        """
        length = length.to(next(self.parameters()).device).clamp(min=1)
        return None if self.feature_input else self._coefficients(length, number)

    def _coefficients(self, length: Tensor, number: int, rows: Tensor | None = None) -> Tensor:
        """Return the same of lengths of at least 1, with `feature_input` for sorted rows `[B, N, D]`."""
        scores = self._scores(length, number, rows)
        weights = softmax(scores / TEMPERATURE, valid_rows(scores, length)[..., None], 1)
        return weights if self.per_dimension else weights[..., 0]

    def _scores(self, length: Tensor, number: int, rows: Tensor | None) -> Tensor:
        """Score the ranks of samples, `[B, number, 1 or D]`, from their sorted rows where these are given."""
        if self.generator == "interpolation":
            return interpolation(length, number, PIECES, self.knots.dtype) @ self.knots
        if self.generator == "index-bigru":
            rank = torch.arange(number, device=self.index.weight.device)
            positions = self.index(rank.clamp(max=INDICES - 1))
        else:
            positions = cos_sin_positions(number, POSITION_DIM, next(self.parameters()))
        inputs = positions.expand(length.shape[0], -1, -1)
        if rows is not None:
            inputs = torch.cat([inputs, rows.to(inputs)], dim=2)
        if self.generator == "cos-sin-mlp":
            return self.mlp(inputs)
        states, _ = run_packed(self.gru, inputs, length)
        return self.linear(states().unflatten(2, (2, -1)).mean(2))
