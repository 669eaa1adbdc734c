"""Features of new pictures and captions are laid out as a set has them."""

import numpy as np
import pytest
import torch
from PIL import Image

from xret.heads.runs.encoders import BATCH, encode_captions_by_all, encode_images_by_all
from xret.pipeline.encoders.words import WordsEncoder
from xret.pipeline.errors import SampleError
from xret.pipeline.store.regions import Regions


class Shades:
    """As many regions as a picture is wide, each its shade times a thousand."""

    kind, rows, channels, global_channels = "roi", 5, 2, 2
    grid = space = None
    extras = ()

    def decode(self, path):
        return np.asarray(path.convert("L"), dtype=np.float32), path.size

    def encode(self, decoded):
        return [Regions(np.repeat(1000 * pixels[0][:, None], 2, axis=1)) for pixels in decoded]


def picture(*shades):
    return Image.fromarray(np.array([shades], dtype=np.uint8))


def test_regions_are_laid_out_and_rounded_as_in_a_set():
    (made,) = encode_images_by_all([(Shades(), "float16")], "cpu", [picture(1, 3), picture(7, 8, 9)])
    assert made.length.tolist() == [2, 3]
    assert made.local.dtype == torch.float16
    assert made.local[:, :, 0].tolist() == [[1000, 3000, 0, 0, 0], [7000, 8000, 9000, 0, 0]]
    assert made.global_.tolist() == [[2000, 2000], [8000, 8000]]


def test_features_that_the_dtype_cannot_hold_are_refused():
    with pytest.raises(SampleError, match="the picture: its features are beyond their dtype"):
        list(encode_images_by_all([(Shades(), "float16")], "cpu", [picture(1), picture(70)]))
    (made,) = encode_images_by_all([(Shades(), "float32")], "cpu", [picture(70)])
    assert made.local[0, 0, 0] == 70_000


def test_words_come_padded_some_at_a_time():
    encoder = WordsEncoder(["<unk>", "red", "disc"])
    texts = ["a red disc", "", "disc"] + ["red"] * BATCH
    one, two = encode_captions_by_all([(encoder, "int32")], "cpu", texts)
    assert one.token[:3].tolist() == [[0, 1, 2], [0, 0, 0], [2, 0, 0]]
    assert one.length[:3].tolist() == [3, 1, 1]
    assert (len(one.length), two.token.tolist()) == (BATCH, [[1]] * 3)
