"""Element slots: an embedding set by slot attention.

Source: *Improving Cross-Modal Retrieval with Set of Diverse Embeddings* (SetDiv, CVPR 2023), section 3.2,
eq. 1-5. The paper has one head; its published code has several, which `heads` gives.
"""

import torch
from torch import Tensor, nn

from .aggregated import Aggregated
from .pooling import valid_rows


class AggregationBlock(nn.Module):
    """One round in which the slots compete for the local features (SetDiv eq. 2-4).

    Args:
        dim: width D of a slot.
        heads: number of attention heads H.
        head_dim: width of a head; keys and values are H times as wide.
    """

    def __init__(self, dim: int, heads: int, head_dim: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm = nn.LayerNorm(dim)
        self.query = nn.Linear(dim, heads * head_dim, bias=False)
        self.out = nn.Linear(heads * head_dim, dim)
        self.mlp = nn.Sequential(nn.LayerNorm(dim), nn.Linear(dim, 4 * dim), nn.GELU(), nn.Linear(4 * dim, dim))

    def forward(self, slots: Tensor, keys: Tensor, values: Tensor, padding: Tensor) -> tuple[Tensor, Tensor]:
        """Update the slots once.

        Args:
            slots: `[B, K, D]`.
            keys: projected local features `[B, H, N, head_dim]`.
            values: the same shape.
            padding: True for rows that take no part, `[B, N]`.

        Returns:
            The new slots `[B, K, D]`, and the attention `[B, H, K, N]`, which adds up to one over the slots.
        """
        queries = _split_heads(self.query(self.norm(slots)), self.heads)
        scores = queries @ keys.transpose(2, 3) / keys.shape[3] ** 0.5
        attention = scores.softmax(2).masked_fill(padding[:, None, None], 0)
        # The small constant keeps a slot that wins nothing (or a sample without rows) from dividing by zero.
        share = attention / (attention.sum(3, keepdim=True) + 1e-7)
        updates = share.to(values.dtype) @ values
        slots = slots + self.out(updates.transpose(1, 2).flatten(2))
        return slots + self.mlp(slots), attention


class ElementSlots(nn.Module):
    """T rounds of one shared block over learnable slots, then fusion with the global feature (eq. 1, 5).

    Args:
        local_dim: width C of the local rows.
        dim: width D of slots, global feature and embedding.
        slots: size K of the set.
        iterations: number of rounds T.
        heads: number of attention heads.
        head_dim: width of a head, the paper's D_h; None divides `dim` among the heads.
        positions: add sinusoidal positions to what the keys are projected from (the paper does it for grids).
    """

    uses_local = True
    embedding = "set"

    def __init__(
        self,
        local_dim: int,
        dim: int,
        *,
        slots: int = 4,
        iterations: int = 4,
        heads: int = 1,
        head_dim: int | None = None,
        positions: bool = False,
    ) -> None:
        super().__init__()
        for name, value in {"slots": slots, "iterations": iterations, "heads": heads}.items():
            if value < 1:
                raise ValueError(f"element slots: {name} is {value}, but must be at least 1")
        if head_dim is None and dim % heads:
            raise ValueError(f"element slots: {heads} heads do not divide dim {dim}: set head_dim")
        head_dim = head_dim or dim // heads
        self.heads = heads
        self.iterations = iterations
        self.positions = positions
        self.initial_slots = nn.Parameter(torch.randn(slots, dim))
        self.norm_local = nn.LayerNorm(local_dim)
        self.key = nn.Linear(local_dim, heads * head_dim, bias=False)
        self.value = nn.Linear(local_dim, heads * head_dim, bias=False)
        self.block = AggregationBlock(dim, heads, head_dim)
        self.norm_slots = nn.LayerNorm(dim)
        self.norm_global = nn.LayerNorm(dim)

    def forward(self, local: Tensor, length: Tensor, global_: Tensor) -> Aggregated:
        """Aggregate `local [B, N, C]`, of which the first `length[b]` rows count, and `global_ [B, D]`.

        Returns:
            The set `[B, K, D]`, the slots before fusion `[B, K, D]` and the attention `[T, B, H, K, N]`.
        """
        padding = ~valid_rows(local, length)
        rows = self.norm_local(local)
        values = _split_heads(self.value(rows), self.heads)
        if self.positions:
            rows = rows + sinusoidal_positions(rows, length)
        keys = _split_heads(self.key(rows), self.heads)
        slots = self.initial_slots.expand(len(local), -1, -1)
        attention = []
        for _ in range(self.iterations):
            slots, weights = self.block(slots, keys, values, padding)
            attention.append(weights)
        slots = self.norm_slots(slots)
        return Aggregated(slots + self.norm_global(global_)[:, None], slots, torch.stack(attention))


def sinusoidal_positions(rows: Tensor, length: Tensor) -> Tensor:
    """Return the positions `[B, N, C]` of `rows [B, N, C]`, in their dtype.

    Row n of L, counted from 1, stands at the angle 2 pi n / L of a circle; columns 2i and 2i + 1 hold sine
    and cosine of that angle over 10000^(2i/C). L is the sample's own length, so that padding changes nothing.
    """
    number, width = rows.shape[1:]
    dtype = torch.promote_types(rows.dtype, torch.float32)
    steps = torch.arange(1, number + 1, device=rows.device, dtype=dtype)
    angle = 2 * torch.pi * steps / (length.to(steps)[:, None] + 1e-6)
    column = torch.arange(0, width, 2, device=rows.device, dtype=dtype)
    angles = angle[..., None] * 10000 ** (-column / width)
    return torch.stack([angles.sin(), angles.cos()], dim=-1).flatten(-2)[..., :width].to(rows.dtype)


def _split_heads(x: Tensor, heads: int) -> Tensor:
    return x.unflatten(2, (heads, -1)).transpose(1, 2)
