"""Views of a picture: it is encoded as it is, and turned, mirrored or cropped, always alike for the same picture."""

import math
import random
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from ...data.images import AnyPicture, open_image
from ...errors import EncoderError

_AREA, _RATIO = (0.36, 1.0), (3 / 4, 4 / 3)  # of a window: its share of the picture, and width over height
_TRIES = 10  # to find a window that fits


class ViewsEncoder:
    """Encode several views of each picture with the encoder of a grid; view 0 is the picture as it is.

    Args:
        grid: encodes each view; it has a method `prepare`.
        views: augmentation and number V of views of a picture, as ``dihedral:8``; at least two.

    Raises:
        EncoderError: there is no such augmentation, or it does not make so many views.
    """

    kind = "grid"
    extras: tuple[str, ...] = ()

    def __init__(self, grid: Any, views: str) -> None:
        augment, _, number = views.partition(":")
        if augment not in AUGMENTATIONS or not number.isdecimal() or int(number) < 2:
            known = " or ".join(f"{name}:N" for name in AUGMENTATIONS)
            raise EncoderError(f"--views {views}: give {known}, with two or more views N")
        self._grid, self.views = grid, int(number)
        if augment == "dihedral" and self.views > 8:
            raise EncoderError(f"--views {views}: a square has eight turns and mirrorings; ask for at most 8")
        self.cells = grid.cells if "pool" in grid.identity else None
        seen = self.cells or grid.grid
        if augment == "dihedral" and seen is not None and seen[0] != seen[1]:
            raise EncoderError(f"--views {views} turns squares, and '{grid.name}' sees none; take crop-flip")
        self._view, parameters = AUGMENTATIONS[augment]
        self.name, self.versions = grid.name, grid.versions
        self.rows, self.channels, self.global_channels = grid.rows, grid.channels, grid.global_channels
        self.grid, self.space = grid.grid, grid.space
        described = {"number": self.views, "augment": augment, **parameters}
        self.identity: dict[str, Any] = {**grid.identity, "views": described}

    def decode_views(self, picture: AnyPicture, key: str) -> tuple[Tensor, tuple[int, int]]:
        """Read a picture; return its views as the grid's encoder takes them [V,3,S,S], and its own (width, height).

        Args:
            picture: the picture.
            key: tells it from others, whatever machine reads it; with a view's number it decides what is drawn.

        Raises:
            SampleError: the picture cannot be read, or is far too long and narrow.
        """
        image = open_image(picture, upright=True, longest=getattr(self._grid, "longest", None))
        whole = self._grid.prepare(image)
        others = [self._view(self._grid, image, whole, key, view) for view in range(1, self.views)]
        return torch.stack([whole, *others]), image.size

    def encode(self, pixels: Tensor) -> tuple[np.ndarray, np.ndarray]:
        """Encode the views [B,V,3,S,S] of a batch, one view of all pictures at a time.

        Returns:
            Local [B,V,N,C] and global features [B,V,C], float32.
        """
        # View 0 goes through the network in the batch in which a set of one view has it, and has the same bytes.
        local, global_ = zip(*(self._grid.encode(pixels[:, view]) for view in range(self.views)), strict=True)
        return np.stack(local, axis=1), np.stack(global_, axis=1)


def _dihedral(_grid: Any, _image: Image.Image, whole: Tensor, _key: str, view: int) -> Tensor:
    """Return element `view` of the square's group: turned by so many quarters, from 4 on of the mirrored picture."""
    turned: Tensor = torch.rot90(whole.flip(2) if view >= 4 else whole, view % 4, (1, 2))
    return turned


def _crop_flip(grid: Any, image: Image.Image, _whole: Tensor, key: str, view: int) -> Tensor:
    """Return a random window of a picture, mirrored half the time, through the encoder's own preprocessing."""
    rng = random.Random(f"{key}/{view}")  # Python promises the same numbers of it for ever
    pixels: Tensor = grid.prepare(image.crop(window(image.size, rng)))
    return pixels.flip(2) if rng.random() < 0.5 else pixels


def window(size: tuple[int, int], rng: random.Random) -> tuple[int, int, int, int]:
    """Draw a window (left, top, right, bottom) of a picture of this (width, height), pixels.

    As torchvision's RandomResizedCrop draws it, but of 36 to 100% of the picture: a caption speaks of all of it.
    """
    width, height = size
    for _ in range(_TRIES):
        area = width * height * rng.uniform(*_AREA)
        ratio = math.exp(rng.uniform(*map(math.log, _RATIO)))
        w, h = round(math.sqrt(area * ratio)), round(math.sqrt(area / ratio))
        if 0 < w <= width and 0 < h <= height:
            left, top = rng.randint(0, width - w), rng.randint(0, height - h)
            return left, top, left + w, top + h
    # A long or tiny picture: as much of its middle as the ratios allow.
    w, h = min(width, max(1, round(height * _RATIO[1]))), min(height, max(1, round(width / _RATIO[0])))
    left, top = (width - w) // 2, (height - h) // 2
    return left, top, left + w, top + h


# By name what makes a view other than 0, and what else of it belongs to the identity.
AUGMENTATIONS: dict[str, tuple[Callable[[Any, Image.Image, Tensor, str, int], Tensor], dict[str, Any]]] = {
    "crop-flip": (_crop_flip, {"area": list(_AREA), "ratio": list(_RATIO), "flip": 0.5}),
    "dihedral": (_dihedral, {}),
}
