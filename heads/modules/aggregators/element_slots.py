"""Element slots: an embedding set by slot attention.

Source: *Improving Cross-Modal Retrieval with Set of Diverse Embeddings* (SetDiv, CVPR 2023), section 3.2,
eq. 1-5. The paper has one head, its published code several: `heads`. `initial`, `update`, `global_feature` and
`normalized_over` are its ablations (Table 3 and appendix B.3), which lead back to slot attention (Locatello et al.,
NeurIPS 2020) and to the transformer.
"""

from typing import Literal

import torch
from torch import Tensor, nn

from ..dropout import Dropout
from ..padding import softmax, valid_rows
from ..parameters import Few, Rate, Width
from ..positions import Positions, circle_positions, grid_positions
from .aggregated import AGGREGATORS, Aggregated, Aggregator

Initial = Literal["learned", "gaussian"]
Update = Literal["residual", "gru"]
NormalizedOver = Literal["slots", "inputs"]


class AggregationBlock(nn.Module):
    """One round in which the slots compete for the local features (SetDiv eq. 2-4).

    Args:
        dim: width D of a slot.
        heads: number of attention heads H.
        head_dim: width of a head; keys and values are H times as wide.
        update: how what a slot has gathered changes it: added to it, or as the input of a GRU whose state it is.
        normalized_over: what the attention adds up to one over.
        dropout: share of what the attention gives, and of the perceptron's hidden values, that is zero in training.
    """

    def __init__(
        self, dim: int, heads: int, head_dim: int, update: Update, normalized_over: NormalizedOver, dropout: float
    ) -> None:
        super().__init__()
        self.heads = heads
        self.normalized_over = normalized_over
        self.norm = nn.LayerNorm(dim)
        self.query = nn.Linear(dim, heads * head_dim, bias=False)
        self.out = nn.Linear(heads * head_dim, dim)
        self.dropout = Dropout(dropout)
        hidden = nn.Sequential(nn.GELU(), Dropout(dropout))
        self.mlp = nn.Sequential(nn.LayerNorm(dim), nn.Linear(dim, 4 * dim), hidden, nn.Linear(4 * dim, dim))
        self.gru = nn.GRUCell(dim, dim) if update == "gru" else None

    def forward(self, slots: Tensor, keys: Tensor, values: Tensor, padding: Tensor) -> tuple[Tensor, Tensor]:
        """Update the slots once.

        Args:
            slots: `[B, K, D]`.
            keys: projected local features `[B, H, N, head_dim]`.
            values: the same shape.
            padding: True for the rows that take no part, `[B, N]`.

        Returns:
            The new slots `[B, K, D]`, and the attention `[B, H, K, N]`, which adds up to one over slots or inputs.
        """
        queries = _split_heads(self.query(self.norm(slots)), self.heads)
        scores = queries @ keys.transpose(2, 3) / keys.shape[3] ** 0.5
        attention, share = self._attend(scores, padding[:, None, None])
        updates = self.dropout(self.out((share.to(values.dtype) @ values).transpose(1, 2).flatten(2)))
        if self.gru is None:
            slots = slots + updates
        else:
            slots = self.gru(updates.to(slots.dtype).flatten(0, 1), slots.flatten(0, 1)).view_as(slots)
        return slots + self.mlp(slots), attention

    def _attend(self, scores: Tensor, padding: Tensor) -> tuple[Tensor, Tensor]:
        """Return the attention, and the share of each row in a slot's update, both of the shape `[B, H, K, N]`."""
        if self.normalized_over == "inputs":
            attention = softmax(scores, ~padding, 3)
            return attention, attention
        attention = scores.softmax(2).masked_fill(padding, 0)
        # The small constant keeps a slot that wins nothing (or a sample without rows) from dividing by zero.
        return attention, attention / (attention.sum(3, keepdim=True) + 1e-7)


class GaussianSlots(nn.Module):
    """Slots drawn from a Gaussian with a learned mean and deviation, as slot attention draws them.

    Training draws for every sample anew; evaluation takes the same K draws, stored with the weights, for every sample.
    """

    noise: Tensor

    def __init__(self, slots: int, dim: int) -> None:
        super().__init__()
        self.mean = nn.Parameter(nn.init.xavier_uniform_(torch.empty(1, dim)))
        self.log_std = nn.Parameter(nn.init.xavier_uniform_(torch.empty(1, dim)))
        self.register_buffer("noise", torch.randn(slots, dim))

    def forward(self, samples: int) -> Tensor:
        """Return the initial slots of `samples` samples, `[B, K, D]`."""
        noise = self.noise.expand(samples, -1, -1)
        return self.mean + self.log_std.exp() * (torch.randn_like(noise) if self.training else noise)


@AGGREGATORS.register("element-slots", "sets whose slots compete for rows: ambiguous pictures")
class ElementSlots(Aggregator):
    """T rounds of one shared block over learnable slots, then fusion with the global feature (eq. 1, 5).

    Args:
        slots: size K of the set.
        iterations: number of rounds T.
        heads: number of attention heads.
        head_dim: width of a head, the paper's D_h; None divides `dim` among the heads.
        positions: what is added to what the keys are projected from: `none`; `circle`, each row's number on a circle;
            `grid`, row and column of a convolutional map's cells (footnote 1). Other features than a map's have no
            such places: `model.build_model` gives them none.
        initial: the slots to begin with: one learned vector each, or drawn from one learned Gaussian.
        update: a residual sum (eq. 3), or the GRU of slot attention in its place.
        global_feature: add the global feature to every slot (eq. 5).
        normalized_over: the slots, which then compete for the rows (eq. 2), or the inputs, as in a transformer.
        dropout: see `AggregationBlock` (published code); drawn anew in every round.
    """

    embedding = "set"

    def __init__(
        self,
        local_dim: int,
        dim: int,
        *,
        slots: Few = 4,
        iterations: Few = 4,
        heads: Few = 1,
        head_dim: Width | None = None,
        positions: Positions = "none",
        initial: Initial = "learned",
        update: Update = "residual",
        global_feature: bool = True,
        normalized_over: NormalizedOver = "slots",
        dropout: Rate = 0.0,
    ) -> None:
        super().__init__(local_dim, dim)
        if head_dim is None and dim % heads:
            raise ValueError(f"ElementSlots: {heads} heads do not divide dim {dim}: set head_dim")
        head_dim = head_dim or dim // heads
        self.heads = heads
        self.iterations = iterations
        self.positions = positions
        self.uses_place = positions == "grid"
        self.uses_global = global_feature
        self.initial = initial
        if initial == "gaussian":
            self.gaussian_slots = GaussianSlots(slots, dim)
        else:
            self.initial_slots = nn.Parameter(torch.randn(slots, dim))
        self.norm_local = nn.LayerNorm(local_dim)
        self.key = nn.Linear(local_dim, heads * head_dim, bias=False)
        self.value = nn.Linear(local_dim, heads * head_dim, bias=False)
        self.block = AggregationBlock(dim, heads, head_dim, update, normalized_over, dropout)
        self.norm_slots = nn.LayerNorm(dim)
        self.norm_global = nn.LayerNorm(dim) if global_feature else None

    def forward(self, local: Tensor, length: Tensor, global_: Tensor, place: Tensor | None = None) -> Aggregated:
        """Aggregate `local [B, N, C]`, of which the first `length[b]` rows count, and `global_ [B, D]`.

        Args:
            local, length, global_: as of every aggregator.
            place: of `positions` `grid`, see `positions.grid_positions`.

        Returns:
            The set `[B, K, D]`, the slots before fusion `[B, K, D]` and the attention `[T, B, H, K, N]`.
        """
        padding = ~valid_rows(local, length)
        rows = self.norm_local(local.masked_fill(padding[..., None], 0))
        values = _split_heads(self.value(rows), self.heads)
        if self.positions == "circle":
            rows = rows + circle_positions(rows, length)
        elif self.positions == "grid":
            rows = rows + grid_positions(rows, place)
        keys = _split_heads(self.key(rows), self.heads)
        if self.initial == "gaussian":
            slots = self.gaussian_slots(len(local))
        else:
            slots = self.initial_slots.expand(len(local), -1, -1)
        attention = []
        for _ in range(self.iterations):
            slots, weights = self.block(slots, keys, values, padding)
            attention.append(weights)
        slots = self.norm_slots(slots)
        fused = slots if self.norm_global is None else slots + self.norm_global(global_)[:, None]
        return Aggregated(fused, slots, torch.stack(attention))


def _split_heads(x: Tensor, heads: int) -> Tensor:
    return x.unflatten(2, (heads, -1)).transpose(1, 2)
