"""Features of image checkpoints against transformers called as its documentation does, and what bad input gets."""

import json
import shutil

import numpy as np
import pytest
import torch
import transformers
from encoder_contract import picture
from loaded import image_encoder
from PIL import Image
from safetensors.torch import load_file, save_file
from small_checkpoints import IMAGE_FAMILIES, save_image_model

from xret.pipeline.errors import EncoderError

SIZES = [(180, 140), (90, 200), (64, 64)]
# By family: height and width of the grid, the tokens before it, and where the global feature comes from.
EXPECTED = {
    "clip": ((4, 4), 1, "projected"),
    "siglip": ((4, 4), 0, "projected"),
    "siglip2": ((4, 4), 0, "projected"),
    "metaclip2": ((4, 4), 1, "projected"),
    "dinov2": ((4, 4), 1, "pooler"),
    "dinov2-registers": ((4, 4), 4, "pooler"),
    "dinov3": ((4, 4), 5, "pooler"),
    "vit": ((4, 4), 1, "pooler"),
    "vit-classifier": ((4, 4), 1, "class token"),
    "deit": ((4, 4), 2, "pooler"),
    "beit": ((4, 4), 1, "pooler"),
    "swin": ((4, 4), 0, "pooler"),
    "swinv2": ((4, 4), 0, "pooler"),
    "convnext": ((2, 2), 0, "pooler"),
    "convnextv2": ((2, 2), 0, "pooler"),
    "resnet": ((2, 2), 0, "pooler"),
}


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    """Return the folder of a family's checkpoint, written once."""
    root = tmp_path_factory.mktemp("checkpoints")

    def find(family):
        return root / family if (root / family).exists() else save_image_model(root / family, family)

    return find


@pytest.fixture
def photographs(tmp_path):
    return [picture(tmp_path / f"{number}.jpg", size, number) for number, size in enumerate(SIZES)]


def documented(folder, photographs, **sizes):
    """Return pixels and outputs as the model's page in the documentation makes them."""
    processor = transformers.AutoImageProcessor.from_pretrained(folder)
    model = transformers.AutoModel.from_pretrained(folder)
    inputs = processor(images=[Image.open(path).convert("RGB") for path in photographs], return_tensors="pt", **sizes)
    run = getattr(model, "get_image_features", model)
    with torch.inference_mode():
        return inputs["pixel_values"], run(**inputs, output_hidden_states=True), model


def rows_of(states, before):
    return states.flatten(2).transpose(1, 2) if states.ndim == 4 else states[:, before:]


@pytest.mark.parametrize("family", IMAGE_FAMILIES)
def test_features_are_those_of_the_documented_call(checkpoint, photographs, family):
    folder, ((height, width), before, way) = checkpoint(family), EXPECTED[family]
    encoder = image_encoder(f"hf:{folder}")
    pixels, found, _ = documented(folder, photographs)
    decoded = [encoder.decode(path) for path in photographs]
    assert [size for _, size in decoded] == SIZES
    ours = torch.stack([image for image, _ in decoded])
    assert torch.equal(ours, pixels)
    local, global_ = encoder.encode(ours)
    expected = rows_of(found.last_hidden_state, before).numpy()
    wanted = found.last_hidden_state[:, 0] if way == "class token" else found.pooler_output.flatten(1)
    assert (encoder.name, encoder.grid, encoder.rows) == (family, (height, width), height * width)
    assert (encoder.identity["tokens_left_out"], encoder.identity["global"]) == (before, way)
    np.testing.assert_allclose(local, expected, rtol=1e-5, atol=1e-5 * np.abs(expected).max())
    np.testing.assert_allclose(global_, wanted.numpy(), rtol=1e-5, atol=1e-5 * wanted.abs().max().item())
    assert (encoder.space is not None) == (way == "projected")


@pytest.mark.parametrize(("family", "layer"), [("clip", 1), ("dinov3", -2), ("swin", 0), ("convnext", 3), ("vit", 2)])
def test_another_layer_gives_its_states_and_the_same_global_feature(checkpoint, photographs, family, layer):
    folder, (_, before, _) = checkpoint(family), EXPECTED[family]
    encoder = image_encoder(f"hf:{folder}", layer=layer)
    pixels, found, _ = documented(folder, photographs)
    last = layer == len(found.hidden_states) - 1
    states = found.last_hidden_state if last else found.hidden_states[layer]
    local, global_ = encoder.encode(pixels)
    np.testing.assert_allclose(local, rows_of(states, before), rtol=1e-5, atol=1e-5)
    whole = image_encoder(f"hf:{folder}")
    np.testing.assert_array_equal(global_, whole.encode(pixels)[1])
    assert (encoder.identity == whole.identity) == last
    assert encoder.grid[0] * encoder.grid[1] == encoder.rows == local.shape[1]


@pytest.mark.parametrize("family", ["clip", "vit", "dinov2"])
def test_pictures_of_another_size(checkpoint, photographs, family):
    folder = checkpoint(family)
    encoder = image_encoder(f"hf:{folder}", None, 48)
    assert encoder.grid == (6, 6)
    processor = transformers.AutoImageProcessor.from_pretrained(folder)
    square = {"height": 48, "width": 48}
    own = {"size": square} if family == "vit" else {"size": {"shortest_edge": 54}, "crop_size": square}
    images = [Image.open(path) for path in photographs]
    pixels = processor(images=images, return_tensors="pt", **own)["pixel_values"]
    model = transformers.AutoModel.from_pretrained(folder)
    flag = {} if family == "dinov2" else {"interpolate_pos_encoding": True}
    with torch.inference_mode():
        found = getattr(model, "get_image_features", model)(pixel_values=pixels, **flag)
    ours = torch.stack([encoder.decode(path)[0] for path in photographs])
    assert torch.equal(ours, pixels)
    local, _ = encoder.encode(ours)
    np.testing.assert_allclose(local, found.last_hidden_state[:, 1:], rtol=1e-5, atol=1e-5)
    assert image_encoder(f"hf:{folder}", None, 32).identity != encoder.identity
    own_size = image_encoder(f"hf:{folder}")
    assert image_encoder(f"hf:{folder}", None, 32).identity == own_size.identity


@pytest.mark.parametrize(("family", "side"), [("clip", None), ("clip", 48), ("dinov2", None)])
def test_whole_pictures_where_the_processor_cuts_out_the_middle(checkpoint, photographs, tmp_path, family, side):
    photographs = [*photographs, picture(tmp_path / "long.jpg", (900, 40)), picture(tmp_path / "tall.jpg", (33, 700))]
    folder = checkpoint(family)
    encoder = image_encoder(f"hf:{folder}", None, side, whole=True)
    processor = transformers.AutoImageProcessor.from_pretrained(folder)
    size = dict.fromkeys(("height", "width"), side or 32)
    images = [Image.open(path).convert("RGB") for path in photographs]
    expected = processor(images=images, size=size, do_center_crop=False, return_tensors="pt")["pixel_values"]
    ours = torch.stack([encoder.decode(path)[0] for path in photographs])
    assert torch.equal(ours, expected)
    cut = image_encoder(f"hf:{folder}", None, side)
    assert not torch.equal(cut.decode(photographs[0])[0], ours[0])
    assert encoder.identity["preprocessing"]["stretch"] == (side or 32) and "crop" in cut.identity["preprocessing"]


def test_a_picture_need_not_be_square(checkpoint, tmp_path, photographs):
    folder = save_image_model(tmp_path / "wide", "dinov2")
    file = folder / "preprocessor_config.json"
    settings = json.loads(file.read_text())
    file.write_text(json.dumps({**settings, "crop_size": {"height": 32, "width": 48}, "size": {"shortest_edge": 64}}))
    encoder = image_encoder(f"hf:{folder}")
    assert (encoder.grid, encoder.rows) == ((4, 6), 24)
    pixels, found, _ = documented(folder, photographs)
    np.testing.assert_allclose(encoder.encode(pixels)[0], found.last_hidden_state[:, 1:], rtol=1e-5, atol=1e-5)


def test_what_wraps_an_encoder_of_transformers(checkpoint, photographs, tmp_path):
    name = f"hf:{checkpoint('clip')}"
    frames = image_encoder(name, frames=2)
    plain = image_encoder(name)
    assert (frames.channels, frames.global_channels, frames.space) == (24, 24, plain.space)
    decoded, _ = frames.decode(photographs[0].parent)
    (video,) = frames.encode([decoded])
    _, expected = plain.encode(torch.stack([plain.decode(path)[0] for path in (photographs[0], photographs[2])]))
    np.testing.assert_allclose(video.local, expected, rtol=1e-5, atol=1e-5)
    oblong = save_image_model(tmp_path / "oblong", "dinov2")
    file = oblong / "preprocessor_config.json"
    sizes = {"crop_size": {"height": 32, "width": 48}, "size": {"shortest_edge": 64}}
    file.write_text(json.dumps({**json.loads(file.read_text()), **sizes}))
    refused(oblong, "--views dihedral:2 turns squares, and 'oblong' sees none", views="dihedral:2")


def test_weights_in_half_precision_are_computed_with_in_float32(checkpoint, tmp_path, photographs):
    model = transformers.AutoModel.from_pretrained(checkpoint("dinov2"))
    half = shutil.copytree(checkpoint("dinov2"), tmp_path / "half")
    model.half().save_pretrained(half)
    encoder = image_encoder(f"hf:{half}")
    local, _ = encoder.encode(torch.stack([encoder.decode(path)[0] for path in photographs]))
    assert local.dtype == np.float32
    pixels, _, _ = documented(checkpoint("dinov2"), photographs)
    with torch.inference_mode():
        found = transformers.AutoModel.from_pretrained(half, dtype=torch.float32)(pixel_values=pixels)
    np.testing.assert_allclose(local, found.last_hidden_state[:, 1:], rtol=1e-5, atol=1e-5)


@pytest.fixture
def copy(checkpoint, tmp_path):
    """Return a copy of a family's checkpoint to break."""
    return lambda family: shutil.copytree(checkpoint(family), tmp_path / "copy")


def refused(folder, sentence, **options):
    with pytest.raises(EncoderError, match=sentence) as caught:
        image_encoder(f"hf:{folder}", "imagenet", options.pop("image_size", None), **options)
    assert "\n" not in str(caught.value)


def test_a_folder_without_processor_is_refused(copy):
    folder = copy("vit")
    (folder / "preprocessor_config.json").unlink()
    refused(folder, r"cannot be loaded .*; a hub id needs .* the weights and preprocessor_config.json")


def test_weights_that_do_not_fit_are_named(copy):
    folder = copy("dinov2")
    weights = load_file(folder / "model.safetensors")
    del weights["layernorm.bias"]
    weights["layernorm.weight"] = torch.ones(7)
    save_file(weights, folder / "model.safetensors", {"format": "pt"})
    refused(folder, r"do not fit their config.json: 1 missing \(layernorm.bias\); 1 of another shape \(layernorm.weigh")


def test_text_models_take_no_pictures(tmp_path):
    config = transformers.CLIPTextConfig(hidden_size=16, num_hidden_layers=1, num_attention_heads=2, vocab_size=9)
    transformers.CLIPTextModel(config).save_pretrained(tmp_path / "text")
    refused(tmp_path / "text", "are a CLIPTextModel, which takes no pictures; give an image model, or use it as --text")


def test_lists_of_patches_are_refused(tmp_path):
    part = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 16}
    config = transformers.Siglip2Config(
        vision_config={**part, "patch_size": 8, "num_patches": 16}, text_config={**part, "vocab_size": 60}
    )
    transformers.Siglip2Model(config).save_pretrained(tmp_path / "naflex")
    transformers.Siglip2ImageProcessor(patch_size=8, max_num_patches=16).save_pretrained(tmp_path / "naflex")
    refused(tmp_path / "naflex", "NaFlex.*take a checkpoint of a fixed resolution, as google/siglip2-base-patch16-224")


def test_a_processor_that_keeps_proportions_is_refused(copy):
    folder = copy("dinov2")
    file = folder / "preprocessor_config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), "do_center_crop": False}))
    refused(folder, r"different proportions different shapes")


def test_a_model_that_masks_patches_is_refused(copy):
    folder = copy("vit")
    small = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 32}
    decoder = {f"decoder_{key}": value for key, value in small.items()}
    config = transformers.ViTMAEConfig(**small, **decoder, image_size=32, patch_size=8)
    transformers.ViTMAEModel(config).save_pretrained(folder)
    refused(folder, r"a ViTMAEModel, which does not encode pictures patch by patch: it has 5 states, not 1 and 4 x 4")


def test_a_program_of_the_checkpoint_needs_trust(copy, tmp_path, monkeypatch):
    monkeypatch.setattr(transformers.dynamic_module_utils, "HF_MODULES_CACHE", str(tmp_path / "modules"))
    folder = copy("vit")
    save_file(transformers.AutoModel.from_pretrained(folder).state_dict(), folder / "model.safetensors")
    file = folder / "config.json"
    config = json.loads(file.read_text())
    own = {"AutoConfig": "own.OwnConfig", "AutoModel": "own.OwnModel"}
    file.write_text(json.dumps({**config, "model_type": "own_vit", "auto_map": own}))
    (folder / "own.py").write_text(
        "import transformers\n"
        "class OwnConfig(transformers.ViTConfig):\n    model_type = 'own_vit'\n"
        "class OwnModel(transformers.ViTModel):\n    config_class = OwnConfig\n"
    )
    refused(folder, r"come with a program of their own; read it, and give --trust")
    encoder = image_encoder(f"hf:{folder}", trust=True)
    assert encoder.identity["model"]["class"] == "OwnModel"


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"layer": 3}, "has no layer 3; choose one from 0 to 2"),
        ({"image_size": 4}, "leave --image-size out"),
        ({"whole": True}, "takes whole pictures by itself; leave --whole out"),
    ],
)
def test_options_that_do_not_fit(checkpoint, options, sentence):
    refused(checkpoint("vit"), sentence, **options)


@pytest.mark.parametrize("image_size", [None, 384])
def test_a_processor_with_a_rule_of_its_own_cuts_as_it_does(checkpoint, image_size):
    sentence = "the processor crops by a rule of its own, or not at all; leave --whole out"
    refused(checkpoint("convnext"), sentence, whole=True, image_size=image_size)


@pytest.mark.parametrize(
    ("settings", "sentence"),
    [
        ({"do_resize": False}, "by a rule of its own, or not at all; leave --whole out"),
        ({"size": {"height": 32, "width": 32}}, "takes whole pictures by itself; leave --whole out"),
        ({"do_center_crop": False}, "takes whole pictures by itself; leave --whole out"),
    ],
)
def test_a_processor_that_cuts_nothing_off_needs_no_telling(copy, settings, sentence):
    folder = copy("clip")
    file = folder / "preprocessor_config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), **settings}))
    refused(folder, sentence, whole=True)


def test_names_of_nothing(tmp_path):
    refused(tmp_path / "absent", "there is no such folder; give a folder or a hub id")
    refused(tmp_path, r"cannot be loaded .* a folder config.json, the weights and preprocessor_config.json")
