"""Encoders found again from what a set says of itself, and features that are laid out as a set has them."""

from types import SimpleNamespace

import numpy as np
import pytest
import torch
from PIL import Image

from xret.pipeline.data.regions import Regions
from xret.pipeline.encoders import registry
from xret.pipeline.encoders.words import WordsEncoder
from xret.pipeline.errors import EncoderError, SampleError
from xret.pipeline.reading.origin import Origin
from xret.pipeline.reading.reencoding import (
    BATCH,
    caption_encoder,
    encode_captions,
    encode_images,
    image_encoder,
)

REGIONS = {"boxes": "proposals", "fewest": 10, "most": 100}


def features(identity, asked=None, **more):
    attributes = {} if asked is None else {"asked": {"weights": asked}}
    return SimpleNamespace(name="set@1", kind="grid", identity=identity, dtype="float16", attributes=attributes, **more)


@pytest.mark.parametrize(
    ("identity", "words"),
    [
        ({"encoder": "resnet18", "preprocessing": {"crop": 96}}, ("resnet18", 96, None)),
        ({"encoder": "resnet18", "preprocessing": {"crop": 96, "orientation": "exif"}}, ("resnet18", 96, None)),
        ({"encoder": "resnet18", "preprocessing": {"stretch": 96, "whole": True}}, ("resnet18", 96, None)),
        ({"encoder": "butd-grid", "preprocessing": {"stretch": 448}}, ("butd-grid", 448, None)),
        (
            {"encoder": "resnet18-frames", "preprocessing": {"crop": 64}, "frames": {"most": 8}},
            ("resnet18", 64, 8),
        ),
        ({"encoder": "butd", "preprocessing": {"shorter": 600}, "regions": REGIONS}, ("butd", (10, 100), None)),
        (
            {"encoder": "fasterrcnn_resnet50_fpn_v2", "preprocessing": {"shorter": 800}, "regions": REGIONS},
            ("fasterrcnn_resnet50_fpn_v2", (10, 100), None),
        ),
    ],
    ids=lambda value: value[0] if isinstance(value, tuple) else "",
)
def test_every_kind_of_image_encoder_is_asked_for_by_its_own_words(monkeypatch, identity, words):
    asked = []

    def load(*given):
        asked.append(given)
        return SimpleNamespace(identity=identity)

    monkeypatch.setattr(registry, "_visual", load)
    image_encoder(Origin.of(features(identity)), "w.pth", "cpu", trust=True)
    name, size, frames = words
    upright, whole = (key in identity["preprocessing"] for key in ("orientation", "whole"))
    assert asked == [(name, "w.pth", size, "cpu", frames, True, (), -1, True, upright, whole)]
    changed = {**identity, "weights": "others"}
    with pytest.raises(EncoderError, match=r"'w\.pth' is not what 'set@1' was made with \(its weights differ\)"):
        image_encoder(Origin.of(features(changed)), "w.pth", "cpu")


BERT = "86b5e0934494bd15c9632b12f734a8a67f723594"  # the revision of bert-base-uncased


@pytest.mark.parametrize(
    ("identity", "asked", "weights"),
    [
        ({"encoder": "resnet18", "weights": "random:3"}, "random:3", "random:3"),
        ({"encoder": "resnet18", "weights": "ab12"}, "imagenet", "imagenet"),
        ({"encoder": "resnet18", "weights": "ab12"}, "sha256:cd34", None),
        ({"encoder": "bert", "weights": "ab12"}, "sha256:cd34", None),
        ({"encoder": "bert", "weights": "ab12"}, "revision:cd34", None),
        ({"encoder": "bert", "weights": "ab12"}, f"revision:{BERT}", "bert-base-uncased"),
        ({"encoder": "words", "weights": "ab12"}, "", None),
    ],
)
def test_weights_are_known_again_unless_they_came_from_a_file(identity, asked, weights):
    assert Origin.of(features(identity, asked)).weights == weights


def test_what_was_imported_has_no_encoder():
    imported = Origin("scan@1", "roi", {"encoder": "scan", "weights": "unknown"}, "float32", None)
    with pytest.raises(EncoderError, match=r"'scan@1' was imported, .* new pictures"):
        image_encoder(imported, None, "cpu")
    with pytest.raises(EncoderError, match=r"'scan@1' was imported, .* new captions"):
        caption_encoder(imported, None, "cpu")


class Shades:
    """As many regions as a picture is wide, each its shade times a thousand."""

    kind, rows, channels, global_channels = "roi", 5, 2, 2
    grid = space = None

    def decode(self, path):
        return np.asarray(path.convert("L"), dtype=np.float32), path.size

    def encode(self, decoded):
        return [Regions(np.repeat(1000 * pixels[0][:, None], 2, axis=1)) for pixels in decoded]


def picture(*shades):
    return Image.fromarray(np.array([shades], dtype=np.uint8))


def test_regions_are_laid_out_and_rounded_as_in_a_set():
    (made,) = encode_images(Shades(), "float16", "cpu", [picture(1, 3), picture(7, 8, 9)])
    assert made.length.tolist() == [2, 3]
    assert made.local.dtype == torch.float16
    assert made.local[:, :, 0].tolist() == [[1000, 3000, 0, 0, 0], [7000, 8000, 9000, 0, 0]]
    assert made.global_.tolist() == [[2000, 2000], [8000, 8000]]


def test_features_that_the_dtype_cannot_hold_are_refused():
    with pytest.raises(SampleError, match="the picture: its features are beyond float16"):
        list(encode_images(Shades(), "float16", "cpu", [picture(1), picture(70)]))
    (made,) = encode_images(Shades(), "float32", "cpu", [picture(70)])
    assert made.local[0, 0, 0] == 70_000


def test_words_come_padded_some_at_a_time():
    encoder = WordsEncoder(["<unk>", "red", "disc"])
    texts = ["a red disc", "", "disc"] + ["red"] * BATCH
    one, two = encode_captions(encoder, "int32", "cpu", texts)
    assert one.token[:3].tolist() == [[0, 1, 2], [0, 0, 0], [2, 0, 0]]
    assert one.length[:3].tolist() == [3, 1, 1]
    assert (len(one.length), two.token.tolist()) == (BATCH, [[1]] * 3)
