"""The pictures of a page: each is held once, however often it is shown."""

import base64
import io
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from PIL import Image

from ...pipeline.data.images import open_image, thumbnail
from ...pipeline.data.sources import PictureReader
from ...pipeline.errors import CacheError, ManifestError, SampleError, StoreError
from ...pipeline.reading.reattachment import find_pictures
from ...pipeline.store import FeatureCache, ImageSet

SIDE = 240  # pixels of the longer side of a thumbnail, and of either side of what a network saw
HEAT = ((110, 40, 200), (235, 60, 60), (255, 215, 40))  # red, green, blue from where few look to where most do
COVER = 140  # of 255: how far they cover a picture at most, which stays visible

Part = tuple[str, float]  # what a network saw, see `input_of`


class Picture(NamedTuple):
    """A picture that the page holds: its id on the page, width and height in pixels, a JPEG file in base64."""

    key: str
    size: tuple[int, int]
    data: str


def heat_map(values: np.ndarray) -> str:
    """Return a PNG file in base64 that colours a picture where `values` (0 to 1, of a grid over it) are high."""
    colours = [np.interp(values, np.linspace(0, 1, len(HEAT)), channel) for channel in zip(*HEAT, strict=True)]
    pixels = np.stack([*colours, COVER * values], -1).round().astype(np.uint8)
    return _base64(Image.fromarray(pixels), "PNG")


class Pictures:
    """The images of a cache's data set, if their files are in `data_root` or where the manifest says.

    `why_not` is a sentence if there are none at all, and `unreadable` has one for each file that cannot be read.
    """

    def __init__(self, cache: FeatureCache, data_root: Path | None) -> None:
        self.why_not: str | None = None
        self.unreadable: dict[str, str] = {}
        self._held: dict[tuple[str, bool, Part | None], Picture | None] = {}
        self._reader: PictureReader | None = None
        try:
            self._reader = find_pictures(cache, data_root)
        except (CacheError, ManifestError, StoreError) as error:
            self.why_not = str(error)

    @property
    def held(self) -> list[Picture]:
        """What the page must hold, in the order of its first use."""
        return [picture for picture in self._held.values() if picture is not None]

    def hold(self, file_name: str, upright: bool, part: Part | None = None) -> Picture | None:
        """Return a picture, `upright` if turned as EXIF says, or the part that a network saw; None if unreadable.

        The page holds it from now on.
        """
        if self._reader is None:
            return None
        wanted = (file_name, upright, part)
        if wanted not in self._held:
            self._held[wanted] = self._read(self._reader, *wanted)
        return self._held[wanted]

    def _read(self, reader: PictureReader, file_name: str, upright: bool, part: Part | None) -> Picture | None:
        try:
            file = reader.open(file_name)
            image = thumbnail(file, SIDE, upright) if part is None else _cut(open_image(file, upright=upright), *part)
        except (SampleError, ManifestError) as error:
            self.unreadable.setdefault(file_name, str(error))
            return None
        return Picture(f"picture-{len(self._held)}", image.size, _base64(image, "JPEG", quality=75))


def input_of(features: ImageSet) -> Part | None:
    """Return how a grid's network sees an image: the middle of its shorter side, or of it stretched to a square.

    ``("crop", share of the shorter side)`` or ``("stretch", share of the square's side)``. None: whole, or unknown.
    """
    preprocessing = features.identity.get("preprocessing")
    if features.kind != "grid" or not isinstance(preprocessing, dict):
        return None
    if "stretch" in preprocessing:
        return "stretch", preprocessing.get("crop", preprocessing["stretch"]) / preprocessing["stretch"]
    if "crop" in preprocessing and "resize" in preprocessing:
        return "crop", preprocessing["crop"] / preprocessing["resize"]
    return None


def _cut(image: Image.Image, way: str, share: float) -> Image.Image:
    """Return what a network saw of a picture."""
    width, height = (side * share for side in (image.size if way == "stretch" else [min(image.size)] * 2))
    left, top = (image.width - width) / 2, (image.height - height) / 2
    return image.resize((SIDE, SIDE), box=(left, top, left + width, top + height))


def _base64(image: Image.Image, kind: str, **options: Any) -> str:
    file = io.BytesIO()
    image.save(file, kind, optimize=True, **options)
    return base64.b64encode(file.getvalue()).decode()
