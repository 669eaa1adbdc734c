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


def grid_positions(rows: Tensor, place: Tensor | None = None) -> Tensor:
    """Return the positions `[B, N, C]` (or `[1, N, C]`) of the cells `rows [B, N, C]` of maps, in their dtype.

    The first half of the channels encodes a cell's row, the others its column, each as `circle_positions` does a
    row's number (published code of SetDiv, after DETR).

    Args:
        rows: all cells of a map, one row of it after the other; or, with `place`, some of them.
        place: see `cell_places`, `[B, N, 2]` or `[1, N, 2]`; None: all cells of square maps are there.

    Raises:
        ValueError: no place is given, and the number of cells is no square.
    """
    if place is None:
        found = cell_places(rows.shape[1], rows.device)
        if found is None:
            raise ValueError(f"positions grid needs a map of as many rows as columns, not of {rows.shape[1]} cells")
        place = found[None]
    angle = 2 * torch.pi * place.to(torch.promote_types(rows.dtype, torch.float32))
    width = rows.shape[2]
    by_row, by_column = sinusoids(angle[..., 0], width - width // 2), sinusoids(angle[..., 1], width // 2)
    return torch.cat([by_row, by_column], -1).to(rows.dtype)


def cell_places(number: int, device: torch.device, grid: tuple[int, int] | None = None) -> Tensor | None:
    """Return row and column of the cells of a map, counted from 1 and over how many there are, `[number, 2]`.

    Args:
        number: of cells.
        device: of the result.
        grid: height and width of the map; None: it is square.

    Returns:
        None where these are not the height and width of as many cells, or the number is no square.
    """
    height, width = grid or (math.isqrt(number), math.isqrt(number))
    if height * width != number:
        return None
    cell = torch.arange(number, device=device)
    down, across = cell // width + 1, cell % width + 1
    return torch.stack([down.double() / (height + _WHOLE), across.double() / (width + _WHOLE)], 1)
