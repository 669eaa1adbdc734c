"""Pictures that a stranger sends are opened with care; those of the gallery, made small, are kept in memory."""

import io
from collections import OrderedDict

from PIL import Image

from ....pipeline.data.images import open_image
from ....pipeline.errors import QueryError

# The readers of Pillow that a web page needs: one that is not asked cannot be attacked.
FORMATS = ("JPEG", "PNG", "WEBP", "GIF", "BMP")
MOST_PIXELS = 50_000_000
SIDES = {"small": 400, "large": 1200}  # of a picture on the page, pixels at most
SHELF_BYTES = 64 << 20


def open_upload(data: bytes | bytearray) -> Image.Image:
    """Decode a picture that was sent, in memory: RGB, its pixels as they are stored, as those of the cache were.

    Raises:
        QueryError: it is none of `FORMATS`, is damaged, or its header tells of more than `MOST_PIXELS`.
    """
    try:
        image = Image.open(io.BytesIO(data), formats=FORMATS)
    except (Image.DecompressionBombError, Image.DecompressionBombWarning) as error:
        raise _too_many_pixels() from error
    except Exception as error:  # Pillow's readers raise all kinds of errors on damaged files
        known = f"{', '.join(FORMATS[:-1])} or {FORMATS[-1]}"
        raise QueryError(f"this is no picture that can be read; send a {known} file") from error
    with image:
        if image.width * image.height > MOST_PIXELS:
            raise _too_many_pixels()
        try:
            return open_image(image)
        except Exception as error:
            raise QueryError("the picture is damaged; send another") from error


class Shelf:
    """The pictures that were asked for last, by row and size; of all that is longest ago is forgotten first."""

    def __init__(self, most_bytes: int = SHELF_BYTES) -> None:
        self._most, self._bytes = most_bytes, 0
        self._pictures: OrderedDict[tuple[int, str], bytes] = OrderedDict()

    def get(self, key: tuple[int, str]) -> bytes | None:
        """Return the picture, if it is still here."""
        if key in self._pictures:
            self._pictures.move_to_end(key)
        return self._pictures.get(key)

    def put(self, key: tuple[int, str], picture: bytes) -> None:
        """Keep a picture, and forget others until there is room."""
        self._bytes += len(picture) - len(self._pictures.pop(key, b""))
        self._pictures[key] = picture
        while self._bytes > self._most:
            self._bytes -= len(self._pictures.popitem(last=False)[1])


def _too_many_pixels() -> QueryError:
    return QueryError(f"the picture has more than {MOST_PIXELS // 1_000_000} million pixels; send a smaller one")
