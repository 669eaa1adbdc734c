"""Encoders on the CPU, drawn pictures, what all tests of encoders share, and what every encoder of regions promises."""

import numpy as np
import pytest
import torch
from PIL import Image, ImageDraw

from xret.pipeline.encoders.registry import load_text, load_visual
from xret.pipeline.encoders.spec import EncoderSpec
from xret.pipeline.errors import EncoderError, SampleError

SIZES = [(180, 140), (90, 200), (64, 64)]


def image_encoder(name, weights=None, image_size=None, **options):
    return load_visual(EncoderSpec(name, weights=weights and str(weights), image_size=image_size, **options), "cpu")


def text_encoder(name, weights=None, **options):
    return load_text(EncoderSpec(name, weights=weights and str(weights), **options), "cpu")


def picture(path, size=(180, 140), seed=0):
    """Draw something with edges, shades and colours."""
    random = np.random.default_rng(seed)
    shade = np.linspace(40, 210, size[0], dtype=np.uint8)
    image = Image.fromarray(np.repeat(np.tile(shade, (size[1], 1))[:, :, None], 3, axis=2))
    draw = ImageDraw.Draw(image)
    for _ in range(12):
        x, y, side = random.integers(0, size[0]), random.integers(0, size[1]), random.integers(5, 60)
        draw.ellipse((x, y, x + side, y + side), fill=tuple(random.integers(0, 256, 3).tolist()))
    image.save(path, quality=95)
    return path


def prepared(encoder, photographs):
    return torch.stack([encoder.decode(path)[0] for path in photographs])


def are_pixels(encoder, photographs, pixels):
    """Assert that pictures travel as uint8, and give the features of these pixels of a library's own transform."""
    ours = prepared(encoder, photographs)
    assert ours.dtype == torch.uint8 and ours.shape == pixels.shape
    for found, expected in zip(encoder.encode(ours), encoder.encode(pixels), strict=True):
        assert np.array_equal(found, expected)


def close(found, expected, tolerance=1e-5):
    expected = np.asarray(expected)
    np.testing.assert_allclose(found, expected, rtol=tolerance, atol=tolerance * np.abs(expected).max())


def refused(sentence, load, *arguments, **options):
    """Assert that an encoder is refused with one line that matches the sentence."""
    with pytest.raises(EncoderError, match=sentence) as caught:
        load(*arguments, **options)
    assert "\n" not in str(caught.value)


class RegionContract:
    """Inherit and give a fixture `encoder` of 3 to 8 regions, the numbers of its classes, and how far boxes reach."""

    classes = range(0)
    beyond = 0  # how far x2 and y2 may lie from width and height

    def test_regions_of_each_picture(self, encoder, tmp_path):
        assert (encoder.kind, encoder.rows, encoder.extras) == ("roi", 8, ("boxes", "classes", "scores"))
        sizes = [(150, 120), (90, 200)]
        decoded = [encoder.decode(picture(tmp_path / f"{i}.png", size, i)) for i, size in enumerate(sizes)]
        assert [size for _, size in decoded] == sizes
        for regions, size in zip(encoder.encode([image for image, _ in decoded]), sizes, strict=True):
            count, boxes = len(regions.local), regions.boxes
            assert 3 <= count <= 8 and regions.size == size
            assert (regions.local.dtype, regions.local.shape) == (np.float32, (count, encoder.channels))
            assert (boxes.dtype, boxes.shape) == (np.float32, (count, 4))
            assert (regions.scores.dtype, regions.scores.shape) == (np.float32, (count,))
            assert np.issubdtype(regions.classes.dtype, np.integer) and regions.classes.shape == (count,)
            assert np.isfinite(regions.local).all() and 0.05 < regions.local.std() < 10 and regions.local.max() < 100
            assert (boxes[:, :2] >= 0).all() and (boxes[:, :2] < boxes[:, 2:] - self.beyond).all()
            assert (boxes[:, 2:] <= np.array(size) + self.beyond + 1e-3).all()
            assert set(regions.classes.tolist()) <= set(self.classes)
            assert (np.diff(regions.scores) <= 0).all() and ((regions.scores >= 0) & (regions.scores <= 1)).all()

    def test_a_picture_does_not_depend_on_the_others(self, encoder, tmp_path):
        pictures = [encoder.decode(picture(tmp_path / f"{i}.png", (120 + i, 100), i))[0] for i in range(3)]
        together = encoder.encode(pictures)
        for number, alone in enumerate([encoder.encode([one])[0] for one in pictures]):
            for name in ("local", "boxes", "classes", "scores"):
                assert getattr(alone, name).tobytes() == getattr(together[number], name).tobytes()
        assert np.abs(together[0].local[0] - together[1].local[0]).max() > 1e-2

    @pytest.mark.parametrize("size", [(1, 1), (4, 100), (120, 3), (64, 64), (15, 40)])
    def test_small_and_narrow_pictures_have_regions(self, encoder, tmp_path, size):
        image, original = encoder.decode(picture(tmp_path / "p.png", size))
        regions = encoder.encode([image])[0]
        assert original == size and 1 <= len(regions.local) <= 8
        assert np.isfinite(regions.local).all() and (regions.boxes[:, 2:] <= np.array(size)).all()

    def test_a_picture_that_cannot_be_used_is_named(self, encoder, tmp_path):
        Image.new("RGB", (1, 101)).save(tmp_path / "thin.png")
        for path in (tmp_path / "thin.png", tmp_path / "absent.png"):
            with pytest.raises(SampleError) as caught:
                encoder.decode(path)
            assert caught.value.sample == str(path)
