"""Images as Pillow decodes them: whole, from a folder of frames, or small for a page; and what tells files apart."""

import hashlib
import io
import logging
import os
import re
import stat
import threading
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from functools import lru_cache
from pathlib import Path

import numpy as np
from PIL import ExifTags, Image, ImageOps, JpegImagePlugin, TiffImagePlugin, UnidentifiedImageError

from ..errors import SampleError
from ..wording import in_bytes, reason

LONGEST = 100  # longer side over shorter; beyond that, a resized picture would fill the memory or have no pixels left
MOST_BYTES = 500_000_000  # of a file
DIGEST_BYTES = 16
NO_DIGEST = bytes(DIGEST_BYTES)  # of a file that cannot be read
# The readers of Pillow that are asked. Others start programs (EPS) or are seldom tested.
_AVIF = ("AVIF",) if ".avif" in Image.registered_extensions() else ()  # some builds of Pillow cannot
FORMATS = ("JPEG", "PNG", "WEBP", "BMP", "GIF", "TIFF", "PPM", "JPEG2000", *_AVIF)
# By which a picture is known where no list names it: a frame, a picture in a folder or a tar. Pillow's reader of JPEG
# also opens MPO.
SUFFIXES = tuple(sorted(end for end, kind in Image.registered_extensions().items() if kind in (*FORMATS, "MPO")))

log = logging.getLogger("xret")


class PictureFile(io.BytesIO):
    """What stands in the file of a picture, in memory, as a binary file; `name` says where it came from."""

    def __init__(self, data: bytes, name: str) -> None:
        super().__init__(data)
        self.name = name


# A file, the content of one, or an open picture.
AnyPicture = str | Path | bytes | bytearray | PictureFile | Image.Image


def open_image(picture: AnyPicture, *, upright: bool = False, longest: int | None = None) -> Image.Image:
    """Decode a picture completely and as RGB; nothing else opens pictures.

    Sixteen bits a channel lose the lower 8; an animation is its first frame; the suffix of the file does not matter.
    Of its metadata only an EXIF orientation that was not applied is kept. `upright` turns and mirrors it as that says,
    unless it is damaged; else the pixels stay as they are stored, but Pillow always turns TIFF files.

    SampleError: the file is missing, no file, empty, damaged, too large, no picture, or its longer side is more than
    `longest` times the shorter one.
    """
    try:
        content = _content(picture)
        if (plain := _plain_jpeg(content, longest)) is not None:
            return plain
        with _open(content) as image:
            if _is_longer(image, longest):
                raise ValueError(f"it is more than {longest} times as long as it is wide; crop it")
            decoded, orientation = _as_rgb(image), _orientation(image)
        decoded.info = {}
        if orientation != 1:
            decoded.getexif()[ExifTags.Base.Orientation] = orientation
        return ImageOps.exif_transpose(decoded) if upright and orientation != 1 else decoded
    except Exception as error:  # Pillow's readers raise all kinds of errors on damaged files
        raise SampleError(_named(picture), _reason(error)) from error


def _as_rgb(image: Image.Image) -> Image.Image:
    tags = getattr(image, "tag_v2", {})  # of TIFF
    if image.mode.startswith("I;16") or (image.mode == "I" and image.format in _SIXTEEN_BITS):
        bits = tags.get(TiffImagePlugin.BITSPERSAMPLE, (16,))[0]
        grey = (np.asarray(image) >> (bits - 8)).astype(np.uint8)
        if not grey.any() and np.asarray(image).any():
            raise ValueError("its numbers use so little of 16 bits that it would be black; convert it to 8 bits")
        # Pillow inverts what counts from white, but for 16 bits.
        dark = tags.get(TiffImagePlugin.PHOTOMETRIC_INTERPRETATION) == 0
        return Image.fromarray(255 - grey if dark else grey).convert("RGB")
    if image.mode.startswith(("I", "F")):
        raise ValueError(f"it has more than 16 bits a channel, or signed numbers (mode {image.mode}); convert it")
    if 2 in tags.get(TiffImagePlugin.SAMPLEFORMAT, ()):
        raise ValueError("its colours are signed numbers; convert it")
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


_JPEG, _EXIF, _SCAN = b"\xff\xd8\xff", b"Exif\0", b"\xff\xda"  # a JPEG begins, its metadata and its pixels
_SIXTEEN_BITS = ("PNG", "PPM")  # formats whose greys of more than 8 bits Pillow widens to 32
_PNG, _TEXTS = b"\x89PNG\r\n\x1a\n", (b"iCCP", b"tEXt", b"zTXt", b"iTXt")
_ORIENTING = (b"Raw profile type exif\0", b"XML:com.adobe.xmp\0")
_warnings_lock = threading.Lock()  # the list of warning filters belongs to the process, not to a thread


@contextmanager
def _without_warnings() -> Iterator[None]:
    with _warnings_lock, warnings.catch_warnings():
        warnings.filterwarnings("ignore", module=r"PIL\.")
        yield


def _content(picture: AnyPicture) -> bytes | bytearray | Image.Image:
    """Return what is in the file of a picture; one that is open already stays as it is."""
    if isinstance(picture, Image.Image):
        return picture
    data = picture.getvalue() if isinstance(picture, PictureFile) else picture
    data = _read(Path(data)) if isinstance(data, str | Path) else data
    if not data:
        raise ValueError("the file is empty")
    return data


def _plain_jpeg(content: bytes | bytearray | Image.Image, longest: int | None) -> Image.Image | None:
    """Decode a JPEG in RGB that nothing turns and that Pillow does not warn of, as most are; None: it is another.

    `_open` would give the same pixels, and says what is wrong with damaged files. But it keeps Pillow from warning,
    which threads can do only one after the other, and lets go of the interpreter more often; each time, a thread waits
    until it is its turn again.
    """
    if isinstance(content, Image.Image) or not content.startswith(_JPEG) or _EXIF in content[: content.find(_SCAN)]:
        return None
    try:
        image = JpegImagePlugin.JpegImageFile(io.BytesIO(content))
        known = {"exif", "xmp", "mp"} & image.info.keys()  # may hold an orientation, or several pictures
        most = Image.MAX_IMAGE_PIXELS  # from here on, Pillow warns
        many = most is not None and image.width * image.height > most
        if image.mode != "RGB" or known or many or _is_longer(image, longest):
            return None
        image.decodermaxblock = len(content)  # decode it in one piece
        image.load()
    except Exception:  # Pillow's readers raise all kinds of errors on damaged files
        return None
    image.info = {}
    return image


def _is_longer(image: Image.Image, longest: int | None) -> bool:
    return longest is not None and max(image.size) > longest * min(image.size)


@contextmanager
def _open(content: bytes | bytearray | Image.Image) -> Iterator[Image.Image]:
    """Give a picture whose header has been read, without Pillow's warnings; one that is open already stays open."""
    if isinstance(content, Image.Image):
        yield content
        return
    try:
        with _without_warnings():  # only bytes in memory are read under the lock
            opened = Image.open(io.BytesIO(_without_texts(content)), formats=FORMATS)
    except UnidentifiedImageError as error:
        raise ValueError(f"this is no {', '.join(FORMATS[:-1])} or {FORMATS[-1]} file that Pillow reads") from error
    except Image.DecompressionBombError as error:
        raise ValueError("it has more pixels than Pillow opens; make it smaller") from error
    with opened:
        yield opened


def _without_texts(data: bytes | bytearray) -> bytes | bytearray:
    """Return a file, if it is a PNG without its colour profile and texts, which Pillow unpacks only up to a limit.

    Texts that may hold an orientation stay.
    """
    if not data.startswith(_PNG):
        return data
    kept, at = [data[: len(_PNG)]], len(_PNG)
    while at < len(data):
        end = at + 12 + int.from_bytes(data[at : at + 4], "big")
        if data[at + 4 : at + 8] not in _TEXTS or data.startswith(_ORIENTING, at + 8):
            kept.append(data[at:end])
        at = end
    return b"".join(kept)


def read_picture(path: Path) -> PictureFile | Path:
    """Return the content of a file, or the path of a folder or of what cannot be read: decoding it says why."""
    try:
        return PictureFile(_read(path), str(path))
    except (OSError, ValueError):
        return path


def _read(path: Path) -> bytes:
    """Return what is in a regular file; a pipe or device could be endless, or never give anything."""
    status = path.stat()
    if stat.S_ISDIR(status.st_mode):
        raise ValueError("this is a folder; give --frames N if it holds the frames of a video")
    if not stat.S_ISREG(status.st_mode):
        raise ValueError("this is a pipe or a device, and not a regular file")
    if status.st_size > MOST_BYTES:
        raise ValueError(f"the file has {in_bytes(status.st_size)}, and a picture at most {in_bytes(MOST_BYTES)}")
    # Not by `open`: it makes twice as many system calls, and after each one a thread waits for the interpreter.
    file = os.open(path, os.O_RDONLY | getattr(os, "O_BINARY", 0))
    try:
        data = os.read(file, status.st_size)
        while len(data) < status.st_size and (more := os.read(file, status.st_size - len(data))):
            data += more
    finally:
        os.close(file)
    return data


def _named(picture: AnyPicture) -> str:
    if isinstance(picture, PictureFile):
        return str(picture.name)
    return str(picture) if isinstance(picture, str | Path) else "the picture"


def _reason(error: Exception) -> str:
    if isinstance(error, FileNotFoundError):
        return "there is no such file"
    return reason(error).lower() if isinstance(error, OSError) and error.strerror else reason(error)


def frame_names(folder: Path) -> list[str]:
    """Return the names of a folder's images in natural order."""
    try:
        names = [entry.name for entry in folder.iterdir() if not entry.name.startswith(".")]
    except FileNotFoundError as error:
        raise SampleError(str(folder), "there is no such folder of frames") from error
    except OSError as error:
        raise SampleError(str(folder), f"a folder of frames is expected here ({_reason(error)})") from error
    frames = [name for name in names if name.lower().endswith(SUFFIXES)]
    if not frames:
        raise SampleError(str(folder), f"there is no frame in this folder; frames end in {', '.join(SUFFIXES)}")
    for name in set(names) - set(frames):
        _note_passed_over(Path(name).suffix)
    return sorted(frames, key=_natural)


@lru_cache(64)
def _note_passed_over(suffix: str) -> None:
    ending = f"that end in {suffix}" if suffix else "without an ending"
    log.warning("files %s are passed over among frames; frames end in %s", ending, ", ".join(SUFFIXES))


def _natural(name: str) -> tuple[list[tuple[str, int]], str]:
    """Sort numbers in names by their value; ``1`` and ``01`` by the names."""
    parts = re.findall(r"([^0-9]*)([0-9]*)", name)
    return [(text, int(digits or -1)) for text, digits in parts], name


def digest_of(picture: PictureFile | Path) -> bytes:
    """Return the digest of a file's bytes; for a folder, that of its frames' names and digests.

    `NO_DIGEST`: it is unreadable.
    """
    if isinstance(picture, PictureFile):
        return hashlib.blake2b(picture.getvalue(), digest_size=DIGEST_BYTES).digest()
    try:
        frames = frame_names(picture)
    except SampleError:
        return NO_DIGEST
    parts = (os.fsencode(name) + b"\0" + digest_of(read_picture(picture / name)) for name in frames)
    return hashlib.blake2b(b"".join(parts), digest_size=DIGEST_BYTES).digest()


def stamp_of(picture: Path) -> tuple[int, int]:
    """Return a file's bytes and the nanoseconds of its last change; for a folder, the frames' sum and latest.

    Zeros: it cannot be read.
    """
    try:
        status = picture.stat()
        if not stat.S_ISDIR(status.st_mode):
            return status.st_size, status.st_mtime_ns
        frames = [(picture / name).stat() for name in frame_names(picture)]
        return sum(one.st_size for one in frames), max(one.st_mtime_ns for one in frames)
    except (OSError, ValueError, SampleError):
        return 0, 0


def thumbnail(picture: AnyPicture, side: int, upright: bool = False) -> Image.Image:
    """Return a picture, or of a folder of frames the first: RGB, at most `side` pixels wide and high.

    `upright` is that of `open_image`. SampleError: it is missing or damaged.
    """
    if isinstance(picture, str | Path) and Path(picture).is_dir():
        picture = Path(picture, frame_names(Path(picture))[0])
    image = open_image(picture, upright=upright)
    image.thumbnail((side, side))
    return image
