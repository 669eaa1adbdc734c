"""Images as Pillow decodes them: whole, from a folder of frames, or small for a page."""

import io
import re
import stat
import threading
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
from PIL import ExifTags, Image, ImageOps, UnidentifiedImageError

from ..errors import SampleError
from ..wording import in_bytes

LONGEST = 100  # longer side over shorter; beyond that, a resized picture would fill the memory or have no pixels left
MOST_BYTES = 500_000_000  # of a file
MOST_PIXELS = 175_000_000  # of a picture; Pillow refuses somewhat more by itself
MOST_SCANS = 100  # of a JPEG; ten are usual, and each takes time for all pixels though it may have only 75 bytes
# The readers of Pillow that are asked. Others start programs (EPS) or are seldom tested.
FORMATS = ("JPEG", "PNG", "WEBP", "BMP", "GIF", "TIFF", "PPM", "JPEG2000")
# By which a picture is known where no list names it: a frame, a picture in a folder.
SUFFIXES = (".jpg", ".jpeg", ".png", ".webp", ".bmp", ".gif", ".tif", ".tiff", ".ppm")


class PictureFile(io.BytesIO):
    """What stands in the file of a picture, in memory, as a binary file; `name` says where it came from."""

    def __init__(self, data: bytes, name: str) -> None:
        super().__init__(data)
        self.name = name


AnyPicture = (
    str | Path | bytes | bytearray | PictureFile | Image.Image
)  # a file, what stands in one, or an open picture


def open_image(
    picture: AnyPicture,
    *,
    upright: bool = False,
    longest: int | None = None,
    formats: tuple[str, ...] = FORMATS,
    most_pixels: int = MOST_PIXELS,
) -> Image.Image:
    """Decode a picture completely and as RGB; nothing else opens pictures.

    Of 16 bits a channel the upper 8 are taken, of an animation the first frame; the suffix of the file does not matter.
    Nothing stays of what else the file says, but an EXIF orientation that was not applied.

    Args:
        picture: a file, the bytes of one, or a picture that is open already.
        upright: turn and mirror it as its EXIF orientation says; a damaged one is as if there were none. Else the
            pixels stay as they are stored. Pillow applies that of a TIFF file in any case.
        longest: how many times the shorter side the longer one may be.
        formats: which of Pillow's readers are asked.
        most_pixels: that its header may announce.

    Raises:
        SampleError: the file is missing, no file, empty, damaged, too large, too long and narrow, or no picture.
    """
    try:
        with _open(picture, formats, most_pixels) as image:
            if longest is not None and max(image.size) > longest * min(image.size):
                raise ValueError(f"it is more than {longest} times as long as it is wide; crop it")
            decoded, orientation = _as_rgb(image), _orientation(image)
        decoded.info = {}
        if orientation != 1:
            decoded.getexif()[ExifTags.Base.Orientation] = orientation
        return ImageOps.exif_transpose(decoded) if upright and orientation != 1 else decoded
    except Exception as error:  # Pillow's readers raise all kinds of errors on damaged files
        raise SampleError(_named(picture), _reason(error)) from error


def image_size(picture: Path | PictureFile, upright: bool = False) -> tuple[int, int]:
    """Return the width and height that `open_image` gives a picture, mostly without decoding it; errors likewise."""
    try:
        with _open(picture, FORMATS, MOST_PIXELS) as image:
            turned = upright and image.format != "TIFF" and _orientation(image) in _ON_A_SIDE
            return image.size[::-1] if turned else image.size
    except Exception as error:
        raise SampleError(_named(picture), _reason(error)) from error


def _as_rgb(image: Image.Image) -> Image.Image:
    if image.mode.startswith("I;16") or (image.mode == "I" and image.format in _SIXTEEN_BITS):
        return Image.fromarray((np.asarray(image) >> 8).astype(np.uint8)).convert("RGB")
    if image.mode.startswith(("I", "F")):
        raise ValueError(f"it has more than 16 bits a channel (mode {image.mode}); convert it")
    # A palette with transparency goes by way of RGBA: Pillow warns of the direct way.
    return (image.convert("RGBA") if "transparency" in image.info else image).convert("RGB")


def _orientation(image: Image.Image) -> int:
    """Return the EXIF orientation of a picture that has been read, 1 to 8; 1 where there is none or it is damaged."""
    try:
        with _without_warnings():
            found = image.getexif().get(ExifTags.Base.Orientation)
    except Exception:  # Pillow raises all kinds of errors on damaged tags
        return 1
    return found if isinstance(found, int) and 1 <= found <= 8 else 1


_MARKER = re.compile(rb"\xff[^\x00\xd0-\xd7\xff]")  # of a JPEG file; others stand within a scan
_SCAN, _END, _BARE = 0xDA, 0xD9, (0x01, 0xD8)  # the last have no length
_ON_A_SIDE = (5, 6, 7, 8)  # orientations that change places of width and height
_SIXTEEN_BITS = ("PNG", "PPM")  # formats whose greys of more than 8 bits Pillow widens to 32
_warnings_lock = threading.Lock()  # the list of warning filters belongs to the process, not to a thread


@contextmanager
def _without_warnings() -> Iterator[None]:
    with _warnings_lock, warnings.catch_warnings():
        warnings.filterwarnings("ignore", module=r"PIL\.")
        yield


@contextmanager
def _open(picture: AnyPicture, formats: tuple[str, ...], most_pixels: int) -> Iterator[Image.Image]:
    """Give a picture whose header has been read, without Pillow's warnings; one that is open already stays open."""
    if isinstance(picture, Image.Image):
        _check_pixels(picture, most_pixels)
        yield picture
        return
    data = _content(picture)
    if not data:
        raise ValueError("the file is empty")
    try:
        with _without_warnings():  # only bytes in memory are read under the lock
            opened = Image.open(io.BytesIO(data), formats=formats)
    except UnidentifiedImageError as error:
        known = f"{', '.join(formats[:-1])} or {formats[-1]}"
        raise ValueError(f"this is no {known} file") from error
    except Image.DecompressionBombError as error:
        raise _too_many_pixels(most_pixels) from error
    with opened:
        _check_pixels(opened, most_pixels)
        if opened.format in ("JPEG", "MPO") and _scans(data) > MOST_SCANS:
            raise ValueError(f"it has more than {MOST_SCANS} scans; save it anew")
        yield opened


def _scans(data: bytes | bytearray) -> int:
    """Return how many scans the first picture of a JPEG file has; what follows it, as a phone's video, is none."""
    scans, at = 0, 2
    while (found := _MARKER.search(data, at)) is not None and found[0][1] != _END:
        at, marker = found.end(), found[0][1]
        scans += marker == _SCAN
        if marker not in _BARE:
            at += max(2, int.from_bytes(data[at : at + 2], "big"))
    return scans


def read_picture(path: Path) -> PictureFile | Path:
    """Return what is in a file, or the path of what is none or cannot be read: whoever decodes it says so."""
    try:
        return picture_file(path)
    except SampleError:
        return path


def picture_file(path: Path) -> PictureFile:
    """Return what is in a file; SampleError where it is none or cannot be read."""
    try:
        return PictureFile(_read(path), str(path))
    except (OSError, ValueError) as error:
        raise SampleError(str(path), _reason(error)) from error


def _content(picture: str | Path | bytes | bytearray | PictureFile) -> bytes | bytearray:
    if isinstance(picture, bytes | bytearray):
        return picture
    return picture.getvalue() if isinstance(picture, PictureFile) else _read(Path(picture))


def _read(path: Path) -> bytes:
    """Return what is in a regular file; a pipe or device could be endless, or never give anything."""
    status = path.stat()
    if not stat.S_ISREG(status.st_mode):
        raise ValueError("this is a folder, a pipe or a device, and not a regular file")
    check_bytes(status.st_size)
    with path.open("rb") as file:
        return file.read(status.st_size)


def check_bytes(size: int) -> None:
    """Refuse the file of a picture that has too many bytes, with a ValueError."""
    if size > MOST_BYTES:
        raise ValueError(f"the file has {in_bytes(size)}, and a picture at most {in_bytes(MOST_BYTES)}")


def _check_pixels(image: Image.Image, most: int) -> None:
    if image.width * image.height > most:
        raise _too_many_pixels(most)


def _too_many_pixels(most: int) -> ValueError:
    return ValueError(f"it has more than {most // 1_000_000} million pixels; make it smaller")


def _named(picture: AnyPicture) -> str:
    if isinstance(picture, PictureFile):
        return str(picture.name)
    return str(picture) if isinstance(picture, str | Path) else "the picture"


def _reason(error: Exception) -> str:
    """Say in a few words what was wrong, without the path, which differs from machine to machine."""
    if isinstance(error, FileNotFoundError):
        return "there is no such file"
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
    frames = [name for name in names if name.lower().endswith(SUFFIXES) and not name.startswith(".")]
    if not frames:
        raise SampleError(str(folder), f"there is no frame in this folder; frames end in {', '.join(SUFFIXES)}")
    return sorted(frames, key=_natural)


def _natural(name: str) -> tuple[list[tuple[str, int]], str]:
    """Sort numbers in names by their value; ``1`` and ``01`` by the names."""
    parts = re.findall(r"([^0-9]*)([0-9]*)", name)
    return [(text, int(digits or -1)) for text, digits in parts], name


def thumbnail(picture: AnyPicture, side: int, upright: bool = False) -> Image.Image:
    """Return a picture, or of a folder of frames the first: RGB, at most `side` pixels wide and high.

    `upright` is that of `open_image`.

    Raises:
        SampleError: it is missing or damaged.
    """
    if isinstance(picture, str | Path) and Path(picture).is_dir():
        picture = Path(picture, frame_names(Path(picture))[0])
    image = open_image(picture, upright=upright)
    image.thumbnail((side, side))
    return image


def jpeg(image: Image.Image) -> bytes:
    """Return a picture as a JPEG file; nothing is in it but its pixels."""
    file = io.BytesIO()
    image.save(file, "JPEG", quality=80)
    return file.getvalue()
