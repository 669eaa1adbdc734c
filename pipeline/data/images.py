"""Images as Pillow decodes them: whole, from a folder of frames, or small for a page."""

import io
import re
import threading
import warnings
from pathlib import Path

import numpy as np
from PIL import Image, UnidentifiedImageError

from ..errors import SampleError

LONGEST = 100  # longer side over shorter; beyond that, a resized picture would fill the memory or have no pixels left
_SUFFIXES = (".jpg", ".jpeg", ".png", ".webp", ".bmp", ".gif", ".tif", ".tiff", ".ppm")  # of a frame


def open_image(path: str | Path | Image.Image, *, longest: int | None = None) -> Image.Image:
    """Decode an image file, or a picture that is open already, completely and as RGB.

    Of 16 bits a channel the upper 8 are taken, of an animation the first frame; the suffix of the file does not matter.
    The pixels stay as they are stored: as in torchvision's datasets, an EXIF orientation is not applied.

    Args:
        path: the file, or an open picture.
        longest: how many times the shorter side the longer one may be.

    Raises:
        SampleError: the file is missing, empty, damaged, too large, too long and narrow, or no image.
    """
    try:
        if isinstance(path, Image.Image):
            image = _as_rgb(path)
        else:
            with _open(Path(path).read_bytes()) as file:
                image = _as_rgb(file)
    except Exception as error:  # Pillow's readers raise all kinds of errors on damaged files
        raise SampleError(str(path), _reason(error)) from error
    if longest is not None and max(image.size) > longest * min(image.size):
        raise SampleError(str(path), f"it is more than {longest} times as long as it is wide; crop it")
    return image


def _as_rgb(image: Image.Image) -> Image.Image:
    if image.mode.startswith("I;16") or (image.mode == "I" and image.format in _SIXTEEN_BITS):
        return Image.fromarray((np.asarray(image) >> 8).astype(np.uint8)).convert("RGB")
    if image.mode.startswith(("I", "F")):
        raise ValueError(f"it has more than 16 bits a channel (mode {image.mode}); convert it")
    # A palette with transparency goes by way of RGBA: Pillow warns of the direct way.
    return (image.convert("RGBA") if "transparency" in image.info else image).convert("RGB")


_SIXTEEN_BITS = ("PNG", "PPM")  # formats whose greys of more than 8 bits Pillow widens to 32
_warnings_lock = threading.Lock()  # the list of warning filters belongs to the process, not to a thread


def _open(data: bytes) -> Image.Image:
    """Read the header of an image without Pillow's warnings; only bytes in memory are read under the lock."""
    if not data:
        raise ValueError("the file is empty")
    with _warnings_lock, warnings.catch_warnings():
        warnings.filterwarnings("ignore", module=r"PIL\.")
        return Image.open(io.BytesIO(data))


def _reason(error: Exception) -> str:
    """Say in a few words what was wrong, without the path, which differs from machine to machine."""
    if isinstance(error, FileNotFoundError):
        return "there is no such file"
    if isinstance(error, UnidentifiedImageError):
        return "this is not an image that Pillow can read"
    if isinstance(error, OSError) and error.strerror:
        return error.strerror.lower()
    return " ".join(str(error).split()).rstrip(".") or type(error).__name__


def frame_names(folder: Path) -> list[str]:
    """Return the names of a folder's images in natural order."""
    try:
        names = [entry.name for entry in folder.iterdir()]
    except FileNotFoundError as error:
        raise SampleError(str(folder), "there is no such folder of frames") from error
    except OSError as error:
        raise SampleError(str(folder), f"a folder of frames is expected here ({_reason(error)})") from error
    frames = [name for name in names if name.lower().endswith(_SUFFIXES) and not name.startswith(".")]
    if not frames:
        raise SampleError(str(folder), f"there is no frame in this folder; frames end in {', '.join(_SUFFIXES)}")
    return sorted(frames, key=_natural)


def _natural(name: str) -> tuple[list[tuple[str, int]], str]:
    """Sort numbers in names by their value; ``1`` and ``01`` by the names."""
    parts = re.findall(r"([^0-9]*)([0-9]*)", name)
    return [(text, int(digits or -1)) for text, digits in parts], name


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
