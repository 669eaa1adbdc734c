"""The pictures of a page: each is held once, however often it is shown."""

import base64
import html
import io
from collections.abc import Sequence as Several
from copy import copy
from dataclasses import dataclass
from pathlib import Path
from typing import Any

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


@dataclass(frozen=True)
class Picture:
    """A picture that the page holds: its id on the page, width and height in pixels, a JPEG file in base64."""

    key: str
    size: tuple[int, int]
    data: str

    def svg(self, alt: str, over: str = "") -> str:
        """Return the picture with `over`, SVG in its pixels, drawn over it; `alt` says what it shows."""
        width, height = self.size
        return (
            f'<svg class="picture" viewBox="0 0 {width} {height}" width="{width}" height="{height}" role="img" '
            f'aria-label="{html.escape(alt)}"><use href="#{self.key}"/>{over}</svg>'
        )

    def outlined(self, box: Several[float]) -> str:
        """Return SVG that outlines a box: x1, y1, x2, y2 as shares of the width and height."""
        (x1, y1, x2, y2), (width, height) = box, self.size
        return (
            f'<rect x="{x1 * width:.1f}" y="{y1 * height:.1f}" width="{(x2 - x1) * width:.1f}" '
            f'height="{(y2 - y1) * height:.1f}" class="outline"/>'
        )

    def heated(self, values: np.ndarray) -> str:
        """Return SVG that colours the picture where `values`, [rows, columns] of a grid over it, are high (0 to 1)."""
        values = values.clip(0, 1)
        colours = [np.interp(values, np.linspace(0, 1, len(HEAT)), channel) for channel in zip(*HEAT, strict=True)]
        pixels = np.stack([*colours, COVER * values], -1).round().astype(np.uint8)
        width, height = self.size
        return (
            f'<image width="{width}" height="{height}" preserveAspectRatio="none" '
            f'href="data:image/png;base64,{_base64(Image.fromarray(pixels), "PNG")}"/>'
        )


class Pictures:
    """Shows the images of a data set, if their files are there.

    Args:
        cache: names the data set and the files.
        data_root: see `reattachment.image_folder`; None: no picture is read, unless they are where the manifest says.

    Attributes:
        upright: whether pictures are turned as their EXIF orientations say.
        why_not: a sentence, if there are no pictures at all; else None.
        unreadable: names of files that were wanted and cannot be read, each with a sentence that says why.
    """

    def __init__(self, cache: FeatureCache, data_root: Path | None) -> None:
        self.why_not: str | None = None
        self.upright = False
        self.unreadable: dict[str, str] = {}
        self._held: dict[tuple[str, Part | None, bool], Picture | None] = {}
        self._reader: PictureReader | None = None
        try:
            self._reader = find_pictures(cache, data_root)
        except (CacheError, ManifestError, StoreError) as error:
            self.why_not = str(error)

    def seen(self, upright: bool) -> "Pictures":
        """Return the same pictures as a feature set saw them; what the page holds is held in common."""
        pictures = copy(self)
        pictures.upright = upright
        return pictures

    @property
    def held(self) -> list[Picture]:
        """What the page must hold, in the order of its first use."""
        return [picture for picture in self._held.values() if picture is not None]

    def show(self, file_name: str, alt: str) -> str | None:
        """Return a picture as SVG, described by `alt`; None if it cannot be shown."""
        held = self.hold(file_name)
        return None if held is None else held.svg(alt)

    def hold(self, file_name: str, part: Part | None = None) -> Picture | None:
        """Return a picture that the page will hold, the whole or the `part` a network saw; None if it is unreadable."""
        if self._reader is None:
            return None
        key = (file_name, part, self.upright)
        if key not in self._held:
            self._held[key] = self._read(self._reader, file_name, part, f"picture-{len(self._held)}")
        return self._held[key]

    def _read(self, reader: PictureReader, file_name: str, part: Part | None, key: str) -> Picture | None:
        try:
            picture = reader.open(file_name)
            if part is None:
                image = thumbnail(picture, SIDE, self.upright)
            else:
                image = _cut(open_image(picture, upright=self.upright), *part)
        except (SampleError, ManifestError) as error:
            self.unreadable.setdefault(file_name, str(error))
            return None
        return Picture(key, image.size, _base64(image, "JPEG", quality=75))


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
