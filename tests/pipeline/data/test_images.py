"""Pictures as RGB: all modes and formats, what is none, damaged or never ends; and what tells files apart."""

import hashlib
import io
import os
import struct
import warnings
import zlib
from concurrent.futures import ThreadPoolExecutor
from io import BytesIO
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from oriented import save, shown
from PIL import ExifTags, Image
from PIL.PngImagePlugin import PngInfo

from xret.pipeline.data.images import (
    FORMATS,
    NO_DIGEST,
    SUFFIXES,
    PictureFile,
    digest_of,
    frame_names,
    open_image,
    read_picture,
    stamp_of,
    thumbnail,
)
from xret.pipeline.errors import SampleError


def noise(height: int = 37, width: int = 53, channels: int = 3) -> np.ndarray:
    return np.random.default_rng(0).integers(0, 256, (height, width, channels), dtype=np.uint8)


def png(width: int, height: int, depth: int, colour: int, data: bytes) -> bytes:
    """Write a PNG by hand, for what Pillow does not write."""

    def chunk(kind: bytes, body: bytes) -> bytes:
        return struct.pack(">I", len(body)) + kind + body + struct.pack(">I", zlib.crc32(kind + body))

    header = struct.pack(">IIBBBBB", width, height, depth, colour, 0, 0, 0)
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + chunk(b"IDAT", zlib.compress(data)) + chunk(b"IEND", b"")


def failure(path: Path) -> str:
    with pytest.raises(SampleError) as caught:
        open_image(path)
    error = caught.value
    assert error.sample == str(path)
    assert error.args == (f"{path}: {error.reason}",)
    assert str(path.parent) not in error.reason  # it is stored in the cache, whose bytes know no machine
    assert "\n" not in error.reason
    return error.reason


def palette() -> Image.Image:
    picture = Image.new("P", (4, 3), 1)
    picture.putpalette([0, 0, 0, 10, 200, 30])
    return picture


@pytest.mark.parametrize(
    ("picture", "suffix", "options", "colour"),
    [
        (Image.new("L", (4, 3), 90), ".png", {}, (90, 90, 90)),
        (Image.new("LA", (4, 3), (90, 7)), ".png", {}, (90, 90, 90)),
        (Image.new("1", (4, 3), 1), ".png", {}, (255, 255, 255)),
        (Image.new("RGBA", (4, 3), (10, 200, 30, 128)), ".png", {}, (10, 200, 30)),
        (Image.new("RGB", (4, 3), (10, 200, 30)), ".png", {"transparency": (10, 200, 30)}, (10, 200, 30)),
        (palette(), ".gif", {}, (10, 200, 30)),
        (palette(), ".png", {"transparency": b"\x00\x80"}, (10, 200, 30)),
        (Image.new("CMYK", (4, 3), (0, 255, 255, 0)), ".jpg", {}, (255, 0, 0)),
        (Image.new("YCbCr", (4, 3), (128, 128, 128)), ".jpg", {}, (128, 128, 128)),
    ],
)
def test_every_mode_becomes_rgb(tmp_path, picture, suffix, options, colour):
    path = tmp_path / f"picture{suffix}"
    picture.save(path, **options)
    opened = open_image(path)
    assert (opened.mode, opened.size) == ("RGB", (4, 3))
    assert np.abs(np.asarray(opened, dtype=int) - colour).max() <= (3 if suffix == ".jpg" else 0)


def test_sixteen_bits(tmp_path):
    rows = b"".join(b"\0" + struct.pack(">6H", *[0x1234, 0x5678, 0x9ABC] * 2) for _ in range(3))
    (tmp_path / "colour.png").write_bytes(png(2, 3, 16, 2, rows))
    assert open_image(tmp_path / "colour.png").getpixel((1, 2)) == (0x12, 0x56, 0x9A)


@pytest.mark.parametrize("name", ["a.png", "a.tiff", "a.ppm", "a.jp2", "big-endian.tiff"])
def test_sixteen_bits_of_grey(tmp_path, name):
    grey = np.array([[0, 255, 256, 0x1234], [0x7FFF, 0x8000, 0xFF00, 0xFFFF]], dtype=np.uint16)
    Image.fromarray(grey.astype(">u2") if name.startswith("big") else grey).save(tmp_path / name)
    expected = [[0, 0, 1, 0x12], [0x7F, 0x80, 0xFF, 0xFF]]  # as of 16-bit colour; Pillow itself would cut off at 255
    assert np.array_equal(np.asarray(open_image(tmp_path / name)), np.repeat(expected, 3).reshape(2, 4, 3))
    eight = np.arange(256, dtype=np.uint16).reshape(16, 16)
    Image.fromarray(eight * 257).save(tmp_path / "whole.png")
    assert np.array_equal(np.asarray(open_image(tmp_path / "whole.png"))[..., 1], eight)


@pytest.mark.parametrize("dtype", [np.float32, np.int32])
def test_more_than_sixteen_bits_are_refused(tmp_path, dtype):
    Image.fromarray(np.ones((3, 4), dtype=dtype)).save(tmp_path / "grey.tiff")
    assert "more than 16 bits a channel" in failure(tmp_path / "grey.tiff")


def tiff(data: bytes, *, bits: int, photometric: int, signed: bool = False) -> bytes:
    """Write a grey TIFF of 4 x 2 by hand, for what Pillow does not write."""
    tags = {256: 4, 257: 2, 258: bits, 259: 1, 262: photometric, 273: 134, 277: 1, 278: 2, 279: len(data)}
    entries = b"".join(struct.pack("<HHII", tag, 4, 1, value) for tag, value in tags.items())
    entries += struct.pack("<HHII", 339, 4, 1, 1 + signed)
    return struct.pack("<2sHIH", b"II", 42, 8, len(tags) + 1) + entries + struct.pack("<I", 0) + data


@pytest.mark.parametrize(
    ("data", "bits", "photometric", "first"),
    [
        (struct.pack("<8H", *[0x1234] * 8), 16, 1, 0x12),
        (struct.pack("<8H", *[0x1234] * 8), 16, 0, 255 - 0x12),
        (bytes([0x12, 0x3A, 0xBC] * 4), 12, 1, 0x12),
        (bytes([0x12] * 8), 8, 1, 0x12),
        (bytes([0x12] * 8), 8, 0, 255 - 0x12),
        (bytes([0x12] * 4), 4, 0, 255 - 0x11),
        (bytes([0b10000000] * 2), 1, 1, 255),
        (bytes([0b10000000] * 2), 1, 0, 0),
    ],
)
def test_greys_of_tiff_keep_their_meaning(data, bits, photometric, first):
    opened = open_image(tiff(data, bits=bits, photometric=photometric))
    assert opened.getpixel((0, 0)) == (first,) * 3


def test_eight_bits_in_sixteen_would_be_black():
    with pytest.raises(SampleError, match="black"):
        open_image(tiff(struct.pack("<8H", *range(0, 200, 25)), bits=16, photometric=1))
    assert open_image(tiff(bytes(16), bits=16, photometric=1)).getpixel((0, 0)) == (0, 0, 0)


@pytest.mark.parametrize("bits", [8, 16])
def test_signed_numbers_are_no_colours(bits):
    with pytest.raises(SampleError, match="signed"):
        open_image(tiff(b"\xf0" * bits, bits=bits, photometric=1, signed=True))


def test_texts_and_profiles_of_a_png_do_not_matter(tmp_path):
    pixels, info, exif = noise(), PngInfo(), Image.Exif()
    info.add_text("workflow", "x" * 2_000_000, zip=True)
    info.add_itxt("other", "x" * 2_000_000, zip=True)
    exif[ExifTags.Base.Orientation] = 6
    profile = np.random.default_rng(0).bytes(2_000_000)
    Image.fromarray(pixels).save(tmp_path / "a.png", pnginfo=info, icc_profile=profile, exif=exif)
    assert np.array_equal(np.asarray(open_image(tmp_path / "a.png")), pixels)
    assert open_image(tmp_path / "a.png", upright=True).size == (37, 53)
    xmp = PngInfo()
    xmp.add_itxt("XML:com.adobe.xmp", '<x xmlns:tiff="t"><tiff:Orientation>6</tiff:Orientation></x>')
    Image.fromarray(pixels).save(tmp_path / "b.png", pnginfo=xmp)
    assert open_image(tmp_path / "b.png", upright=True).size == (37, 53)


@pytest.mark.parametrize("name", ["png.jpg", "jpeg.png", "gif.bmp", "webp", "tiff.JPEG", "avif.png"])
def test_the_names_ending_does_not_matter(tmp_path, name):
    Image.new("RGB", (5, 4), (255, 0, 0)).save(tmp_path / name, format=name.split(".")[0].upper())
    assert np.abs(np.asarray(open_image(tmp_path / name), dtype=int) - (255, 0, 0)).max() <= 3


def test_every_suffix_of_a_format_that_is_read_is_known():
    by_pillow = {end for end, kind in Image.registered_extensions().items() if kind in FORMATS}
    assert by_pillow | {".mpo"} == set(SUFFIXES)
    assert {".jfif", ".jpe", ".jp2", ".pgm", ".pnm", ".apng", ".avif"} <= set(SUFFIXES)


def test_frames_are_known_by_their_suffix_and_others_are_named_once(tmp_path, caplog):
    names = ["1.jfif", "2.JPG", "3.jp2", "9.avif", "10.pgm", "11.Apng"]
    for name in (*names, "12.odd", "notes", ".hidden", ".jpg"):
        (tmp_path / name).write_bytes(b"x")
    assert frame_names(tmp_path) == frame_names(tmp_path) == names
    assert len([one for one in caplog.messages if ".odd" in one]) == 1


@pytest.mark.parametrize("suffix", [".gif", ".png", ".webp", ".avif"])
def test_of_an_animation_the_first_frame(tmp_path, suffix):
    frames = [Image.new("RGB", (8, 8), colour) for colour in ((255, 0, 0), (0, 255, 0), (0, 0, 255))]
    frames[0].save(tmp_path / f"a{suffix}", save_all=True, append_images=frames[1:], lossless=True)
    assert np.allclose(open_image(tmp_path / f"a{suffix}").getpixel((4, 4)), (255, 0, 0), atol=3)


def test_what_is_no_image(tmp_path):
    assert failure(tmp_path / "absent.jpg") == "there is no such file"
    (tmp_path / "empty.jpg").touch()
    assert failure(tmp_path / "empty.jpg") == "the file is empty"
    (tmp_path / "text.jpg").write_text("<html>404</html>")
    no_picture = "this is no JPEG, PNG, WEBP, BMP, GIF, TIFF, PPM, JPEG2000 or AVIF "
    assert failure(tmp_path / "text.jpg").startswith(no_picture)
    (tmp_path / "folder.jpg").mkdir()
    assert failure(tmp_path / "folder.jpg").startswith("this is a folder; give --frames N")
    assert failure(tmp_path / "a\0b.jpg") == "embedded null byte"
    assert failure(tmp_path / ("x" * 300)) == "file name too long"


@pytest.mark.parametrize("kind", ["pipe", "link to an endless device"])
def test_what_would_never_end_is_not_read(tmp_path, kind):
    path = tmp_path / "a.jpg"
    if kind == "pipe":
        os.mkfifo(path)
    else:
        path.symlink_to("/dev/zero")
    assert failure(path) == "this is a pipe or a device, and not a regular file"


def test_a_file_too_large_for_a_picture_is_not_read(tmp_path):
    with (tmp_path / "sparse.png").open("wb") as file:
        file.truncate(40_000_000_000)
    assert failure(tmp_path / "sparse.png") == "the file has 40.0 GB, and a picture at most 500.0 MB"


def test_only_readers_of_rasters_are_asked(tmp_path):
    (tmp_path / "a.jpg").write_bytes(b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 9 9\n%%EndComments\n%%EOF\n")
    assert "this is no JPEG" in failure(tmp_path / "a.jpg")  # Pillow would start Ghostscript


@pytest.mark.parametrize("suffix", [".jpg", ".png", ".gif", ".webp", ".bmp"])
def test_half_a_picture_is_none(tmp_path, suffix):
    path = tmp_path / f"picture{suffix}"
    Image.fromarray(noise()).save(path)
    whole = path.read_bytes()
    for share in range(1, 20):
        path.write_bytes(whole[: len(whole) * share // 20])
        assert failure(path)


@settings(max_examples=150, deadline=None)
@given(st.sampled_from(["JPEG", "PNG", "GIF", "TIFF", "WEBP"]), st.data())
def test_damage_is_survived(tmp_path_factory, kind, data):
    buffer = BytesIO()
    Image.fromarray(noise(12, 9)).save(buffer, kind)
    damaged = bytearray(buffer.getvalue())
    for place in data.draw(st.lists(st.integers(0, len(damaged) - 1), min_size=1, max_size=8)):
        damaged[place] = data.draw(st.integers(0, 255))
    path = tmp_path_factory.getbasetemp() / "damaged"
    path.write_bytes(damaged)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # what Pillow remarks while it decodes is not at issue
        try:
            opened = open_image(path)
        except SampleError as error:
            assert error.reason
        else:
            assert opened.mode == "RGB"
            opened.getpixel((0, 0))


def by_pillow(data: bytes) -> np.ndarray | str:
    """Return the pixels of a JPEG as Pillow alone gives them, or why it refuses it."""
    try:
        with Image.open(BytesIO(data)) as opened:
            return np.asarray(opened.convert("RGB"))
    except Exception as error:
        return str(error)


@settings(max_examples=200, deadline=None)
@given(st.data())
def test_a_jpeg_has_the_pixels_and_the_faults_that_pillow_finds(data):
    height, width = data.draw(st.integers(1, 400)), data.draw(st.integers(1, 400))
    colours = data.draw(st.sampled_from(["RGB", "RGB", "L", "CMYK"]))
    options = {"progressive": data.draw(st.booleans()), "quality": data.draw(st.sampled_from([20, 75, 95]))}
    if colours == "RGB":
        options["subsampling"] = data.draw(st.integers(0, 2))
    if data.draw(st.booleans()):
        options["restart_marker_blocks"] = 3
    buffer = BytesIO()
    smooth = Image.fromarray(noise(height // 4 + 1, width // 4 + 1)).resize((width, height))
    smooth.convert(colours).save(buffer, "JPEG", **options)
    damaged = bytearray(buffer.getvalue())
    for place in data.draw(st.lists(st.integers(0, len(damaged) - 1), max_size=3)):
        damaged[place] = data.draw(st.integers(0, 255))
    if data.draw(st.booleans()):
        damaged = damaged[: data.draw(st.integers(3, len(damaged)))] + data.draw(st.sampled_from([b"", b"\xff\xd9"]))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        expected = by_pillow(bytes(damaged))
        try:
            found = np.asarray(open_image(bytes(damaged)))
        except SampleError as error:
            assert isinstance(expected, str)
            assert "file that Pillow reads" in error.reason or error.reason == expected
        else:
            assert np.array_equal(found, expected)


def test_a_jpeg_loses_its_metadata_and_is_turned_by_all_that_says_so():
    pixels, exif = np.repeat(JPEG_PIXELS, 3, 2), Image.Exif()
    exif[ExifTags.Base.Orientation] = 6
    xmp = b'<x xmlns:tiff="t"><tiff:Orientation>6</tiff:Orientation></x>'
    profile = np.random.default_rng(0).bytes(200_000)  # has bytes that mean something elsewhere
    for options in ({}, {"exif": exif}, {"xmp": xmp}, {"exif": exif, "icc_profile": profile}, {"comment": b"Exif\0"}):
        file = BytesIO()
        Image.fromarray(pixels).save(file, "JPEG", dpi=(72, 72), **options)
        turned = {"exif", "xmp"} & options.keys()
        opened = open_image(file.getvalue())
        assert (opened.info, dict(opened.getexif())) == ({}, {ExifTags.Base.Orientation: 6} if turned else {})
        upright = open_image(file.getvalue(), upright=True)
        np.testing.assert_allclose(np.asarray(upright).astype(int), shown(pixels, 6 if turned else 1), atol=12)


def test_a_decompression_bomb_is_refused_by_its_header(tmp_path):
    (tmp_path / "bomb.png").write_bytes(png(60_000, 60_000, 8, 2, b"\0" * 100))
    assert "more pixels than Pillow opens" in failure(tmp_path / "bomb.png")


@pytest.mark.parametrize("suffix", [".png", ".jpg"])
def test_a_large_picture_is_no_bomb(tmp_path, monkeypatch, suffix):
    Image.fromarray(noise(30, 50)).save(tmp_path / f"large{suffix}")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", 1000)  # Pillow warns from here, and refuses from twice as many
        assert open_image(tmp_path / f"large{suffix}").size == (50, 30)
        monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", 700)
        assert "more pixels than Pillow opens" in failure(tmp_path / f"large{suffix}")


def test_threads_do_not_disturb_each_other(tmp_path):
    paths = [tmp_path / f"{number}.png" for number in range(40)]
    for number, path in enumerate(paths):
        Image.new("RGB", (20, 20), (number, 0, 0)).save(path)
    before = list(warnings.filters)
    with ThreadPoolExecutor(8) as pool:
        pixels = list(pool.map(lambda path: open_image(path).getpixel((3, 3)), paths * 5))
    assert pixels == [(number, 0, 0) for number in range(40)] * 5
    assert warnings.filters == before


PIXELS = np.random.default_rng(0).integers(0, 256, (5, 9, 3), dtype=np.uint8)
JPEG_PIXELS = np.repeat(np.repeat(np.random.default_rng(1).integers(0, 256, (2, 3, 1)), 16, 0), 16, 1).astype(np.uint8)


def pixels_of(picture, **options):
    return np.asarray(open_image(picture, **options))


@pytest.mark.parametrize("orientation", range(1, 9))
@pytest.mark.parametrize("suffix", [".png", ".webp", ".tiff", ".jpg", ".avif"])
def test_each_orientation_is_applied_or_left_as_it_is(tmp_path, suffix, orientation):
    lossy = {".jpg": {}, ".avif": {"quality": 100, "subsampling": "4:4:4"}}
    pixels = np.repeat(JPEG_PIXELS, 3, 2) if suffix in lossy else PIXELS
    path = save(tmp_path / f"a{suffix}", pixels, orientation, **({".webp": {"lossless": True}} | lossy).get(suffix, {}))
    close = {"atol": 12 if suffix in lossy else 0}
    expected = shown(pixels, orientation)
    opened = PictureFile(path.read_bytes(), "a")
    with Image.open(path) as picture:
        for one in (path, opened.getvalue(), opened, picture):
            np.testing.assert_allclose(pixels_of(one, upright=True).astype(int), expected, **close)
    stored = expected if suffix == ".tiff" else pixels  # Pillow turns TIFF by itself
    np.testing.assert_allclose(pixels_of(path).astype(int), stored, **close)
    for upright, kept in ((True, expected), (False, stored)):
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


def test_a_picture_is_known_by_its_bytes(tmp_path):
    for name, content in (("a.png", b"one"), ("b.jpg", b"one"), ("c.png", b"other")):
        (tmp_path / name).write_bytes(content)
    a, b, c = (digest_of(read_picture(tmp_path / name)) for name in ("a.png", "b.jpg", "c.png"))
    assert a == b == hashlib.blake2b(b"one", digest_size=16).digest() != c
    assert digest_of(read_picture(tmp_path / "gone.png")) == NO_DIGEST


def test_frames_are_known_by_their_names_and_bytes(tmp_path):
    found = []
    pairs = {"1.png": b"a", "2.png": b"b"}, {"1.png": b"b", "2.png": b"a"}
    not_utf8 = {"\udcff.png": b"a"}, {"\udcff.png": b"b"}
    for number, frames in enumerate((*pairs, {"1.png": b"a"}, *not_utf8)):
        folder = tmp_path / str(number)
        folder.mkdir()
        for name, content in frames.items():
            (folder / name).write_bytes(content)
        found.append(digest_of(read_picture(folder)))
    assert len({*found, NO_DIGEST}) == 6


def test_a_stamp_is_bytes_and_time_and_of_frames_their_sum_and_the_latest(tmp_path):
    for name, content, time in (("1.png", b"abc", 5_000), ("2.png", b"de", 7_000), ("notes", b"f", 9_000)):
        (tmp_path / name).write_bytes(content)
        os.utime(tmp_path / name, ns=(0, time))
    assert [stamp_of(tmp_path / name) for name in ("1.png", "gone.png", "")] == [(3, 5_000), (0, 0), (5, 7_000)]
