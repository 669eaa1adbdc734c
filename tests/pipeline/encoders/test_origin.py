"""Encoders found again from what a set says of itself."""

import json
from dataclasses import replace

import pytest
from encoder_contract import image_encoder

from xret.pipeline.encoders.origin import Origin
from xret.pipeline.encoders.spec import EncoderSpec
from xret.pipeline.errors import EncoderError

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
        with pytest.raises(EncoderError, match=r"w\.safetensors, which are not there; give .* as `visual_weights`"):
            known.load_images(None, "cpu")
        assert known.load_images("moved.safetensors", "cpu").identity == expected


def test_what_was_imported_has_no_encoder():
    imported = Origin("scan@1", "roi", {"encoder": "scan", "weights": "unknown"}, "float32", None)
    with pytest.raises(EncoderError, match=r"'scan@1' was imported, .* new pictures"):
        imported.load_images(None, "cpu")
    with pytest.raises(EncoderError, match=r"'scan@1' was imported, .* new captions"):
        imported.load_captions(None, "cpu")
