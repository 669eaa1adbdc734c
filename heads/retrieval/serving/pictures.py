"""Pictures that a stranger sends are opened with care."""

import io

from PIL import Image

from ....pipeline.data.images import open_image
from ....pipeline.errors import QueryError

# The readers of Pillow that a web page needs: one that is not asked cannot be attacked.
FORMATS = ("JPEG", "PNG", "WEBP", "GIF", "BMP")
MOST_PIXELS = 50_000_000


def open_upload(data: bytes | bytearray) -> Image.Image:
    """Decode a picture that was sent, in memory: RGB, its pixels as they are stored, as those of the cache were.

    Raises:
        QueryError: it is none of `FORMATS`, is damaged, or its header announces more than `MOST_PIXELS`.
    """
    try:
        image = Image.open(io.BytesIO(data), formats=FORMATS)
    except (Image.DecompressionBombError, Image.DecompressionBombWarning) as error:
        raise _too_many_pixels() from error
    except Exception as error:  # Pillow's readers raise all kinds of errors on damaged files
        known = f"{', '.join(FORMATS[:-1])} or {FORMATS[-1]}"
        raise QueryError(f"this is not a picture that can be read; send a {known} file") from error
    with image:
        if image.width * image.height > MOST_PIXELS:
            raise _too_many_pixels()
        try:
            return open_image(image)
        except Exception as error:
            raise QueryError("the picture is damaged; send another") from error


def _too_many_pixels() -> QueryError:
    return QueryError(f"the picture has more than {MOST_PIXELS // 1_000_000} million pixels; send a smaller one")
