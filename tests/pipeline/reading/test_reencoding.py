"""Encoders found again from what a set says of itself, and features that are laid out as a set has them."""

import json
from dataclasses import replace

import numpy as np
import pytest
import torch
from encoder_contract import image_encoder
from PIL import Image

from xret.pipeline.data.regions import Regions
from xret.pipeline.encoders.spec import EncoderSpec
from xret.pipeline.encoders.words import WordsEncoder
from xret.pipeline.errors import EncoderError, SampleError
from xret.pipeline.reading.origin import Origin
from xret.pipeline.reading.reencoding import BATCH, encode_captions_by_all, encode_images_by_all

SET = {"name": "set@1", "kind": "grid", "dtype": "float16"}


@pytest.mark.parametrize(
    "spec",
    [
        EncoderSpec("resnet18", weights="random:3", image_size=96, pool=(2, 2), whole=True),
        EncoderSpec("butd", weights="/there/w.pth", regions=(10, 100)),
        EncoderSpec("hf:openai/clip-vit@abc", layer=-2, prompt="a {}", dtype="float32"),
        EncoderSpec("resnet18", frames=8),
    ],
)
def test_an_origin_survives_json_without_folders(spec):
    origin = Origin(**SET, identity={"weights": "1"}, spec=spec)
    assert Origin.from_json(json.loads(json.dumps(origin.to_json()))) == origin
    told = json.dumps(origin.without_folders().to_json())
    assert "/there" not in told
    assert Origin.from_json(json.loads(told)) == replace(origin, spec=spec.without_folders())


def test_other_weights_are_refused_and_missing_ones_named(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    image_encoder("resnet18", "random:0", 64).save(tmp_path / "w.safetensors")
    made = image_encoder("resnet18", tmp_path / "w.safetensors", 64, views="crop-flip:2")
    expected = image_encoder("resnet18", "w.safetensors", 64).identity
    origin = Origin(**SET, identity=made.identity, spec=made.spec)
    assert origin.load_images(None, "cpu").identity == expected
    with pytest.raises(EncoderError, match=r"'random:1' is not what 'set@1' was made with \(its weights differ\)"):
        origin.load_images("random:1", "cpu")
    (tmp_path / "w.safetensors").rename(tmp_path / "moved.safetensors")
    for known in (origin, Origin.from_json(origin.without_folders().to_json())):
        with pytest.raises(EncoderError, match=r"w\.safetensors, which are not there; give .* as visual_weights"):
            known.load_images(None, "cpu")
        assert known.load_images("moved.safetensors", "cpu").identity == expected


def test_what_was_imported_has_no_encoder():
    imported = Origin("scan@1", "roi", {"encoder": "scan", "weights": "unknown"}, "float32", None)
    with pytest.raises(EncoderError, match=r"'scan@1' was imported, .* new pictures"):
        imported.load_images(None, "cpu")
    with pytest.raises(EncoderError, match=r"'scan@1' was imported, .* new captions"):
        imported.load_captions(None, "cpu")


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
