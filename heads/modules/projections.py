"""Layers from a cached vector to one of the embedding's width: what adapters apply to rows and global features."""

from typing import Literal

from torch import Tensor, nn

Layers = Literal["linear", "mlp", "mlp-on-linear"]


def projection(
    layers: Layers, channels: int, dim: int, *, hidden: int | None = None, batch_norm: bool = True, dropout: float = 0.0
) -> nn.Module:
    """Return the layers that take `[..., channels]` to `[..., dim]`; with a batch norm `[R, channels]` to `[R, dim]`.

    Args:
        layers: ``linear``: one layer; ``mlp``: that plus a perceptron over the cached vector (VSE-infinity, appendix
            A.1); ``mlp-on-linear``: that plus a perceptron over its own output (SetDiv's published code).
        channels: width of the cached vector.
        dim: width of what is made of it.
        hidden: width of the perceptron's hidden layer; None: half of `dim`.
        batch_norm: normalise the hidden layer over a batch.
        dropout: share of the hidden values that is dropped while training.
    """
    if layers == "linear":
        return linear(channels, dim)
    return ResidualPerceptron(
        channels, dim, hidden or dim // 2, on_linear=layers == "mlp-on-linear", batch_norm=batch_norm, dropout=dropout
    )


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
            nn.BatchNorm1d(hidden) if batch_norm else nn.Identity(),
            nn.Sequential(nn.ReLU(), nn.Dropout(dropout)),
            nn.Linear(hidden, dim),
        )

    def forward(self, x: Tensor) -> Tensor:
        """Return `[R, dim]` of `x [R, channels]`."""
        straight = self.linear(x)
        return straight + self.mlp(straight if self.on_linear else x)


def linear(channels: int, dim: int) -> nn.Linear:
    """Return a linear layer with Xavier's uniform weights and no bias at first, as VSE++ has it."""
    layer = nn.Linear(channels, dim)
    nn.init.xavier_uniform_(layer.weight)
    nn.init.zeros_(layer.bias)
    return layer
