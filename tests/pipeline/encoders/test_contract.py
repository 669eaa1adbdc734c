"""What every encoder promises, of all encoders at once: an encoder that xret learns to load is one line here."""

import gc
import json
import re
import shutil
import weakref

import numpy as np
import pytest
import small_open_clip  # noqa: F401 - it registers its architectures
import small_timm  # noqa: F401 - it registers its models
import torch
from encoder_contract import refused
from loaded import image_encoder
from safetensors.torch import load_file, save_file
from small_bert import save_bert
from small_checkpoints import save_image_model, save_text_model

from xret.pipeline.data.manifest import load_manifest
from xret.pipeline.encoders import load_text, load_visual
from xret.pipeline.errors import CacheError, EncoderError
from xret.pipeline.extraction.extraction import extract
from xret.pipeline.extraction.options import build_options
from xret.pipeline.reading.origin import Origin
from xret.pipeline.reading.reencoding import encode_captions_by_all, encode_images_by_all
from xret.pipeline.store import FeatureCache

OF_PICTURES = {"visual_weights": "random:0", "image_size": 64, "text": None}
# By name the options of an extraction; ``hf:`` and a family stands for the folder of its checkpoint.
VISUAL = {
    "torchvision": {"visual": "resnet18", **OF_PICTURES},
    "torchvision transformer": {"visual": "vit_b_32", **OF_PICTURES},
    "torchvision, pooled": {"visual": "mobilenet_v2", "pool": (1, 2), **OF_PICTURES},
    "torchvision, whole": {"visual": "resnet18", "whole": True, **OF_PICTURES},
    "torchvision, whole, views": {"visual": "resnet18", "whole": True, "views": "crop-flip:2", **OF_PICTURES},
    "torchvision, views": {"visual": "resnet18", "views": "dihedral:2", **OF_PICTURES},
    "transformers CLIP": {"visual": "hf:clip"},
    "transformers SigLIP": {"visual": "hf:siglip", "dtype": "float32"},
    "transformers CLIP, whole": {"visual": "hf:clip", "whole": True},
    "transformers DINOv3": {"visual": "hf:dinov3", "image_size": 48, "pool": (4, 4)},
    "transformers ConvNeXt": {"visual": "hf:convnext", "layer": 2},
    "transformers DINOv2, views": {"visual": "hf:dinov2", "views": "crop-flip:3"},
    "timm": {"visual": "timm:small_registers", "visual_weights": "random:0"},
    "timm, a layer": {"visual": "timm:small_eva.own", "visual_weights": "random:0", "layer": 0, "pool": (2, 3)},
    "timm, views": {"visual": "timm:small_swin", "visual_weights": "random:0", "views": "crop-flip:2"},
    "timm, of a side": {"visual": "timm:test_resnet", "visual_weights": "random:0", "image_size": 96},
    "open_clip": {"visual": "open_clip:small-ViT", "visual_weights": "random:0"},
    "open_clip, a layer": {"visual": "open_clip:small-RN", "visual_weights": "random:0", "layer": 2},
    "a class of one's own": {"visual": "own_encoder:Quarters", "image_size": 60},
}
SLOW = {
    "butd-grid": {"visual": "butd-grid", **OF_PICTURES},
    "fasterrcnn": {"visual": "fasterrcnn_resnet50_fpn_v2", **OF_PICTURES, "image_size": None},
}
TEXT = {
    "bert": {"text": "bert", "text_weights": "bert"},
    "bert, prompted": {"text": "bert", "text_weights": "bert", "prompt": "a picture of {}", "layer": 1},
    "transformers CLIP": {"text": "hf:clip"},
    "transformers SigLIP": {"text": "hf:siglip", "prompt": "a photo of {}"},
    "transformers T5": {"text": "hf:t5", "dtype": "float32"},
    "open_clip": {"text": "open_clip:small-ViT", "text_weights": "random:0", "prompt": "a photo of {}"},
    "open_clip, a layer": {"text": "open_clip:small-timm", "text_weights": "random:0", "layer": 1},
}


def save_tiny_bert(folder, _):
    return save_bert(folder)


@pytest.fixture
def extracted(request, tmp_path, tiny_dataset, made):
    """Extract with the options of a case; return the cache, the case's options and its pictures."""
    options = dict(request.param)
    for key, save in (("visual", save_image_model), ("text", save_text_model)):
        if str(options.get(key)).startswith("hf:"):
            options[key] = f"hf:{made(save, options[key][3:])}"
    if options.get("text_weights") == "bert":
        options["text_weights"] = str(made(save_tiny_bert, "bert"))
    chosen = build_options(**{"visual": None, "text": None, **options}, batch_size=4, device="cpu")
    manifest, url = load_manifest(tiny_dataset(train=3, val=2, test=2)), str(tmp_path / "s.zarr")
    extract(manifest, url, chosen)
    return FeatureCache.open(url), chosen, [manifest.images / f"{number}.jpg" for number in range(7)]


def cases(named):
    return pytest.mark.parametrize("extracted", named.values(), ids=named, indirect=True)


def says_what_it_is(encoder):
    assert re.fullmatch(r"[\w.-]+", encoder.name)
    assert set(encoder.identity) >= {"encoder", "weights", "preprocessing", "layer"}
    text = json.dumps(encoder.identity)
    assert json.loads(text) == encoder.identity
    assert all(isinstance(version, str) for version in encoder.versions.values())
    for word in ("/", "cpu", "cuda", "version", "batch", *encoder.versions.values()):
        assert word not in text
    assert encoder.space is None or isinstance(encoder.space, str)


def is_kept_for_pictures(cache, options, paths):
    features = cache.image_set()
    encoder = load_visual(options.visual, "cpu")
    says_what_it_is(encoder)
    assert (features.rows, features.channels, features.global_channels) == (
        encoder.rows, encoder.channels, encoder.global_channels,
    )  # fmt: skip
    assert (features.kind, features.grid, features.space) == (encoder.kind, encoder.grid, encoder.space)
    if encoder.kind == "grid":
        assert encoder.grid[0] * encoder.grid[1] == encoder.rows
    again = Origin.of(features).load_images(None, "cpu", trust=True)
    assert again.identity == {key: value for key, value in encoder.identity.items() if key != "views"}
    (found,) = encode_images_by_all([(again, features.dtype)], "cpu", paths)
    at = np.arange(len(paths))
    close = {"rtol": 2e-3, "atol": 2e-3}  # the same images in other batches, rounded to float16
    np.testing.assert_allclose(found.global_, features.global_(at), **close)
    for row, length in enumerate(features.length):
        assert found.length[row] == length
        np.testing.assert_allclose(found.local[row, :length], features.local(at[[row]])[0, :length], **close)
    return encoder


@cases(VISUAL)
def test_image_encoders_keep_the_contract(extracted):
    encoder = is_kept_for_pictures(*extracted)
    _, options, paths = extracted
    if options.visual.views:
        return
    decoded = [encoder.decode(path) for path in paths[:3]]
    assert all(size == (48, 40) for _, size in decoded)
    pixels = torch.stack([image for image, _ in decoded])
    local, global_ = encoder.encode(pixels)
    assert local.dtype == global_.dtype == np.float32
    assert local.shape == (3, encoder.rows, encoder.channels)
    assert global_.shape == (3, encoder.global_channels)
    assert np.isfinite(local).all() and np.isfinite(global_).all()
    assert np.abs(global_[0] - global_[1]).max() > 1e-3
    assert [array.tobytes() for array in encoder.encode(pixels)] == [local.tobytes(), global_.tobytes()]
    for number in range(3):
        alone, alone_global = encoder.encode(pixels[number : number + 1])
        np.testing.assert_allclose(alone[0], local[number], rtol=2e-4, atol=2e-4)
        np.testing.assert_allclose(alone_global[0], global_[number], rtol=2e-4, atol=2e-4)


@pytest.mark.slow
@cases(SLOW)
def test_large_encoders_keep_the_contract(extracted):
    is_kept_for_pictures(*extracted)


@cases(TEXT)
def test_text_encoders_keep_the_contract(extracted):
    cache, options, _ = extracted
    features, texts = cache.caption_set(), cache.caption_texts(0, cache.captions)
    encoder = load_text(options.text, "cpu")
    says_what_it_is(encoder)
    assert (features.channels, features.global_channels) == (encoder.channels, encoder.global_channels)
    assert (features.kind, features.space) == (encoder.kind, encoder.space)
    again = Origin.of(features).load_captions(None, "cpu")
    assert again.identity == encoder.identity
    ids = encoder.tokenize(texts)
    local, global_ = encoder.encode(ids)
    assert local.shape == (sum(map(len, ids)), encoder.channels) and local.dtype == np.float32
    assert global_.shape == (len(texts), encoder.global_channels) and global_.dtype == np.float32
    assert [array.tobytes() for array in encoder.encode(ids)] == [local.tobytes(), global_.tobytes()]
    (found,) = encode_captions_by_all([(again, features.dtype)], "cpu", texts)
    at = np.arange(len(texts))
    np.testing.assert_allclose(found.global_, features.global_(at), rtol=2e-3, atol=2e-3)
    assert found.length.tolist() == features.length.tolist() == [len(caption) for caption in ids]
    packed = np.concatenate([rows[:length] for rows, length in zip(found.local, found.length, strict=True)])
    np.testing.assert_allclose(packed, features.local(at), rtol=2e-3, atol=2e-3)
    for number, caption in enumerate(ids[:3]):
        _, alone = encoder.encode([caption])
        np.testing.assert_allclose(alone[0], global_[number], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    ("name", "weights", "options", "sentence"),
    [
        ("no_such_module:Encoder", "w", {}, "no encoder 'no_such_module:Encoder'.*lists them; a class of your own"),
        ("own_encoder:Absent", "w", {}, "a class of your own, .*Absent"),
        ("own_encoder:Unfinished", "broken", {}, "Unfinished cannot be loaded .ZeroDivisionError: it is broken"),
        ("own_encoder:Unfinished", "w", {}, "lacks channels, decode, encode, extras, .*, see `VisualEncoder`"),
        ("own_encoder:Askew", "w", {}, r"its grid is \(2, 2\), which `VisualEncoder` .* does not allow"),
        ("own_encoder:Quarters", "w", {"views": "dihedral:2"}, "'own_encoder:Quarters' lacks prepare"),
    ],
)
def test_a_class_that_is_no_encoder_is_refused(name, weights, options, sentence):
    refused(sentence, image_encoder, name, weights, **options)


@pytest.mark.parametrize("extracted", [{"visual": "own_encoder:Quarters"}], indirect=True)
def test_a_program_is_not_run_because_a_store_names_it(extracted):
    with pytest.raises(EncoderError, match=r"made by own_encoder:Quarters, a program of its own; .*give --trust"):
        Origin.of(extracted[0].image_set()).load_images(None, "cpu")


@pytest.mark.parametrize(("side", "projection"), [("visual", "visual_projection"), ("text", "text_projection")])
def test_global_features_beyond_the_dtype_are_refused(side, projection, tmp_path, tiny_dataset, made):
    save = save_image_model if side == "visual" else save_text_model
    folder = shutil.copytree(made(save, "clip"), tmp_path / "large")
    weights = load_file(folder / "model.safetensors")
    weights[f"{projection}.weight"] *= 1e6
    save_file(weights, folder / "model.safetensors", {"format": "pt"})
    options = build_options(**{"visual": None, "text": None, side: f"hf:{folder}"}, device="cpu", splits=("train",))
    with pytest.raises(CacheError, match="is beyond float16; extract with --dtype float32"):
        extract(load_manifest(tiny_dataset(train=3)), str(tmp_path / "s.zarr"), options)


def test_encoders_that_nobody_has_are_given_up():
    left = weakref.ref(image_encoder("resnet18", "random:1", 64))
    gc.collect()
    assert left() is None
