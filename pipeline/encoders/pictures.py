"""What the image encoders share: how a picture is opened, and the libraries that its features may depend on."""

from pathlib import Path

import PIL
import torch
import torchvision
from PIL import Image

from ..data.images import open_image
from ..errors import SampleError

_LONGEST = 100  # longer side over shorter; beyond, a resized picture would fill the memory, or have no pixels left


def open_picture(path: str | Path) -> Image.Image:
    """Decode an image file whose proportions a network can take; errors of `images.open_image`.

    Raises:
        SampleError: it cannot be read, or is far too long and narrow.
    """
    image = open_image(path)
    if max(image.size) > _LONGEST * min(image.size):
        raise SampleError(str(path), f"it is more than {_LONGEST} times as long as it is wide; crop it")
    return image


def library_versions() -> dict[str, str]:
    """Return the versions that are recorded beside the features."""
    return {"torch": str(torch.__version__), "torchvision": torchvision.__version__, "pillow": PIL.__version__}
