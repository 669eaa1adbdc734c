"""Samples: captions in the order of the store, pictures as RGB, words."""

import hashlib
import itertools
import json
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
from small_captions import image, karpathy, manifest, refusal

from xret.pipeline.data.images import image_size, open_image
from xret.pipeline.data.manifest import load_manifest
from xret.pipeline.data.samples import SPLITS, read_samples, tokenize
from xret.pipeline.errors import SampleError

# --- Rows


@settings(max_examples=40, deadline=None)
@given(st.lists(st.sampled_from(["train", "val", "test", "other", "restval", "dev"]), min_size=1, max_size=12))
def test_rows_are_ordered_by_split_then_as_in_the_source(tmp_path_factory, splits):
    images = [image(number, split) for number, split in enumerate(splits)]
    merge = "merge_splits: {restval: train}\n"
    samples = read_samples(karpathy(tmp_path_factory.mktemp("order"), images, merge))
    expected = []  # said again by looking for each split in turn
    for wanted in ("train", "val", "test", "other"):
        first = len(expected)
        for number, split in enumerate(splits):
            final = {"restval": "train", "dev": "other"}.get(split, split)
            if final == wanted:
                expected.append((str(number), wanted))
        assert samples.splits.get(wanted) == ((first, len(expected)) if len(expected) > first else None)
    assert [(i.id, i.split) for i in samples.images] == expected
    assert list(samples.splits) == [split for split in SPLITS if split in samples.splits]


def test_only_the_first_captions_are_kept_and_their_numbers_stay(tmp_path):
    counts = {0: 7, 1: 2, 2: 5}
    rows = "".join(f"{number}.jpg,text {k},train\n" for number, n in counts.items() for k in range(n))
    text = f"file_name,caption,split\n{rows}"
    kept = read_samples(manifest(tmp_path, text, ".csv", "captions_per_image: 5\n"))
    assert [[c.text for c in i.captions] for i in kept.images] == [
        [f"text {k}" for k in range(min(5, n))] for n in counts.values()
    ]
    assert [i.captions[0].sentid for i in kept.images] == [0, 7, 9]


def test_promised_counts_are_checked_after_merging(tmp_path):
    images = [image(1), image(2, "restval"), image(3, "val")]
    merge = "merge_splits: {restval: train}\n"
    good = karpathy(tmp_path, images, merge + "counts: {train: 2, val: 1, test: 0}\n")
    assert read_samples(good).splits == {"train": (0, 2), "val": (2, 3)}
    message = refusal(karpathy(tmp_path, images, merge + "counts: {train: 3, val: 1, test: 4}\n"))
    assert "it holds 2 train images where the manifest promises 3, 0 test images where" in message
    assert f"or correct 'counts' in {tmp_path / 'birds.yaml'}" in message
    assert "it holds 1 train image where" in refusal(karpathy(tmp_path, images, "counts: {train: 2}\n"))


# --- Splits by hash


@pytest.mark.parametrize("suffix", [".csv", ".jsonl", ".json"])
def test_without_splits_the_hash_decides_and_says_so_once(tmp_path, capsys, suffix):
    names = [f"folder/bird {number}.jpg" for number in range(2000)]
    if suffix == ".csv":
        text = "file_name,caption\n" + "".join(f"{name},a\n{name},b\n" for name in names)
    elif suffix == ".jsonl":
        text = "".join(json.dumps({"file_name": name, "caption": "a"}) + "\n" for name in names)
    else:
        text = json.dumps({"images": [{"filename": name, "sentences": [{"raw": "a"}]} for name in names]})
    samples = read_samples(manifest(tmp_path, text, suffix))
    found = {i.file_name: i.split for i in samples.images}
    for name in names:
        share = int(hashlib.sha256(name.encode()).hexdigest()[:16], 16) % 100
        assert found[name] == (80 * ["train"] + 10 * ["val"] + 10 * ["test"])[share]
    counts = {split: last - first for split, (first, last) in samples.splits.items()}
    assert counts["train"] == pytest.approx(1600, abs=80)
    assert counts["val"] == pytest.approx(200, abs=60)
    output = capsys.readouterr()
    assert output.out == ""
    said = f"{counts['train']} train, {counts['val']} val, {counts['test']} test by SHA-256 of the file name."
    assert output.err == f"{tmp_path / 'captions'}{suffix} names no splits: {said}\n"


def test_nothing_is_said_where_splits_are_given(tmp_path, capsys):
    read_samples(karpathy(tmp_path, [image(1)]))
    assert capsys.readouterr() == ("", "")


# --- The digest


def test_the_digest_does_not_know_where_the_folder_lies_nor_how_the_file_is_laid_out(tmp_path):
    images = [image(1), image(2, "val", ["a", "b"])]
    one = read_samples(karpathy(tmp_path / "one", images))
    two = read_samples(manifest(tmp_path / "two" / "deeper", json.dumps({"images": images}, indent=3)))
    assert one.digest == two.digest
    assert len(bytes.fromhex(one.digest)) == 32


def test_the_digest_changes_with_every_value_of_every_row(tmp_path):
    def fresh():
        return [image(n, "train", ["ab", "c"], filepath="f", cocoid=50 + n) for n in range(3)]

    changed = [fresh()]
    for row in range(3):
        for key, value in {"filename": "9.jpg", "split": "val", "cocoid": 9, "filepath": "g"}.items():
            changed.append(fresh())
            changed[-1][row][key] = value
        for sentence in range(2):
            for key, value in {"raw": "AB", "sentid": 999}.items():
                changed.append(fresh())
                changed[-1][row]["sentences"][sentence][key] = value
        changed.append(fresh())
        changed[-1][row]["imgid"] = 77
        for sentence in changed[-1][row]["sentences"]:
            sentence["imgid"] = 77
        changed.append(fresh())
        changed[-1][row]["sentences"].pop()
        changed.append(fresh())
        changed[-1].pop(row)
    changed.append(fresh()[::-1])
    changed.append([image(n, "train", ["a", "bc"], filepath="f", cocoid=50 + n) for n in range(3)])
    digests = [read_samples(karpathy(tmp_path, images)).digest for images in changed]
    renamed = karpathy(tmp_path, fresh())
    renamed.path.write_text(renamed.path.read_text().replace("birds", "fish"))
    digests.append(read_samples(load_manifest(renamed.path)).digest)
    assert len(set(digests)) == len(digests) == 2 + 3 * 11 + 2


# --- Real and large files


def check_against_the_source(samples, source: Path) -> None:
    """Compare with the JSON, read here in the plainest way."""
    found = {i.file_name: i for i in samples.images}
    order = {"train": [], "val": [], "test": []}
    for entry in json.loads(source.read_text())["images"]:
        order[entry["split"]].append(entry["filename"])
        sample = found.pop(entry["filename"])
        assert sample.id == str(entry["imgid"])
        assert [c.text for c in sample.captions] == [s["raw"] for s in entry["sentences"]]
        assert [c.sentid for c in sample.captions] == entry["sentids"]
    assert not found
    assert [i.file_name for i in samples.images] == order["train"] + order["val"] + order["test"]


def test_rsicd_with_its_bundled_manifest(shared_data):
    rsicd = load_manifest("rsicd", shared_data("rsicd").parent)
    samples = read_samples(rsicd)
    assert samples.splits == {"train": (0, 7734), "val": (7734, 8734), "test": (8734, 9828)}
    texts = [caption.text for i in samples.images for caption in i.captions]
    assert (len(texts), len(set(texts))) == (49_140, 15_097)
    assert [text.strip() for text in texts if not tokenize(text)] == [".", ".", "."]
    check_against_the_source(samples, rsicd.captions)
    assert open_image(rsicd.images / samples.images[0].file_name).size == (224, 224)


def test_the_flickr8k_sample(shared_data, tmp_path):
    folder = shared_data("flickr8k-sample")
    path = tmp_path / "mine.yaml"
    path.write_text(f"name: f8k\nimages: {folder}/images\ncaptions: {folder}/dataset_flickr8k_sample.json\n")
    flickr = load_manifest(path)
    samples = read_samples(flickr)
    assert samples.splits == {"train": (0, 89), "val": (89, 178), "test": (178, 266)}
    check_against_the_source(samples, flickr.captions)
    for sample in samples.images[::40]:
        assert min(open_image(flickr.images / sample.file_name).size) == 256


def test_a_file_of_the_size_of_a_fifth_of_coco(tmp_path):
    texts = ["a man riding a horse on a beach", "a rider", "horse and man", "someone on a horse", "a beach"]
    images = [image(n, ("train", "val", "restval")[n % 3], texts, filepath="x", cocoid=n) for n in range(20_000)]
    samples = read_samples(karpathy(tmp_path, images, "merge_splits: {restval: train}\n"))
    assert sum(len(i.captions) for i in samples.images) == 100_000
    assert samples.splits == {"train": (0, 13_333), "val": (13_333, 20_000)}
    assert samples.images[13_333].cocoid == 1


# --- Pictures


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


# --- Words


@pytest.mark.parametrize(
    ("text", "words"),
    [
        (".", []),
        ("", []),
        (" \n\t -- ' _ ?! ", []),
        ("Two Dogs , running.", ["two", "dogs", "running"]),
        ("The dog's T-shirt", ["the", "dog's", "t-shirt"]),
        ("the dogs' owner", ["the", "dogs", "owner"]),
        ("it’s a well-known 'quote'", ["it's", "a", "well-known", "quote"]),
        ("snake_case and/or 2.5", ["snake", "case", "and", "or", "2", "5"]),
        ("FRÜHSTÜCK im Café", ["frühstück", "im", "café"]),
        ("cafe\u0301", ["café"]),
        ("पक्षी उड़ता है", ["पक्षी", "उड़ता", "है"]),
        ("鳥が飛ぶ。", ["鳥が飛ぶ"]),
    ],
)
def test_words(text, words):
    assert tokenize(text) == words


@given(st.text())
def test_words_are_lower_case_whole_and_stay_the_same_when_split_again(text):
    words = tokenize(text)
    assert tokenize(" ".join(words)) == words
    for word in words:
        assert word == word.lower()
        assert not any(character.isspace() for character in word)
        assert word[0].isalnum()
    assert bool(words) == any(character.isalnum() for character in text)


@given(st.text(alphabet=st.characters(max_codepoint=127)))
def test_ascii_words_by_hand(text):
    expected, word = [], ""
    padded = f"{text.lower()}  "
    for character, following in itertools.pairwise(padded):
        joins = character in "'-" and word and word[-1].isalnum() and following.isalnum()
        if character.isalnum() or joins:
            word += character
        elif word:
            expected.append(word)
            word = ""
    assert tokenize(text) == expected


def test_images_of_a_split_that_is_not_known_are_named(tmp_path, capsys):
    images = [image(0), image(1, "validation"), image(2, "validation"), image(3, "restval")]
    assert read_samples(karpathy(tmp_path, images)).splits == {"train": (0, 1), "other": (1, 4)}
    assert "count as 'other' (2 in 'validation'); map them to train, val or test" in capsys.readouterr().err
    samples = read_samples(karpathy(tmp_path, images, "merge_splits: {validation: val}\n"))
    assert samples.splits == {"train": (0, 1), "val": (1, 3), "other": (3, 4)}
    assert capsys.readouterr().err == ""
