"""EXIF orientations: each of the eight against pixels that are turned by hand, and damaged ones, which are none."""

import io
import struct
import warnings

import numpy as np
import pytest
from oriented import save, shown
from PIL import Image

from xret.pipeline.data.images import PictureFile, image_size, open_image, thumbnail

PIXELS = np.random.default_rng(0).integers(0, 256, (5, 9, 3), dtype=np.uint8)
JPEG_PIXELS = np.repeat(np.repeat(np.random.default_rng(1).integers(0, 256, (2, 3, 1)), 16, 0), 16, 1).astype(np.uint8)


def pixels_of(picture, **options):
    return np.asarray(open_image(picture, **options))


@pytest.mark.parametrize("orientation", range(1, 9))
@pytest.mark.parametrize("suffix", [".png", ".webp", ".tiff", ".jpg"])
def test_each_orientation_is_applied_or_left_as_it_is(tmp_path, suffix, orientation):
    pixels = np.repeat(JPEG_PIXELS, 3, 2) if suffix == ".jpg" else PIXELS
    path = save(tmp_path / f"a{suffix}", pixels, orientation, **{".webp": {"lossless": True}}.get(suffix, {}))
    close = {"atol": 12 if suffix == ".jpg" else 0}
    expected = shown(pixels, orientation)
    opened = PictureFile(path.read_bytes(), "a")
    with Image.open(path) as picture:
        for one in (path, opened.getvalue(), opened, picture):
            np.testing.assert_allclose(pixels_of(one, upright=True).astype(int), expected, **close)
    stored = expected if suffix == ".tiff" else pixels  # Pillow turns TIFF by itself
    np.testing.assert_allclose(pixels_of(path).astype(int), stored, **close)
    for upright, kept in ((True, expected), (False, stored)):
        assert image_size(path, upright) == (kept.shape[1], kept.shape[0])
        assert thumbnail(path, 999, upright).size == (kept.shape[1], kept.shape[0])


def test_a_decoded_picture_is_turned_once_and_not_again(tmp_path):
    path = save(tmp_path / "a.png", PIXELS, 6)
    stored = open_image(path)  # it still knows how it is to be turned
    turned = open_image(stored, upright=True)
    np.testing.assert_array_equal(turned, shown(PIXELS, 6))
    np.testing.assert_array_equal(open_image(turned, upright=True), shown(PIXELS, 6))
    np.testing.assert_array_equal(open_image(stored), PIXELS)


def test_sixteen_bits_are_turned_as_well(tmp_path):
    wide = np.arange(12, dtype=np.uint16).reshape(3, 4) * 4097
    path = save(tmp_path / "a.png", wide, 8)
    for picture in (path, open_image(path)):
        np.testing.assert_array_equal(pixels_of(picture, upright=True)[..., 0], shown(wide, 8) >> 8)


def _tiff(entries, order="<", first=8, following=0):
    """Return EXIF data with one directory; an entry is (tag, type, count, value or offset)."""
    body = b"".join(struct.pack(f"{order}HHII", *entry) for entry in entries)
    head = (b"II*\0" if order == "<" else b"MM\0*") + struct.pack(f"{order}I", first)
    return b"Exif\0\0" + head + struct.pack(f"{order}H", len(entries)) + body + struct.pack(f"{order}I", following)


DAMAGED = {
    "nothing": b"Exif\0\0",
    "no directory": b"Exif\0\0II*\0",
    "noise": b"Exif\0\0" + bytes(range(200)),
    "zero": _tiff([(0x0112, 3, 1, 0)]),
    "nine": _tiff([(0x0112, 3, 1, 9)]),
    "a text": _tiff([(0x0112, 2, 4, 0x36363636)]),
    "outside": _tiff([(0x0112, 3, 1 << 20, 1 << 30)]),
    "a directory that is itself": _tiff([(0x8769, 4, 1, 8)], following=8),
    "outside the data": _tiff([(0x0112, 3, 1, 6)], first=4000),
}


@pytest.mark.parametrize("damage", DAMAGED)
def test_a_damaged_orientation_is_none(damage):
    file = io.BytesIO()
    Image.fromarray(PIXELS).save(file, "WEBP", lossless=True, exif=DAMAGED[damage])
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        np.testing.assert_array_equal(pixels_of(file.getvalue(), upright=True), PIXELS)
    assert image_size(PictureFile(file.getvalue(), "a"), upright=True) == (9, 5)
