"""Embedding sets: by slot attention, and by K-head self-attention around the global feature.

Sources: *Improving Cross-Modal Retrieval with Set of Diverse Embeddings* (SetDiv, CVPR 2023), section 3.2,
eq. 1-5. The paper has one head, its published code several: `heads`. `initial`, `update`, `global_feature` and
`normalized_over` are its ablations (Table 3 and appendix B.3), which lead back to slot attention (Locatello et al.,
NeurIPS 2020) and to the transformer.
Song, Soleymani: *Polysemous Visual-Semantic Embedding for Cross-Modal Retrieval* (PVSE, CVPR 2019), section 3, for
PIE-Net; the widths are its published code's.
"""

import math
from typing import Literal

import torch
from torch import Tensor, nn
from torch.nn import functional

from ..dropout import Dropout
from ..padding import softmax, valid_rows, zero_padding
from ..parts import Few, Rate, Width
from ..positions import Positions, circle_positions, grid_positions
from .aggregated import AGGREGATORS, Aggregated, Aggregator

Initial = Literal["learned", "gaussian"]
Update = Literal["residual", "gru"]
NormalizedOver = Literal["slots", "inputs"]

SMALL = 1e-7  # of each slot's attention nothing takes as much (published code), so that it can be divided by its sum
LOWEST = torch.finfo(torch.float32).min / 2  # added to the scores of padding
NOTHING = (0, 0, 0, 1)  # pads rows with one of zeros


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
        self.heads, self.normalized_over = heads, normalized_over
        self.norm = nn.LayerNorm(dim)
        self.query = nn.Linear(dim, heads * head_dim, bias=False)
        self.out = nn.Linear(heads * head_dim, dim)
        self.dropout = Dropout(dropout)
        hidden = nn.Sequential(nn.GELU(), Dropout(dropout))
        self.mlp = nn.Sequential(nn.LayerNorm(dim), nn.Linear(dim, 4 * dim), hidden, nn.Linear(4 * dim, dim))
        self.gru = nn.GRUCell(dim, dim) if update == "gru" else None

    def forward(
        self, slots: Tensor, keys: Tensor, values: Tensor, bias: Tensor, read: Tensor, write: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Return the new slots `[B, K, D]`, and the scores `[B, K, H, N]`.

        Scores are the logarithm of the attention over slots, or what its softmax over inputs is taken of.

        Args:
            slots: `[B, K, D]`, or `[1, K, D]` where they are the same for all samples.
            keys: what the slots compete for, `[B, N, C]`; the last one is zero, and is nothing.
            values: what they gather, the same shape.
            bias: what is added to the scores of the rows, `[B, 1, 1, N]`.
            read: the weights of queries times those of keys, `[H C, D]`; see `through_heads`.
            write: the weights of values times those of the output, `[H C, D]`.
        """
        number = slots.shape[1]
        queries = (self.norm(slots).flatten(0, 1) @ read.T).view(slots.shape[0], number * self.heads, -1)
        scores = torch.bmm(queries.expand(keys.shape[0], -1, -1), keys.transpose(1, 2)).unflatten(
            1, (number, self.heads)
        )
        if self.normalized_over == "slots":
            scores = scores.log_softmax(1)
        scores = scores + bias
        gathered = torch.bmm(scores.softmax(3).flatten(1, 2).to(values.dtype), values)
        updates = functional.linear(gathered.view(keys.shape[0], number, -1), write.T, self.out.bias)
        updates = self.dropout(updates)
        if self.gru is None:
            slots = slots + updates
        else:
            state = slots.expand_as(updates).flatten(0, 1)
            slots = self.gru(updates.to(slots.dtype).flatten(0, 1), state).view_as(updates)
        return slots + self.mlp(slots), scores


def through_heads(rows: Tensor, slots: Tensor, heads: int) -> Tensor:
    """Return the product of two projections to H heads of width W, `[H C, D]`, of `[H W, C]` and `[H W, D]`.

    A slot's product with a key is its product, by these weights, with the row itself, and what it gathers of values is
    what it gathers of rows: they need no projection, which costs more than the products of the weights.
    """
    return (rows.unflatten(0, (heads, -1)).transpose(1, 2) @ slots.unflatten(0, (heads, -1))).flatten(0, 1)


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
        self.heads, self.head_dim = heads, head_dim
        self.iterations, self.positions = iterations, positions
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

    def forward(
        self,
        local: Tensor,
        length: Tensor,
        global_: Tensor,
        place: Tensor | None = None,
        grid: tuple[int, int] | None = None,
    ) -> Aggregated:
        """Return the set `[B, K, D]`, the slots before fusion `[B, K, D]` and the attention `[T, B, H, K, N]`.

        `place` and `grid` are for `positions` `grid`, see `positions.grid_positions`.
        """
        padding = ~valid_rows(local, length)
        rows = self.norm_local(local.masked_fill(padding[..., None], 0))
        places = None
        if self.positions == "circle":
            places = circle_positions(rows, length)
        elif self.positions == "grid":
            places = grid_positions(rows, place, grid)
        values = functional.pad(rows, NOTHING)
        keys = values if places is None else values + functional.pad(places, NOTHING)
        slots = self.gaussian_slots(local.shape[0]) if self.initial == "gaussian" else self.initial_slots[None]
        block, rounds = self.block, []
        over_slots = block.normalized_over == "slots"
        # Nothing's score is 0 for all K slots: each has a logarithm of 1/K of it.
        nothing = math.log(SMALL * slots.shape[1]) if over_slots else LOWEST / 2
        bias = functional.pad(padding * LOWEST, (0, 1), value=nothing)[:, None, None]
        read = through_heads(self.key.weight, block.query.weight * self.head_dim**-0.5, self.heads)
        write = through_heads(self.value.weight, block.out.weight.T, self.heads)
        for _ in range(self.iterations):
            slots, scores = block(slots, keys, values, bias, read, write)
            rounds.append(scores)
        scores = torch.stack(rounds).transpose(2, 3)
        attention = (scores.exp() if over_slots else scores.softmax(4))[..., :-1]
        slots = self.norm_slots(slots)
        fused = slots if self.norm_global is None else slots + self.norm_global(global_)[:, None]
        return Aggregated(fused, slots, attention)


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
        """Return the set `[B, K, D]`, the residuals as slots, and the attention over the rows, `[1, B, 1, K, N]`."""
        rows = zero_padding(local, length)
        scores = self.score(self.hidden(rows).tanh()).transpose(1, 2)
        attention = softmax(scores, valid_rows(local, length)[:, None], 2)
        residual = self.residual(attention.to(rows.dtype) @ rows).sigmoid()
        return Aggregated(self.norm(global_[:, None] + residual), residual, attention[None, :, None])
