"""Layers from a cached vector to one of the embedding's width, which adapters apply to rows and global features."""

from collections.abc import Callable, Iterable
from typing import Literal

import torch
from torch import Tensor, nn
from torch.nn.functional import batch_norm as normalise
from torch.nn.functional import relu6

from ...pipeline.device import may_wait, on_host
from .dropout import Dropout
from .padding import MovedRows, valid_rows, way_back

Layers = Literal["linear", "mlp", "mlp-on-linear", "gated", "blocks"]
# With which layers an option of `projection` counts; its dropout has the name that recipes give it.
USED_WITH: dict[str, tuple[str, tuple[str, ...]]] = {
    **dict.fromkeys(("hidden", "hidden_dropout"), ("layers", ("mlp", "mlp-on-linear", "gated", "blocks"))),
    "depth": ("layers", ("blocks",)),
    "batch_norm": ("layers", ("mlp", "mlp-on-linear")),
}


class CachedInput(nn.Module):
    """Standardises a cached feature and, while training, drops parts of it.

    Args:
        channels: width C of the feature.
        standardize: subtract each channel's mean and divide by its standard deviation, both of the training split.
            `measure` sets them; they are kept with the weights.
        dropout: the share of the values that is zero, drawn for each by itself; it scales up what is left.
    """

    mean: Tensor
    deviation: Tensor

    def __init__(self, channels: int, *, standardize: bool, dropout: float) -> None:
        super().__init__()
        self.standardize, self.dropout = standardize, Dropout(dropout)
        if standardize:
            self.register_buffer("mean", torch.zeros(channels))
            self.register_buffer("deviation", torch.ones(channels))

    @torch.no_grad()
    def measure(self, values: Iterable[Tensor]) -> None:
        """Take mean and deviation from `values`, many tensors `[R, C]`.

        A channel that never changes stays unscaled, and so does one that changes by rounding alone, as a dead one of
        all-MiniLM-L6-v2 does: scaled, it would be noise that is another one in float32 than in the store's float16.
        """
        count, total = 0, torch.zeros_like(self.mean, dtype=torch.float64)
        squares = total.clone()
        for rows in values:
            rows = rows.double()
            count, total, squares = count + len(rows), total + rows.sum(0), squares + rows.square().sum(0)
        mean = total / max(count, 1)
        deviation = (squares / max(count, 1) - mean.square()).clamp(min=0).sqrt()
        self.mean.copy_(mean)
        self.deviation.copy_(torch.where(deviation > 1e-6 * mean.abs().maximum(deviation.max()), deviation, 1.0))

    def forward(self, x: Tensor) -> Tensor:
        """Return what the head reads of `x [B, C]` or `[B, N, C]`, of the same shape."""
        if self.standardize:
            x = (x - self.mean) / self.deviation
        return self.dropout(x)


def projection(
    layers: Layers,
    channels: int,
    dim: int,
    *,
    hidden: int | None = None,
    depth: int = 1,
    batch_norm: bool = True,
    dropout: float = 0.0,
) -> nn.Module:
    """Return the layers that take `[..., channels]` to `[..., dim]`; with a batch norm `[R, channels]` to `[R, dim]`.

    Args:
        layers: ``linear``: one layer; ``mlp``: that plus a perceptron over the cached vector (VSE-infinity, appendix
            A.1); ``mlp-on-linear``: that plus a perceptron over its own output (SetDiv's published code); ``gated``:
            see `GatedPerceptron`; ``blocks``: see `residual_blocks`.
        channels: width of the cached vector.
        dim: width of what is made of it.
        hidden: width of the hidden layer; None: half of `dim` for the perceptrons, 8 times `channels` for the gated
            one and 4 times for blocks, as their published codes have it.
        depth: number of blocks.
        batch_norm: normalise the hidden layer over a batch; of the two perceptrons alone.
        dropout: share of the hidden values that is dropped while training.
    """
    if layers == "linear":
        return linear(channels, dim)
    if layers == "gated":
        return GatedPerceptron(channels, dim, hidden or 8 * channels, dropout)
    if layers == "blocks":
        return residual_blocks(channels, dim, hidden or 4 * channels, depth, dropout)
    return ResidualPerceptron(
        channels, dim, hidden or dim // 2, on_linear=layers == "mlp-on-linear", batch_norm=batch_norm, dropout=dropout
    )


class RowNorm(nn.BatchNorm1d):
    """Batch normalisation of rows; a single one, which has no deviation, is normalised by the running statistics."""

    def forward(self, x: Tensor, valid: Tensor | None = None) -> Tensor:
        """Return `[R, C]` of `x [R, C]`; its statistics are of the `valid [R]` rows alone, None: of all."""
        if not self.training:
            return super().forward(x)
        if valid is not None:
            return self._among(x, valid)
        if len(x) == 1:
            return normalise(x, self.running_mean, self.running_var, self.weight, self.bias, eps=self.eps)
        return super().forward(x)

    def _among(self, x: Tensor, valid: Tensor) -> Tensor:
        """Normalise by the statistics of the valid rows, whose number the host never learns."""
        assert self.running_mean is not None and self.running_var is not None and self.num_batches_tracked is not None
        assert self.momentum is not None
        rows = x.to(torch.promote_types(x.dtype, torch.float32))
        count = valid.sum().clamp(min=1)
        several, share = count > 1, (valid.to(rows.dtype) / count)[:, None]
        mean = torch.where(several, (share * rows).sum(0), self.running_mean)
        centred = rows - mean
        variance = torch.where(several, (share * centred.square()).sum(0), self.running_var)
        with torch.no_grad():  # a single row leaves them as they are
            self.running_mean.lerp_(mean.to(self.running_mean), self.momentum)
            unbiased = variance * count / (count - 1).clamp(min=1)
            self.running_var.lerp_(unbiased.to(self.running_var), self.momentum)
            self.num_batches_tracked.add_(several)
        return torch.addcmul(self.bias, centred, self.weight * (variance + self.eps).rsqrt()).to(x.dtype)


class ResidualPerceptron(nn.Module):
    """A linear layer plus a perceptron with one hidden layer; arguments as for `projection`.

    Args:
        on_linear: whether the perceptron reads what the linear layer gives, or the same input.
    """

    def __init__(
        self, channels: int, dim: int, hidden: int, *, on_linear: bool, batch_norm: bool, dropout: float
    ) -> None:
        super().__init__()
        self.on_linear = on_linear
        self.linear = linear(channels, dim)
        self.mlp = nn.Sequential(
            nn.Linear(dim if on_linear else channels, hidden),
            RowNorm(hidden) if batch_norm else nn.Identity(),
            nn.Sequential(nn.ReLU(), Dropout(dropout)),
            nn.Linear(hidden, dim),
        )

    def forward(self, x: Tensor, valid: Tensor | None = None) -> Tensor:
        """Return `[R, dim]` of `x [R, channels]`; rows are normalised over the `valid [R]` ones, None: over all."""
        straight = self.linear(x)
        widen, norm, between, narrow = self.mlp
        hidden = widen(straight if self.on_linear else x)
        hidden = norm(hidden, valid) if isinstance(norm, RowNorm) else norm(hidden)
        return straight + narrow(between(hidden))


def on_valid_rows(layer: Callable[..., Tensor], rows: Tensor, length: Tensor) -> Tensor:
    """Apply `layer` to all valid rows of `rows [B, N, C]`, `length [B]`, and return `[B, N, D]`, zero on padding.

    The layer takes `[R, C]` to `[R, D]`, each row by itself but for a `RowNorm`, alone or in a `ResidualPerceptron`,
    from whose statistics padding stays out.
    """
    if not may_wait(rows):
        return on_all_rows(layer, rows, length)
    flat, inside = rows.flatten(0, 1), torch.arange(rows.shape[1]) < on_host(length)[:, None]
    if inside.all():
        return layer(flat).unflatten(0, rows.shape[:2])
    there = inside.flatten().nonzero()[:, 0]
    back = way_back(there, len(flat))
    made = layer(MovedRows.apply(flat, there, back))
    return MovedRows.apply(made, back, there).unflatten(0, rows.shape[:2])


def on_all_rows(layer: Callable[..., Tensor], rows: Tensor, length: Tensor) -> Tensor:
    """Return what `on_valid_rows` does, but apply the layer to padding, too, as long as no shape depends on lengths."""
    valid = valid_rows(rows, length)
    padding = ~valid[..., None]
    flat = rows.masked_fill(padding, 0).flatten(0, 1)
    across = isinstance(layer, RowNorm | ResidualPerceptron)
    made = layer(flat, valid.flatten()) if across else layer(flat)
    return made.unflatten(0, rows.shape[:2]).masked_fill(padding, 0)


class GatedPerceptron(nn.Module):
    """A perceptron whose hidden values are products of two linear layers, one of them through ReLU6.

    Source: Zhang, Yang, Agrawal: *Assessing and Learning Alignment of Unimodal Vision and Language Models* (SAIL,
    arXiv 2412.04616), the alignment layer of the published code.

    Args:
        channels: width of the cached vector, which is normalised first.
        dim: width of what is made of it.
        hidden: width of both linear layers.
        dropout: share of the products that is dropped while training; the published code has none.
    """

    def __init__(self, channels: int, dim: int, hidden: int, dropout: float) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(channels)
        self.gate, self.value = linear(channels, hidden), linear(channels, hidden)
        self.dropout = Dropout(dropout)
        self.out = linear(hidden, dim)

    def forward(self, x: Tensor) -> Tensor:
        """Return `[..., dim]` of `x [..., channels]`."""
        x = self.norm(x)
        return self.out(self.dropout(relu6(self.gate(x)) * self.value(x)))


class InvertedBottleneck(nn.Module):
    """A residual block that normalises, widens and narrows: ``x + W2 dropout(gelu(W1 norm(x)))``.

    Source: Vouitsis et al., *Data-Efficient Multimodal Fusion on a Single GPU* (FuseMix, arXiv 2312.10144), the fusion
    adapters of the published code.
    """

    def __init__(self, channels: int, hidden: int, dropout: float) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.LayerNorm(channels),
            nn.Linear(channels, hidden),
            nn.GELU(),
            Dropout(dropout),
            nn.Linear(hidden, channels),
        )

    def forward(self, x: Tensor) -> Tensor:
        """Return `[..., channels]` of `x [..., channels]`."""
        return x + self.layers(x)


def residual_blocks(channels: int, dim: int, hidden: int, depth: int, dropout: float) -> nn.Sequential:
    """Return `depth` blocks of the cached vector's own width, a normalisation, and a linear layer to `dim`."""
    blocks = [InvertedBottleneck(channels, hidden, dropout) for _ in range(depth)]
    return nn.Sequential(*blocks, nn.LayerNorm(channels), nn.Linear(channels, dim))


def linear(channels: int, dim: int) -> nn.Linear:
    """Return a linear layer with Xavier's uniform weights and no bias at first, as VSE++ has it."""
    layer = nn.Linear(channels, dim)
    nn.init.xavier_uniform_(layer.weight)
    nn.init.zeros_(layer.bias)
    return layer
