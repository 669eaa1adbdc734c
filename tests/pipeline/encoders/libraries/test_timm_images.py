"""Features of timm's models against timm called as its documentation does, and what bad input gets."""

import json
import shutil
import sys
from pathlib import Path

import numpy as np
import pytest
import timm
import torch
from encoder_contract import are_pixels, close, image_encoder, prepared, refused
from PIL import Image
from safetensors.torch import save_file
from small_timm import save_timm_checkpoint, save_timm_model
from transformers import AutoModel

# By model height and width of the grid, and the tokens that stand before its rows.
EXPECTED = {
    "test_vit": ((10, 10), 1),
    "test_vit2": ((10, 10), 1),
    "test_vit3": ((10, 10), 1),
    "small_registers": ((6, 6), 4),
    "small_eva": ((6, 6), 1),
    "small_swin": ((4, 4), 0),
    "small_swin.squashed": ((4, 4), 0),
    "test_convnext": ((5, 5), 0),
    "test_resnet": ((5, 5), 0),
    "test_efficientnet": ((5, 5), 0),
    "test_byobnet": ((5, 5), 0),
}


@pytest.fixture
def file_of(made):
    return lambda name: made(save_timm_model, name)


def load(name, weights, image_size=None, **options):
    return image_encoder(f"timm:{name}", weights, image_size, **options)


def documented(name, file, photographs):
    """Return the model, pixels, features before and after pooling, as timm's pages make them."""
    model = timm.create_model(name, checkpoint_path=str(file)).eval()
    transform = timm.data.create_transform(**timm.data.resolve_model_data_config(model), is_training=False)
    pixels = torch.stack([transform(Image.open(path).convert("RGB")) for path in photographs])
    with torch.inference_mode():
        features = model.forward_features(pixels)
        return model, pixels, features, model.forward_head(features, pre_logits=True)


@pytest.mark.parametrize("name", EXPECTED)
def test_features_are_those_of_the_documented_call(file_of, photographs, name):
    grid, before = EXPECTED[name]
    encoder = load(name, file_of(name))
    _, pixels, features, pooled = documented(name, file_of(name), photographs)
    are_pixels(encoder, photographs, pixels)
    local, global_ = encoder.encode(pixels)
    if features.ndim == 4:  # Swin's channels stand last
        features = features.flatten(1, 2) if "swin" in name else features.flatten(2).transpose(1, 2)
    close(local, features[:, before:])
    close(global_, pooled)
    assert (encoder.name, encoder.grid, encoder.space) == (name.partition(".")[0], grid, None)
    assert encoder.identity["tokens_left_out"] == before


@pytest.mark.parametrize(
    ("name", "layer", "block"),
    [("test_vit", 2, 2), ("test_vit", -6, 0), ("test_resnet", 3, 3), ("hiera_tiny_224", 0, 0)],
)
def test_another_layer_gives_its_map_and_the_same_global_feature(file_of, photographs, name, layer, block):
    encoder = load(name, file_of(name), layer=layer)
    model, pixels, _, pooled = documented(name, file_of(name), photographs)
    local, global_ = encoder.encode(pixels)
    with torch.inference_mode():
        (maps,) = model.forward_intermediates(pixels, indices=[block], intermediates_only=True)
    close(local, maps.flatten(2).transpose(1, 2))
    close(global_, pooled)
    assert encoder.identity["layer"] == f"intermediates.{block}" and encoder.grid == tuple(maps.shape[2:])


@pytest.mark.parametrize(
    ("name", "side", "grid"), [("test_vit", 96, (6, 6)), ("small_swin", 64, (8, 8)), ("test_convnext", 64, (2, 2))]
)
def test_pictures_of_another_size(file_of, photographs, name, side, grid):
    encoder = load(name, file_of(name), side)
    own = {} if name == "test_convnext" else {"img_size": side}
    classes = {"num_classes": 7} if name == "small_swin" else {}
    state = {"state_dict": torch.load(file_of(name), weights_only=True)}
    model = timm.create_model(name, pretrained=True, pretrained_cfg_overlay=state, **own, **classes).eval()
    config = timm.data.resolve_model_data_config(model, {"input_size": (3, side, side)})
    transform = timm.data.create_transform(**config, is_training=False)
    pixels = torch.stack([transform(Image.open(path)) for path in photographs])
    are_pixels(encoder, photographs, pixels)
    with torch.inference_mode():
        close(encoder.encode(pixels)[1], model.forward_head(model.forward_features(pixels), pre_logits=True))
    plain = load(name, file_of(name)).identity
    assert encoder.grid == grid and encoder.identity != plain
    assert load(name, file_of(name), 32 if name == "small_swin" else 160).identity == plain


def test_what_is_seen_of_a_picture_is_recorded():
    pixels = {name: load(name, "random:0").identity["preprocessing"] for name in EXPECTED if name.startswith("small")}
    assert {"resize": 35, "crop": 32}.items() <= pixels["small_swin"].items()
    assert pixels["small_swin.squashed"]["stretch"] == 36 and pixels["small_swin.squashed"]["crop"] == 32
    assert {"resize": 54, "pad": 48}.items() <= pixels["small_eva"].items()


@pytest.mark.parametrize(("name", "side"), [("small_swin", 32), ("small_eva", 48), ("small_swin.squashed", 32)])
def test_whole_pictures_where_a_tag_cuts_or_pads(photographs, name, side):
    encoder = load(name, "random:0", whole=True)
    config = timm.data.resolve_model_data_config(timm.create_model(name))
    transform = timm.data.create_transform(**{**config, "crop_mode": "squash", "crop_pct": 1.0}, is_training=False)
    are_pixels(encoder, photographs, torch.stack([transform(Image.open(path)) for path in photographs]))
    seen = encoder.identity["preprocessing"]
    assert seen["stretch"] == side and not {"crop", "pad"} & seen.keys()


@pytest.mark.parametrize(
    ("name", "options"),
    [(name, {}) for name in (*EXPECTED, "hiera_tiny_224")]
    + [("test_vit", {"layer": 1}), ("small_swin", {"image_size": 64}), ("test_vit", {"image_size": 96, "whole": True})],
)
def test_a_checkpoint_of_the_hub_has_the_features_of_its_model(file_of, made, photographs, name, options):
    plain = load(name, file_of(name), **options)
    hub = image_encoder(f"hf:{made(save_timm_checkpoint, name)}", **options)
    pixels = prepared(plain, photographs)
    assert torch.equal(prepared(hub, photographs), pixels)
    assert all(map(np.array_equal, hub.encode(pixels), plain.encode(pixels)))
    assert (hub.name, hub.grid) == (made(save_timm_checkpoint, name).name, plain.grid)
    others = {key for key in plain.identity if hub.identity[key] != plain.identity[key]}
    assert others - ({"weights"} if "image_size" in options else set()) == {"model"}


def test_a_checkpoint_that_transformers_has_saved(made, tmp_path, photographs):
    folder = made(save_timm_checkpoint, "small_swin")
    expected = image_encoder(f"hf:{folder}")
    copy = Path(shutil.copytree(folder, tmp_path / "copy"))
    document = json.loads((copy / "config.json").read_text())
    del document["model_args"]  # what timm 1.0.31 adds, transformers 5.24 cannot read
    (copy / "config.json").write_text(json.dumps(document))
    AutoModel.from_pretrained(copy).save_pretrained(tmp_path / "saved")
    hub = image_encoder(f"hf:{tmp_path / 'saved'}")
    pixels = prepared(hub, photographs)
    for found, of_timm in zip(hub.encode(pixels), expected.encode(pixels), strict=True):
        assert np.array_equal(found, of_timm)


def test_random_weights_follow_from_the_seed_as_in_timm(photographs):
    encoder = load("small_eva", "random:5")
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(5)
        model = timm.create_model("small_eva").eval()
    pixels = prepared(encoder, photographs) / 255
    with torch.inference_mode():
        close(encoder.encode(pixels)[0], model.forward_features(pixels)[:, 1:])
    assert encoder.identity["weights"] == "random:5"


def test_a_file_of_other_classes_or_none_gives_the_same_features(file_of, tmp_path):
    whole = load("test_resnet", file_of("test_resnet"))
    state = torch.load(file_of("test_resnet"), weights_only=True)
    state["fc.weight"], state["fc.bias"] = torch.ones(3, 96), torch.ones(3)
    torch.save({"state_dict": {f"module.{key}": value for key, value in state.items()}}, tmp_path / "three.pth")
    whole.save(tmp_path / "none.safetensors")
    for name in ("three.pth", "none.safetensors"):
        encoder = load("test_resnet", tmp_path / name)
        assert encoder.identity == whole.identity
        assert encoder.weights_id() == encoder.identity["weights"]


def test_a_tag_fetches_the_hubs_file(file_of, photographs, monkeypatch, tmp_path):
    """The hub's own download is replaced; all that comes after it is timm's."""
    asked = []
    save_file(torch.load(file_of("test_vit"), weights_only=True), tmp_path / "model.safetensors")

    def download(repo_id, filename, **_):
        asked.append((repo_id, filename))
        return str(tmp_path / "model.safetensors")

    monkeypatch.setattr(timm.models._hub, "hf_hub_download", download)
    encoder = load("test_vit", None)
    assert asked == [("timm/test_vit.r160_in1k", "model.safetensors")]
    assert encoder.name == "test_vit.r160_in1k"
    assert encoder.identity == load("test_vit.r160_in1k", file_of("test_vit")).identity
    _, pixels, _, pooled = documented("test_vit", file_of("test_vit"), photographs)
    close(encoder.encode(pixels)[1], pooled)

    def fail(*_, **__):
        raise OSError("no route to the hub\nTraceback")

    monkeypatch.setattr(timm.models._hub, "hf_hub_download", fail)
    refused(r"timm:test_convnext cannot be loaded \(OSError: no route to the hub\); check", load, "test_convnext", None)


@pytest.mark.parametrize(
    ("name", "weights", "options", "sentence"),
    [
        ("vit_bas_patch16_224", "random:0", {}, r"no model 'vit_bas_patch16_224' \(did you mean 'vit_base_patch16_"),
        ("test_vit.r160_in2k", "random:0", {}, "Invalid pretrained tag .r160_in2k"),
        ("test_vit4", None, {}, "timm has no weights of timm:test_vit4; give `visual_weights=FILE`"),
        ("test_vit", "absent.pth", {}, "'absent.pth' are no file, nor 'imagenet'"),
        ("test_vit", "random:0", {"layer": 6}, "no layer 6; choose one from 0 to 5, or from -1, the last, down to -6"),
        ("test_resnet", "random:0", {"image_size": 32}, "a single cell of an image; choose a larger `image_size`"),
        ("test_vit", "random:0", {"image_size": 8}, "cannot be loaded for images of 8 pixels"),
    ],
)
def test_unknown_names_and_options_that_do_not_fit(name, weights, options, sentence):
    refused(sentence, load, name, weights, **options)


def test_files_that_do_not_fit(file_of, tmp_path, monkeypatch):
    sentence = r"these weights do not fit 'timm:test_vit': \d+ missing .*; \d+ unknown .*; give its own weights"
    refused(sentence, load, "test_vit", file_of("test_resnet"))
    state, file = torch.load(file_of("test_vit"), weights_only=True), tmp_path / "w.pth"
    torch.save({**state, "norm.weight": torch.ones(7)}, file)
    refused(r"1 of another shape \(norm.weight \(\[7\] in place of \[64\]\)\); give", load, "test_vit", file)
    torch.save({**state, "norm.weight": torch.full((64,), torch.nan)}, file)
    refused("norm.weight holds NaN or infinity; get the model again", load, "test_vit", file)
    monkeypatch.setitem(sys.modules, "timm", None)
    refused(r"timm is not installed .*pip install 'xret\[timm\]'", load, "test_vit", "random:1")
