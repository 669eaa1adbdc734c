"""Regions without weights: the objects of a drawn picture, each on plain ground in a ninth of its own."""

from typing import Any

import numpy as np
from PIL import Image

from ...data.images import LONGEST, AnyPicture, open_image
from ...store.regions import Regions
from ..base import VisualEncoder, library_versions
from ..spec import EncoderSpec

THUMBNAIL = 8  # pixels along a side
LEVELS = 3  # of each colour channel in the histogram
CONTRAST = 50  # of 255: how far a channel of an object is from the ground's at least
LEAST = 0.02  # of a ninth: fewer pixels are noise


class PlainGroundEncoder(VisualEncoder):
    """Encode what stands out of the ground in each ninth of a picture.

    On generated scenes that is a perfect detector, on photographs it is none. A row is the thumbnail of a box [192],
    its histogram of colours [27], its ninth as one-hot [9] and its width as a share of the picture's [1].
    """

    takes = frozenset[str]()
    name = "plain-ground"
    kind = "roi"
    extras = ("boxes",)
    rows = 9
    channels = global_channels = 3 * THUMBNAIL**2 + LEVELS**3 + 9 + 1

    def __init__(self, spec: EncoderSpec, device: str) -> None:
        preprocessing = {"decoder": "pillow", "channels": "RGB", "contrast": CONTRAST, "least": LEAST}
        layer = f"thumbnail {THUMBNAIL}, colours {LEVELS}, ninth, width"
        self.identity: dict[str, Any] = {
            "encoder": self.name, "weights": "none", "preprocessing": preprocessing, "layer": layer,
        }  # fmt: skip
        self.versions = library_versions("numpy", "PIL")

    def decode(self, picture: AnyPicture) -> tuple[Image.Image, tuple[int, int]]:
        """Read an image; return it and its (width, height)."""
        image = open_image(picture, upright=True, longest=LONGEST)
        return image, image.size

    def encode(self, pictures: list[Image.Image]) -> list[Regions]:
        """Encode pictures, each by itself; a picture of nothing but ground is one region."""
        return [self._encode(picture) for picture in pictures]

    def _encode(self, picture: Image.Image) -> Regions:
        found = find_objects(np.asarray(picture)) or [(0, 0, *picture.size)]
        local = np.stack([_row(picture, box) for box in found])
        return Regions(local, np.array(found, dtype=np.float32), size=picture.size)


def find_objects(pixels: np.ndarray) -> list[tuple[int, int, int, int]]:
    """Return the box x1, y1, x2, y2 of what differs from the ground in each ninth of a picture, uint8 [H,W,3].

    The ground has the median colour.
    """
    height, width = pixels.shape[:2]
    ground = np.median(pixels, axis=(0, 1))
    differs = (np.abs(pixels - ground) > CONTRAST).any(2)
    boxes = []
    for y in (0, 1, 2):
        for x in (0, 1, 2):
            top, left = y * height // 3, x * width // 3
            there = differs[top : (y + 1) * height // 3, left : (x + 1) * width // 3]
            if there.sum() > LEAST * there.size:
                down, across = (np.flatnonzero(there.any(axis)) for axis in (1, 0))
                boxes.append(
                    (left + int(across[0]), top + int(down[0]), left + int(across[-1]) + 1, top + int(down[-1]) + 1)
                )
    return boxes


def _row(picture: Image.Image, box: tuple[int, int, int, int]) -> np.ndarray:
    crop, (x1, y1, x2, y2), (width, height) = picture.crop(box), box, picture.size
    thumbnail = np.asarray(crop.resize((THUMBNAIL, THUMBNAIL), Image.Resampling.BOX)).ravel() / 255
    levels = np.asarray(crop).reshape(-1, 3).astype(int) * LEVELS // 256
    colours = np.bincount(levels @ [LEVELS**2, LEVELS, 1], minlength=LEVELS**3) / len(levels)
    ninth = np.eye(9)[3 * (y1 + y2) // (2 * height) * 3 + 3 * (x1 + x2) // (2 * width)]
    return np.concatenate([thumbnail, colours, ninth, [(x2 - x1) / width]]).astype(np.float32)
