"""Pooled grids: neighbouring cells are averaged before they are stored, which takes a fraction of the space."""

from typing import Any

import numpy as np
import torch
from PIL import Image
from torch import Tensor
from torch.nn import functional

from ...data.images import AnyPicture
from ...errors import EncoderError


class PoolEncoder:
    """Encode images with the encoder of a grid, and average its cells in windows that lie side by side.

    At an edge that a window crosses, it averages the cells that are there. The global feature stays as it is.

    Args:
        grid: encodes the images.
        pool: height and width of a window, in cells.

    Raises:
        EncoderError: there is no such window in the grid.
    """

    kind = "grid"
    extras: tuple[str, ...] = ()

    def __init__(self, grid: Any, pool: tuple[int, int]) -> None:
        height, width = grid.grid or (0, 0)
        if not (1 <= pool[0] <= height and 1 <= pool[1] <= width) or pool == (1, 1):
            raise EncoderError(
                f"--pool {pool[0]}x{pool[1]} averages nothing in the grid of {height} x {width} cells of '{grid.name}';"
                " give a smaller window, as 2x2, or leave it out"
            )
        self._encoder, self._pool = grid, pool
        self.cells = height, width  # before they are averaged
        self.grid = -(-height // pool[0]), -(-width // pool[1])
        self.rows = self.grid[0] * self.grid[1]
        self.name, self.versions, self.space = grid.name, grid.versions, grid.space
        self.longest = getattr(grid, "longest", None)
        self.channels, self.global_channels = grid.channels, grid.global_channels
        self.identity: dict[str, Any] = {**grid.identity, "pool": list(pool)}

    def decode(self, picture: AnyPicture) -> tuple[Tensor, tuple[int, int]]:
        """Read an image as the grid's encoder does."""
        decoded: tuple[Tensor, tuple[int, int]] = self._encoder.decode(picture)
        return decoded

    def prepare(self, image: Image.Image) -> Tensor:
        """Prepare an image as the grid's encoder does."""
        pixels: Tensor = self._encoder.prepare(image)
        return pixels

    def encode(self, pixels: Tensor) -> tuple[np.ndarray, np.ndarray]:
        """Encode a batch of decoded images [B,3,H,W]; return the pooled cells [B,N,C] and global features [B,D]."""
        local, global_ = self._encoder.encode(pixels)
        maps = torch.from_numpy(local).transpose(1, 2).unflatten(2, self.cells)
        pooled = functional.avg_pool2d(maps, self._pool, ceil_mode=True, count_include_pad=False)
        return pooled.flatten(2).transpose(1, 2).contiguous().numpy(), global_
