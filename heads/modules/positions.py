"""Sine and cosine encodings of positions."""

import torch
from torch import Tensor


def sinusoids(angle: Tensor, width: int) -> Tensor:
    """Return `[..., width]`: sine and cosine of `angle [...]` over 10000^(2i / width) in columns 2i and 2i + 1."""
    column = torch.arange(0, width, 2, device=angle.device, dtype=angle.dtype)
    angles = angle[..., None] * 10000 ** (-column / width)
    return torch.stack([angles.sin(), angles.cos()], dim=-1).flatten(-2)[..., :width]
