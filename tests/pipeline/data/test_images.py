"""Pictures as RGB: every mode and format, and what is none, damaged, too large or never ends."""

import os
import resource
import struct
import time
import tracemalloc
import warnings
import zlib
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from io import BytesIO
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image

from xret.pipeline.data.images import image_size, open_image
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
    assert str(error) == f"{path}: {error.reason}"
    assert str(path.parent) not in error.reason  # it is stored in the cache, whose bytes know no machine
    assert "\n" not in error.reason
    return error.reason


def test_rgb_comes_back_exactly(tmp_path):
    pixels = noise()
    Image.fromarray(pixels).save(tmp_path / "a.png")
    for path in (tmp_path / "a.png", str(tmp_path / "a.png")):
        opened = open_image(path)
        assert opened.mode == "RGB"
        assert np.array_equal(np.asarray(opened), pixels)


def test_a_picture_outlives_its_file(tmp_path):
    Image.fromarray(noise()).save(tmp_path / "a.jpg")
    opened = open_image(tmp_path / "a.jpg")
    (tmp_path / "a.jpg").unlink()
    assert opened.getpixel((52, 36)) is not None


def palette() -> Image.Image:
    picture = Image.new("P", (4, 3), 1)
    picture.putpalette([0, 0, 0, 10, 200, 30])
    return picture


@pytest.mark.parametrize(
    ("picture", "suffix", "options", "colour"),
    [
        (Image.new("L", (4, 3), 90), ".png", {}, (90, 90, 90)),
        (Image.new("L", (4, 3), 90), ".png", {"transparency": 90}, (90, 90, 90)),
        (Image.new("LA", (4, 3), (90, 7)), ".png", {}, (90, 90, 90)),
        (Image.new("1", (4, 3), 1), ".png", {}, (255, 255, 255)),
        (Image.new("RGBA", (4, 3), (10, 200, 30, 128)), ".png", {}, (10, 200, 30)),
        (Image.new("RGB", (4, 3), (10, 200, 30)), ".png", {"transparency": (10, 200, 30)}, (10, 200, 30)),
        (palette(), ".png", {}, (10, 200, 30)),
        (palette(), ".gif", {}, (10, 200, 30)),
        (palette(), ".png", {"transparency": b"\x00\x80"}, (10, 200, 30)),
        (palette(), ".png", {"transparency": 1}, (10, 200, 30)),
        (Image.new("CMYK", (4, 3), (0, 255, 255, 0)), ".tiff", {}, (255, 0, 0)),
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
    rows = b"".join(b"\0" + struct.pack(">4H", 0x1234, 0xFFFF, 0x5678, 0) for _ in range(3))
    (tmp_path / "alpha.png").write_bytes(png(2, 3, 16, 4, rows))
    assert open_image(tmp_path / "alpha.png").getpixel((1, 2)) == (0x56, 0x56, 0x56)


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


@pytest.mark.parametrize("name", ["png.jpg", "jpeg.png", "gif.bmp", "webp", "tiff.JPEG"])
def test_the_names_ending_does_not_matter(tmp_path, name):
    Image.new("RGB", (5, 4), (255, 0, 0)).save(tmp_path / name, format=name.split(".")[0].upper())
    assert np.abs(np.asarray(open_image(tmp_path / name), dtype=int) - (255, 0, 0)).max() <= 3


@pytest.mark.parametrize("suffix", [".gif", ".png", ".webp"])
def test_of_an_animation_the_first_frame(tmp_path, suffix):
    frames = [Image.new("RGB", (8, 8), colour) for colour in ((255, 0, 0), (0, 255, 0), (0, 0, 255))]
    frames[0].save(tmp_path / f"a{suffix}", save_all=True, append_images=frames[1:], lossless=True)
    assert open_image(tmp_path / f"a{suffix}").getpixel((4, 4)) == (255, 0, 0)


def test_what_is_no_image(tmp_path):
    assert failure(tmp_path / "absent.jpg") == "there is no such file"
    (tmp_path / "empty.jpg").touch()
    assert failure(tmp_path / "empty.jpg") == "the file is empty"
    (tmp_path / "text.jpg").write_text("<html>404</html>")
    assert failure(tmp_path / "text.jpg") == "this is no JPEG, PNG, WEBP, BMP, GIF, TIFF, PPM or JPEG2000 file"
    (tmp_path / "folder.jpg").mkdir()
    assert failure(tmp_path / "folder.jpg") == "this is a folder, a pipe or a device, and not a regular file"
    assert failure(tmp_path / "a\0b.jpg") == "embedded null byte"
    assert failure(tmp_path / ("x" * 300)) == "file name too long"


@pytest.mark.parametrize("kind", ["pipe", "link to an endless device"])
def test_what_would_never_end_is_not_read(tmp_path, kind):
    path = tmp_path / "a.jpg"
    if kind == "pipe":
        os.mkfifo(path)
    else:
        path.symlink_to("/dev/zero")
    assert failure(path) == "this is a folder, a pipe or a device, and not a regular file"
    with pytest.raises(SampleError, match="not a regular file"):
        image_size(path)


def test_a_file_too_large_for_a_picture_is_not_read(tmp_path):
    with (tmp_path / "sparse.png").open("wb") as file:
        file.truncate(40_000_000_000)
    tracemalloc.start()
    try:
        assert failure(tmp_path / "sparse.png") == "the file has 40.0 GB, and a picture at most 500.0 MB"
        assert tracemalloc.get_traced_memory()[1] < 1 << 20
    finally:
        tracemalloc.stop()


def test_only_readers_of_rasters_are_asked(tmp_path):
    (tmp_path / "a.jpg").write_bytes(b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 9 9\n%%EndComments\n%%EOF\n")
    assert "this is no JPEG" in failure(tmp_path / "a.jpg")  # Pillow would start Ghostscript
    Image.new("RGB", (5, 4)).save(tmp_path / "b.pcx")
    assert "this is no JPEG" in failure(tmp_path / "b.pcx")


def test_nothing_else_opens_pictures():
    rooms = [Path(__file__).parents[3] / room for room in ("pipeline", "heads", "cli")]
    openers = [path.name for room in rooms for path in room.rglob("*.py") if "Image.open(" in path.read_text()]
    assert openers == ["images.py"]


def test_the_size_of_a_picture_needs_no_pixels(tmp_path):
    (tmp_path / "a.png").write_bytes(png(40, 30, 8, 2, b""))
    assert image_size(tmp_path / "a.png") == (40, 30)
    with pytest.raises(SampleError, match="there is no such file"):
        image_size(tmp_path / "b.png")


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


def test_a_decompression_bomb_is_refused_by_its_header(tmp_path):
    (tmp_path / "bomb.png").write_bytes(png(60_000, 60_000, 8, 2, b"\0" * 100))
    assert "more than 175 million pixels" in failure(tmp_path / "bomb.png")


def test_a_picture_of_endless_scans_is_refused_before_the_first(tmp_path):
    buffer = BytesIO()
    Image.new("L", (7000, 7000)).save(buffer, "JPEG", progressive=True)
    whole = buffer.getvalue()
    last = whole[whole.rindex(b"\xff\xda") : -2]
    (tmp_path / "scans.jpg").write_bytes(whole[:-2] + 100_000 * last + whole[-2:])  # 8 MB; two hours to decode
    assert failure(tmp_path / "scans.jpg") == "it has more than 100 scans; save it anew"
    (tmp_path / "usual.jpg").write_bytes(whole)
    assert open_image(tmp_path / "usual.jpg").size == (7000, 7000)


def test_what_follows_a_picture_is_none_of_its_scans(tmp_path):
    buffer = BytesIO()
    Image.fromarray(noise(40, 60)).save(buffer, "JPEG", progressive=True)
    picture, video = buffer.getvalue(), 200 * b"\xff\xda\x00\x00"  # of a phone that films beside
    (tmp_path / "motion.jpg").write_bytes(picture + video)
    assert open_image(tmp_path / "motion.jpg").tobytes() == open_image(BytesIO(picture).getvalue()).tobytes()
    inside = b"\xff\xed" + (len(video) + 2).to_bytes(2, "big") + video  # a segment that decoders pass over
    (tmp_path / "segment.jpg").write_bytes(picture[:2] + inside + picture[2:])
    assert open_image(tmp_path / "segment.jpg").size == (60, 40)


def test_a_large_picture_is_no_bomb(tmp_path, monkeypatch):
    Image.fromarray(noise(30, 50)).save(tmp_path / "large.png")
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", 1000)  # Pillow warns from here, and refuses from twice as many
    assert open_image(tmp_path / "large.png").size == (50, 30)


def test_the_pixels_of_an_open_picture_are_counted_too():
    with pytest.raises(SampleError, match="the picture: it has more than 0 million pixels"):
        open_image(Image.new("RGB", (50, 30)), most_pixels=1000)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["JPEG", "PNG", "WEBP", "GIF", "BMP", "TIFF"])
def test_ten_thousand_damaged_pictures(tmp_path, kind):
    """Each is a picture or a sample that cannot be read, soon and in little memory, whatever bytes were changed."""
    rng, path = np.random.default_rng(0), tmp_path / "damaged"
    sources = []
    for mode in ("RGB", "L", "1"):
        picture = Image.fromarray(noise(17, 23)).convert(mode)
        for options in ({}, {"optimize": True}, {"progressive": True, "compression": "tiff_lzw", "lossless": True}):
            buffer = BytesIO()
            picture.save(buffer, kind, **options)
            sources.append(buffer.getvalue())
    outcomes, slowest = Counter(), 0.0
    memory = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    for number in range(10_000 // 6 + 1):
        damaged = bytearray(sources[number % len(sources)])
        way = ("cut", "bits", "header", "both")[int(rng.integers(4))]
        if way in ("bits", "both"):
            for place in rng.integers(0, len(damaged), int(rng.integers(1, 9))):
                damaged[place] ^= 1 << int(rng.integers(8))
        if way in ("header", "both"):
            for place in rng.integers(0, min(64, len(damaged)), int(rng.integers(1, 5))):
                damaged[place] = int(rng.choice([0, 1, 127, 128, 255]))
        if way in ("cut", "both"):
            del damaged[int(rng.integers(0, len(damaged))) :]
        path.write_bytes(damaged)
        began = time.perf_counter()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            try:
                opened = open_image(path)
            except SampleError as error:
                assert error.reason
                outcomes["refused"] += 1
            else:
                assert opened.mode == "RGB"
                outcomes["pictures"] += 1
        slowest = max(slowest, time.perf_counter() - began)
    grown = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - memory
    assert outcomes["refused"] and outcomes["pictures"], outcomes
    assert slowest < 10, (slowest, outcomes)
    assert grown < 3 << 20, (grown, outcomes)  # kB: the most pixels and their copies


def test_threads_do_not_disturb_each_other(tmp_path):
    paths = [tmp_path / f"{number}.png" for number in range(40)]
    for number, path in enumerate(paths):
        Image.new("RGB", (20, 20), (number, 0, 0)).save(path)
    before = list(warnings.filters)
    with ThreadPoolExecutor(8) as pool:
        pixels = list(pool.map(lambda path: open_image(path).getpixel((3, 3)), paths * 5))
    assert pixels == [(number, 0, 0) for number in range(40)] * 5
    assert warnings.filters == before
