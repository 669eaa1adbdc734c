"""Pictures of a data set made small, for pages."""

import io
from pathlib import Path

from PIL import Image

from ..encoders.frames import frame_names
from .samples import open_image


def thumbnail(picture: str | Path | Image.Image, side: int) -> Image.Image:
    """Return a picture, or of a folder of frames the first: RGB, at most `side` pixels wide and high.

    Raises:
        SampleError: it is missing or damaged.
    """
    if not isinstance(picture, Image.Image) and Path(picture).is_dir():
        picture = Path(picture, frame_names(Path(picture))[0])
    image = open_image(picture)
    image.thumbnail((side, side))
    return image


def jpeg(image: Image.Image) -> bytes:
    """Return a picture as a JPEG file; nothing is in it but its pixels."""
    file = io.BytesIO()
    image.save(file, "JPEG", quality=80)
    return file.getvalue()
