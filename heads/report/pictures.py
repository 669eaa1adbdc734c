"""The pictures of a page: each is held once, however often it is shown."""

import base64
import io
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from PIL import Image

from ...pipeline.data.images import thumbnail
from ...pipeline.data.sources import PictureReader
from ...pipeline.errors import CacheError, ManifestError, SampleError, StoreError
from ...pipeline.reading.pictures import find_pictures
from ...pipeline.store import FeatureCache

SIDE = 240  # pixels of the longer side of a picture
SHADE = 170  # of 255: how far a picture is darkened where nothing looks; what is looked at keeps its colours


class Picture(NamedTuple):
    """A picture that the page holds: its id on the page, width and height in pixels, a JPEG file in base64."""

    key: str
    size: tuple[int, int]
    data: str


def shade(values: np.ndarray) -> str:
    """Return a PNG file in base64 that darkens a picture where `values` (0 to 1, of a grid over it) are low."""
    pixels = np.zeros((*values.shape, 4), np.uint8)
    pixels[..., 3] = (SHADE * (1 - values)).round()
    return _base64(Image.fromarray(pixels), "PNG")


class Pictures:
    """The images of a cache's data set, if `find_pictures` finds their files.

    `why_not` is a sentence if there are none at all, and `unreadable` has one for each file that cannot be read.
    """

    def __init__(self, cache: FeatureCache, data_root: Path | None) -> None:
        self.why_not: str | None = None
        self.unreadable: dict[str, str] = {}
        self._held: dict[tuple[str, bool], Picture | None] = {}
        self._reader: PictureReader | None = None
        try:
            self._reader = find_pictures(cache, data_root)
        except (CacheError, ManifestError, StoreError) as error:
            self.why_not = str(error)

    @property
    def held(self) -> list[Picture]:
        """What the page must hold, in the order of its first use."""
        return [picture for picture in self._held.values() if picture is not None]

    def hold(self, file_name: str, upright: bool) -> Picture | None:
        """Return a picture, turned as EXIF says if `upright`, which the page holds from now on; None if unreadable."""
        if self._reader is None:
            return None
        if (file_name, upright) not in self._held:
            self._held[file_name, upright] = self._read(self._reader, file_name, upright)
        return self._held[file_name, upright]

    def _read(self, reader: PictureReader, file_name: str, upright: bool) -> Picture | None:
        try:
            image = thumbnail(reader.open(file_name), SIDE, upright)
        except (SampleError, ManifestError) as error:
            self.unreadable.setdefault(file_name, str(error))
            return None
        return Picture(f"picture-{len(self._held)}", image.size, _base64(image, "JPEG", quality=75))


def _base64(image: Image.Image, kind: str, **options: Any) -> str:
    file = io.BytesIO()
    image.save(file, kind, optimize=True, **options)
    return base64.b64encode(file.getvalue()).decode()
