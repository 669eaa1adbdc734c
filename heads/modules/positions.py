"""Sine and cosine encodings of positions: of numbers, on a circle, and in the rows and columns of a map."""

import math
from typing import Literal

import torch
from torch import Tensor

Positions = Literal["none", "circle", "grid"]

_WHOLE = 1e-6  # added to what positions are divided by, as the published code of SetDiv has it


def sinusoids(angle: Tensor, width: int) -> Tensor:
    """Return `[..., width]`: sine and cosine of `angle [...]` over 10000^(2i / width) in columns 2i and 2i + 1."""
    column = torch.arange(0, width, 2, device=angle.device, dtype=angle.dtype)
    angles = angle[..., None] * 10000 ** (-column / width)
    return torch.stack([angles.sin(), angles.cos()], dim=-1).flatten(-2)[..., :width]


def circle_positions(rows: Tensor, length: Tensor) -> Tensor:
    """Return the positions `[B, N, C]` of `rows [B, N, C]` on a circle, in their dtype.

    Row n of L, counted from 1, stands at the angle 2 pi n / L; columns 2i and 2i + 1 hold sine and cosine of that
    angle over 10000^(2i/C). L is the sample's own length, so that padding changes nothing.
    """
    number, width = rows.shape[1:]
    dtype = torch.promote_types(rows.dtype, torch.float32)
    steps = torch.arange(1, number + 1, device=rows.device, dtype=dtype)
    return sinusoids(2 * torch.pi * steps / (length.to(steps)[:, None] + _WHOLE), width).to(rows.dtype)


def grid_positions(rows: Tensor, place: Tensor | None = None, grid: tuple[int, int] | None = None) -> Tensor:
    """Return the positions `[B, N, C]` (or `[1, N, C]`) of the cells `rows [B, N, C]` of maps, in their dtype.

    The first half of the channels encodes a cell's row, the others its column, each as `circle_positions` does a
    row's number (published code of SetDiv, after DETR).

    Args:
        rows: all cells of a map, one row of it after the other; or, with `place`, some of them.
        place: the number of each cell in its map, `[B, N]`; None: all cells are there.
        grid: height and width of the maps; None: they are square, else ValueError.
    """
    if place is None:
        grid = grid or square(rows.shape[1])
    if grid is None or (place is None and grid[0] * grid[1] != rows.shape[1]):
        raise ValueError(f"positions grid needs a map of as many rows as columns, not of {rows.shape[1]} cells")
    width, exact = rows.shape[2], torch.promote_types(rows.dtype, torch.float32)
    cell = torch.arange(grid[0] * grid[1], device=rows.device, dtype=exact)
    down, across = (cell // grid[1] + 1) / (grid[0] + _WHOLE), (cell % grid[1] + 1) / (grid[1] + _WHOLE)
    halves = (down, width - width // 2), (across, width // 2)
    positions = torch.cat([sinusoids(2 * torch.pi * part, half) for part, half in halves], 1).to(rows.dtype)
    return positions[None] if place is None else positions[place]


def square(cells: int) -> tuple[int, int] | None:
    """Return height and width of a square map of so many cells; None where there is none."""
    side = math.isqrt(cells)
    return (side, side) if side * side == cells else None
