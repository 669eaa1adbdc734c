"""Features of image checkpoints against transformers called as its documentation does, and what bad input gets."""

import json

import numpy as np
import pytest
import torch
import transformers
from encoder_contract import SIZES, close, image_encoder, picture, prepared, refused
from PIL import Image
from safetensors.torch import load_file, save_file
from small_checkpoints import IMAGE_FAMILIES, MAPS, save_image_model

# By family: height and width of the grid, the tokens before it, and where the global feature comes from.
EXPECTED = {
    "clip": ((4, 4), 1, "projected"),
    "siglip": ((4, 4), 0, "projected"),
    "siglip2": ((4, 4), 0, "projected"),
    "metaclip2": ((4, 4), 1, "projected"),
    "paligemma": ((4, 4), 0, "mean"),
    "dinov2": ((4, 4), 1, "pooler"),
    "oblong": ((4, 6), 1, "pooler"),
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


@pytest.fixture
def checkpoint(made):
    return lambda family: made(save_image_model, family)


def load(folder, image_size=None, **options):
    return image_encoder(f"hf:{folder}", None, image_size, **options)


def documented(folder, photographs, flags=None, **sizes):
    """Return pixels and outputs as the model's page in the documentation makes them."""
    processor = transformers.AutoImageProcessor.from_pretrained(folder)
    model = transformers.AutoModel.from_pretrained(folder, dtype=torch.float32)
    inputs = processor(images=[Image.open(path).convert("RGB") for path in photographs], return_tensors="pt", **sizes)
    run = getattr(model, "get_image_features", model)
    with torch.inference_mode():
        return inputs["pixel_values"], run(**inputs, output_hidden_states=True, **(flags or {}))


def rows_of(states, before):
    return states.flatten(2).transpose(1, 2) if states.ndim == 4 else states[:, before:]


def change(folder, name="preprocessor_config.json", **settings):
    file = folder / name
    file.write_text(json.dumps({**json.loads(file.read_text()), **settings}))
    return folder


@pytest.mark.parametrize("family", IMAGE_FAMILIES)
def test_features_are_those_of_the_documented_call(checkpoint, photographs, family):
    (height, width), before, way = EXPECTED[family]
    encoder = load(checkpoint(family))
    pixels, found = documented(checkpoint(family), photographs)
    decoded = [encoder.decode(path) for path in photographs]
    assert [size for _, size in decoded] == SIZES
    assert torch.equal(torch.stack([image for image, _ in decoded]), pixels)
    local, global_ = encoder.encode(pixels)
    close(local, rows_of(found.last_hidden_state, before))
    states = found.last_hidden_state
    ways = {"class token": states[:, 0], "mean": states.mean(1)}
    close(global_, ways[way] if way in ways else found.pooler_output.flatten(1))
    assert (encoder.name, encoder.grid) == (family, (height, width))
    assert (encoder.identity["tokens_left_out"], encoder.identity["global"]) == (before, way)
    assert (encoder.space is not None) == (way == "projected")


@pytest.mark.parametrize(("family", "layer"), [("clip", 1), ("dinov3", -2), ("swin", 0), ("convnext", 3), ("vit", 2)])
def test_another_layer_gives_its_states_and_the_same_global_feature(checkpoint, photographs, family, layer):
    encoder, whole = load(checkpoint(family), layer=layer), load(checkpoint(family))
    pixels, found = documented(checkpoint(family), photographs)
    last = layer == len(found.hidden_states) - 1
    local, global_ = encoder.encode(pixels)
    close(local, rows_of(found.last_hidden_state if last else found.hidden_states[layer], EXPECTED[family][1]))
    np.testing.assert_array_equal(global_, whole.encode(pixels)[1])
    assert (encoder.identity == whole.identity) == last
    assert encoder.grid[0] * encoder.grid[1] == encoder.rows == local.shape[1]


def test_a_processor_that_leaves_bytes(copy, photographs):
    folder = change(copy(save_image_model, "clip"), do_rescale=False, do_normalize=False)
    _, found = documented(folder, photographs)
    close(load(folder).encode(prepared(load(folder), photographs))[1], found.pooler_output.flatten(1))


@pytest.mark.parametrize("family", ["clip", "vit", "dinov2"])
def test_pictures_of_another_size(checkpoint, photographs, family):
    encoder = load(checkpoint(family), 48)
    square = {"height": 48, "width": 48}
    own = {"size": square} if family == "vit" else {"size": {"shortest_edge": 54}, "crop_size": square}
    flags = {} if family == "dinov2" else {"interpolate_pos_encoding": True}
    pixels, found = documented(checkpoint(family), photographs, flags, **own)
    assert torch.equal(prepared(encoder, photographs), pixels)
    close(encoder.encode(pixels)[0], found.last_hidden_state[:, 1:])
    assert encoder.grid == (6, 6)
    assert load(checkpoint(family), 32).identity == load(checkpoint(family)).identity != encoder.identity


@pytest.mark.parametrize(("family", "side"), [("clip", None), ("clip", 48), ("dinov2", None)])
def test_whole_pictures_where_the_processor_cuts_out_the_middle(checkpoint, photographs, tmp_path, family, side):
    photographs = [*photographs, picture(tmp_path / "long.jpg", (900, 40)), picture(tmp_path / "tall.jpg", (33, 700))]
    encoder, cut = (load(checkpoint(family), side, whole=whole) for whole in (True, False))
    processor = transformers.AutoImageProcessor.from_pretrained(checkpoint(family))
    size = dict.fromkeys(("height", "width"), side or 32)
    images = [Image.open(path).convert("RGB") for path in photographs]
    expected = processor(images=images, size=size, do_center_crop=False, return_tensors="pt")["pixel_values"]
    assert torch.equal(prepared(encoder, photographs), expected)
    assert not torch.equal(cut.decode(photographs[0])[0], expected[0])
    assert encoder.identity["preprocessing"]["stretch"] == (side or 32) and "crop" in cut.identity["preprocessing"]


def test_weights_in_half_precision_are_computed_with_in_float32(checkpoint, copy, photographs):
    half = copy(save_image_model, "dinov2")
    transformers.AutoModel.from_pretrained(checkpoint("dinov2")).half().save_pretrained(half)
    pixels, found = documented(half, photographs)
    local, _ = load(half).encode(pixels)
    assert local.dtype == np.float32
    close(local, found.last_hidden_state[:, 1:])


def test_weights_that_do_not_fit_are_named(copy):
    folder = copy(save_image_model, "dinov2")
    weights = load_file(folder / "model.safetensors")
    del weights["layernorm.bias"]
    weights["layernorm.weight"] = torch.ones(7)
    save_file(weights, folder / "model.safetensors", {"format": "pt"})
    faults = r"1 missing \(layernorm.bias\); 1 of another shape \(layernorm.weigh"
    refused(rf"do not fit their config.json: {faults}", load, folder)


def test_other_models_are_refused(copy, tmp_path):
    config = transformers.CLIPTextConfig(hidden_size=16, num_hidden_layers=1, num_attention_heads=2, vocab_size=9)
    transformers.CLIPTextModel(config).save_pretrained(tmp_path / "text")
    refused("a CLIPTextModel, which takes no pictures; give an image model, or use it as", load, tmp_path / "text")
    part = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 16}
    naflex = transformers.Siglip2Config(
        vision_config={**part, "patch_size": 8, "num_patches": 16}, text_config={**part, "vocab_size": 60}
    )
    transformers.Siglip2Model(naflex).save_pretrained(tmp_path / "naflex")
    transformers.Siglip2ImageProcessor(patch_size=8, max_num_patches=16).save_pretrained(tmp_path / "naflex")
    refused("to one shape; .*a fixed resolution, as google/siglip2-base-patch16-224", load, tmp_path / "naflex")
    folder = copy(save_image_model, "vit")
    small = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 32}
    decoder = {f"decoder_{key}": value for key, value in small.items()}
    masking = transformers.ViTMAEConfig(**small, **decoder, image_size=32, patch_size=8)
    transformers.ViTMAEModel(masking).save_pretrained(folder)
    refused("a ViTMAEModel, which does not .* patch by patch: it has 5 states, not 1 and 4 x 4", load, folder)
    transformers.DINOv3ConvNextModel(transformers.DINOv3ConvNextConfig(**MAPS, image_size=32)).save_pretrained(folder)
    refused("a DINOv3ConvNextModel, which does not encode pictures patch by patch", load, folder)
    channels_last = transformers.SamVisionConfig(
        **small, mlp_dim=32, output_channels=16, image_size=32, patch_size=8, window_size=2, global_attn_indexes=[0]
    )
    transformers.SamVisionModel(channels_last).save_pretrained(folder)
    assert load(folder).grid == (4, 4) and load(folder).channels == 16
    refused(r"a SamVisionModel, whose map of shape \[1, 4, 4, 32\] has not the form of", load, folder, layer=0)


def test_a_program_of_the_checkpoint_needs_trust(copy, tmp_path, monkeypatch):
    monkeypatch.setattr(transformers.dynamic_module_utils, "HF_MODULES_CACHE", str(tmp_path / "modules"))
    folder = copy(save_image_model, "vit")
    save_file(transformers.AutoModel.from_pretrained(folder).state_dict(), folder / "model.safetensors")
    own = {"AutoConfig": "own.OwnConfig", "AutoModel": "own.OwnModel"}
    change(folder, "config.json", model_type="own_vit", auto_map=own)
    (folder / "own.py").write_text(
        "import transformers\n"
        "class OwnConfig(transformers.ViTConfig):\n    model_type = 'own_vit'\n"
        "class OwnModel(transformers.ViTModel):\n    config_class = OwnConfig\n"
    )
    refused("come with a program of their own; read it, and give `trust`", load, folder)
    assert load(folder, trust=True).identity["model"]["class"] == "OwnModel"


@pytest.mark.parametrize(
    ("family", "options", "sentence"),
    [
        ("vit", {"layer": 3}, "has no layer 3; choose one from 0 to 2"),
        ("vit", {"image_size": 4}, "leave `image_size` out"),
        ("vit", {"whole": True}, "takes whole pictures by itself; leave `whole` out"),
        ("convnext", {"whole": True}, "the processor crops by a rule of its own, or not at all; leave `whole` out"),
        ("convnext", {"whole": True, "image_size": 384}, "crops by a rule of its own, or not at all"),
    ],
)
def test_options_that_do_not_fit(checkpoint, family, options, sentence):
    refused(sentence, load, checkpoint(family), **options)


@pytest.mark.parametrize(
    ("settings", "options", "sentence"),
    [
        ({"do_resize": False}, {"whole": True}, "by a rule of its own, or not at all; leave `whole` out"),
        ({"do_resize": False}, {"image_size": 64}, "the processor resizes nothing; leave `image_size` out"),
        ({"size": {"height": 32, "width": 32}}, {"whole": True}, "takes whole pictures by itself; leave `whole` out"),
        ({"do_center_crop": False, "size": {"height": 32, "width": 32}}, {"whole": True}, "takes whole pictures by it"),
        ({"do_center_crop": False}, {}, "does not bring all pictures to one shape"),
    ],
)
def test_a_processor_that_does_not_fit(copy, settings, options, sentence):
    refused(sentence, load, change(copy(save_image_model, "clip"), **settings), **options)


def test_folders_that_are_no_model(copy, tmp_path):
    folder = copy(save_image_model, "vit")
    (folder / "preprocessor_config.json").unlink()
    refused(f"{folder} cannot be loaded .*processor", load, folder)
    refused(f"{tmp_path} cannot be loaded", load, tmp_path)
    refused("there is no such folder; give a folder or a hub id", load, tmp_path / "absent")
