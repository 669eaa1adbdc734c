"""Layers from a cached vector to one of the embedding's width: what adapters apply to rows and global features."""

from typing import Literal

from torch import Tensor, nn
from torch.nn.functional import batch_norm as normalise
from torch.nn.functional import relu6

from .dropout import Dropout

Layers = Literal["linear", "mlp", "mlp-on-linear", "gated", "blocks"]


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

    def forward(self, x: Tensor) -> Tensor:
        """Return `[R, C]` of `x [R, C]`."""
        if self.training and len(x) == 1:
            return normalise(x, self.running_mean, self.running_var, self.weight, self.bias, eps=self.eps)
        return super().forward(x)


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

    def forward(self, x: Tensor) -> Tensor:
        """Return `[R, dim]` of `x [R, channels]`."""
        straight = self.linear(x)
        return straight + self.mlp(straight if self.on_linear else x)


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
