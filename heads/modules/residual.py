"""What a head adds to a frozen global feature."""

from typing import cast

from torch import Tensor, nn
from torch.nn.functional import normalize

from .parameters import Part


class Residual(Part):
    """The normalised frozen global feature plus a linear layer over the head's embedding, which is zero at first.

    A head on encoders of one space (CLIP) thereby begins with what they reach untrained, and changes it where training
    gains by that; of a set every element begins so. That the last layer of a residual branch begins at zero is ReZero's
    idea (Bachlechner et al., arXiv 2003.04887) and that of adapters.

    Args:
        dim: width D of the head's embedding.
        width: W of the frozen global feature.
    """

    def __init__(self, dim: int, width: int) -> None:
        super().__init__()
        self.layer = nn.Linear(dim, width, bias=False)
        nn.init.zeros_(self.layer.weight)

    def forward(self, embedding: Tensor, frozen: Tensor) -> Tensor:
        """Add a vector `embedding [B, D]`, or a set `[B, K, D]`, to `frozen [B, W]`: `[B, W]` or `[B, K, W]`."""
        base = normalize(frozen.to(self.layer.weight.dtype), dim=-1)
        added = cast(Tensor, self.layer(embedding))
        return added + (base if embedding.ndim == 2 else base[:, None])
