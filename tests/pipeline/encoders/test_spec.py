"""The one description of an encoder: what it refuses, and what it becomes on another machine."""

import json
from dataclasses import fields, replace

import pytest
from encoder_contract import image_encoder, refused, text_encoder

from xret.pipeline.encoders.spec import EncoderSpec, short_name

FULL = EncoderSpec("hf:a/b", "w.pth", 96, -2, True, (2, 3), "dihedral:8", (10, 100), 4, "a {}", "float32", True)
OPTIONS = {
    "weights": "random:0", "image_size": 64, "layer": 2, "whole": True, "pool": (2, 2), "views": "dihedral:8",
    "regions": (3, 8), "frames": 4, "prompt": "a {}",
}  # fmt: skip
# By name what it does not take.
REFUSED = {
    "resnet18": ("layer", "regions", "prompt"),
    "hf:clip": ("weights", "regions", "prompt"),
    "timm:resnet18": ("regions", "prompt"),
    "open_clip:RN50": ("regions", "prompt"),
    "butd": ("image_size", "layer", "whole", "pool", "views", "frames", "prompt"),
    "butd-grid": ("layer", "whole", "regions", "prompt"),
    "fasterrcnn_resnet50_fpn_v2": ("image_size", "layer", "whole", "pool", "views", "frames", "prompt"),
    "own_encoder:Quarters": ("layer", "whole", "regions", "frames", "prompt"),
}
OF_IMAGES = ("image_size", "whole", "pool", "views", "regions", "frames")
REFUSED_TEXTS = dict.fromkeys(("bert", "hf:clip", "open_clip:RN50/openai"), OF_IMAGES)


@pytest.mark.parametrize("spec", [FULL, EncoderSpec("resnet18"), EncoderSpec("butd", regions=(36, 36))])
def test_json_gives_it_again(spec):
    assert EncoderSpec.from_json(json.loads(json.dumps(spec.to_json()))) == spec
    assert len(FULL.to_json()) == len(fields(EncoderSpec))
    assert EncoderSpec("resnet18", weights="imagenet").to_json() == {"name": "resnet18"}


@pytest.mark.parametrize("value", [None, [], {}, {"name": 3}, {"name": "a", "other": 1}, {"weights": "a"}])
def test_json_of_something_else_is_refused(value):
    refused("does not describe an encoder", EncoderSpec.from_json, value)


@pytest.mark.parametrize(
    "wrong", [{"pool": (2,)}, {"regions": (1, "2")}, {"prompt": "a photo"}, {"frames": 0}, {"image_size": 0}]
)
def test_values_that_cannot_be_are_refused(wrong):
    refused(next(iter(wrong)), EncoderSpec, "resnet18", **wrong)


@pytest.mark.parametrize(("load", "names"), [(image_encoder, REFUSED), (text_encoder, REFUSED_TEXTS)])
def test_what_an_encoder_does_not_take_is_refused(load, names):
    for name, options in names.items():
        for option in options:
            sentence = f"'{name}' does not take {option}; leave it out .it takes "
            refused(sentence, load, name, **{option: OPTIONS[option]})


@pytest.mark.parametrize(
    ("name", "meant"),
    [
        ("openclip:RN50/openai", "open_clip:RN50/openai"),
        ("open-clip:RN50", "open_clip:RN50"),
        ("timm/resnet18", "timm:resnet18"),
        ("hf/some/model", "hf:some/model"),
        ("openai/clip-vit-base-patch32", "hf:openai/clip-vit-base-patch32"),
        ("resnet_50", "resnet50"),
        ("butd_grid", "butd-grid"),
    ],
)
def test_slips_are_answered_with_the_nearest_name(name, meant):
    refused(rf"there is no encoder '{name}' \(did you mean '{meant}'\?\)", image_encoder, name)


def test_it_is_recorded_so_that_it_means_the_same_from_any_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "w.pth").touch()
    spec = EncoderSpec("resnet18", weights="w.pth", trust=True)
    located = spec.located({})
    assert located == replace(spec, weights=str(tmp_path / "w.pth"), trust=False)
    assert (located.without_folders().weights, located.without_folders().missing) == ("./w.pth", False)
    assert EncoderSpec("hf:a/b@main").located({"commit": "12"}) == EncoderSpec("hf:a/b@12")
    assert EncoderSpec("hf:w.pth").located({}).without_folders() == EncoderSpec("hf:./w.pth")
    (tmp_path / "w.pth").unlink()
    assert located.missing and located.without_folders().missing
    assert not EncoderSpec("hf:a/b").missing and not EncoderSpec("resnet18", weights="random:0").missing


def test_names_of_folders_and_hub_ids(tmp_path):
    (tmp_path / "run" / "text_backbone").mkdir(parents=True)
    assert short_name("some/Model-v1@main") == "Model-v1"
    assert short_name(str(tmp_path / "run" / "text_backbone")) == "run-text"
    assert short_name("My CLIP (copy)") == "My-CLIP-copy"
    (tmp_path / "snapshot").mkdir()
    (tmp_path / "MiniLM").symlink_to("snapshot")
    spec = EncoderSpec(f"hf:{tmp_path}/MiniLM").located({})
    assert short_name(spec.source) == short_name(str(tmp_path / "MiniLM")) == "MiniLM"
