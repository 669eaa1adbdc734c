"""What a head adds to: frozen global features of one space, or features that a linear map brings into one."""

from collections.abc import Sequence
from typing import Literal, cast

import torch
from torch import Tensor, nn
from torch.nn.functional import normalize

from .adapters import CachedSets
from .padding import mean_rows
from .parts import Part

Base = Literal["none", "frozen", "cca", "procrustes"]


class Frozen(nn.Module):
    """The frozen global feature, of encoders that lie in one space."""

    fields = ({"global"},)

    def forward(self, features: CachedSets) -> Tensor:
        """Return the global features `[B, W]`."""
        assert features.global_ is not None, "it is in `fields`"
        return features.global_


class ClosedForm(nn.Module):
    """A linear map of the features, which is found before the training (`modules.canonical`) and does not learn.

    Args:
        widths: of the vectors of each feature set, which stand side by side, each of unit length.
        cached: whether a set's vector is its cached global feature; else it is the mean of its rows.
        width: W of what the map gives.
    """

    mean: Tensor
    matrix: Tensor

    def __init__(self, widths: Sequence[int], cached: Sequence[bool], width: int) -> None:
        super().__init__()
        self.cached = tuple(cached)
        self.fields = tuple({"global"} if one else {"local"} for one in cached)
        self.register_buffer("mean", torch.zeros(sum(widths)))
        self.register_buffer("matrix", torch.zeros(sum(widths), width))

    def vectors(self, features: CachedSets) -> Tensor:
        """Return what the map is applied to, `[B, C]`, float32."""
        found = []
        for part, cached in zip(features.parts, self.cached, strict=True):
            vector = part.global_ if cached else mean_rows(cast(Tensor, part.local).float(), part.length)
            found.append(cast(Tensor, vector).float())
        return torch.cat([normalize(one, dim=-1) for one in found], -1)

    def forward(self, features: CachedSets) -> Tensor:
        """Return `[B, W]`."""
        with torch.autocast(self.matrix.device.type, enabled=False):  # eight bits are too few for whitened values
            return (self.vectors(features) - self.mean) @ self.matrix


class Residual(Part):
    """A normalised base plus a linear layer over the head's embedding, which is zero at first.

    A head thereby begins with what the base reaches untrained, and changes it where training gains by that; of a set
    every element begins so. That the last layer of a residual branch begins at zero is ReZero's idea (Bachlechner et
    al., arXiv 2003.04887) and that of adapters. What it gives is divided by the root of D, so that the first steps of
    an optimiser such as Adam do not drown the base.

    Args:
        dim: width D of the head's embedding.
        width: W of the base.
        base: from features to `[B, W]`; see `Frozen` and `ClosedForm`.
    """

    def __init__(self, dim: int, width: int, base: Frozen | ClosedForm) -> None:
        super().__init__()
        self.base = base
        self.layer = nn.Linear(dim, width, bias=False)
        nn.init.zeros_(self.layer.weight)

    def forward(self, embedding: Tensor, features: CachedSets) -> tuple[Tensor, Tensor]:
        """Return the base `[B, W]`, and the sum for a vector `embedding [B, D]` or a set `[B, K, D]`."""
        base = self.base(features).to(self.layer.weight.dtype)
        added = cast(Tensor, self.layer(embedding)) / self.layer.in_features**0.5
        unit = normalize(base, dim=-1)
        return base, added + (unit if embedding.ndim == 2 else unit[:, None])
