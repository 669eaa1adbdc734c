"""What every encoder promises, of all encoders at once."""

import gc
import shutil
import weakref
from dataclasses import replace

import numpy as np
import pytest
import small_open_clip  # noqa: F401 - it registers its architectures
import torch
from encoder_contract import image_encoder, refused, text_encoder
from PIL import Image
from safetensors.torch import load_file, save_file
from small_bert import save_bert
from small_checkpoints import save_image_model, save_sentence_model, save_text_model, save_tokenizer
from small_timm import save_timm_checkpoint

from xret.heads.runs.encoders import encode_captions_by_all, encode_images_by_all
from xret.pipeline.data.manifest import load_manifest
from xret.pipeline.encoders.origin import Origin
from xret.pipeline.encoders.registry import load_text, load_visual
from xret.pipeline.encoders.spec import EncoderSpec
from xret.pipeline.errors import CacheError, EncoderError
from xret.pipeline.extraction.extraction import extract
from xret.pipeline.extraction.options import Options, build_options
from xret.pipeline.store import FeatureCache
from xret.testing import check_encoder

TEXTS = ["a picture of thing 1 2", "two dogs", "a red square number 3"]
RANDOM = {"weights": "random:0"}
SMALL = {**RANDOM, "image_size": 64}
# By case what a spec has; ``hf:FAMILY`` stands for the family's checkpoint.
FAMILIES = ("clip", "siglip", "dinov2", "dinov3", "vit-classifier", "beit", "swinv2", "convnext", "resnet")
VISUAL = {family: {"name": f"hf:{family}"} for family in FAMILIES} | {
    "torchvision": {"name": "mobilenet_v3_small", **SMALL},
    "torchvision transformer": {"name": "vit_b_32", **SMALL},
    "torchvision, pooled": {"name": "mobilenet_v2", "pool": (1, 2), **SMALL},
    "torchvision, whole": {"name": "resnet18", "whole": True, **SMALL},
    "torchvision, whole, views": {"name": "resnet18", "whole": True, "views": "crop-flip:2", **SMALL},
    "torchvision, views": {"name": "resnet18", "views": "dihedral:2", **SMALL},
    "siglip in float32": {"name": "hf:siglip", "dtype": "float32"},
    "clip, whole": {"name": "hf:clip", "whole": True},
    "clip, a layer, resized": {"name": "hf:clip", "image_size": 48, "layer": 1},
    "dinov3, pooled": {"name": "hf:dinov3", "image_size": 48, "pool": (4, 4)},
    "convnext, a layer": {"name": "hf:convnext", "layer": 2},
    "dinov2, views": {"name": "hf:dinov2", "views": "crop-flip:3"},
    "timm": {"name": "timm:small_registers", **RANDOM},
    "timm, a layer": {"name": "timm:small_swin.squashed", "layer": 0, **RANDOM},
    "timm, pooled": {"name": "timm:small_eva.own", "layer": 0, "pool": (2, 3), **RANDOM},
    "timm, views": {"name": "timm:small_swin", "views": "crop-flip:2", **RANDOM},
    "timm, of a side": {"name": "timm:test_resnet", "image_size": 96, **RANDOM},
    "timm's on the hub": {"name": "hf:small_swin"},
    "timm's on the hub, resized, a layer": {"name": "hf:test_vit", "image_size": 96, "layer": 2},
    "open_clip": {"name": "open_clip:small-ViT", **RANDOM},
    "open_clip, of a side": {"name": "open_clip:small-ViT", "image_size": 48, "layer": 1, **RANDOM},
    "open_clip, a ResNet": {"name": "open_clip:small-RN", **RANDOM},
    "open_clip, a ResNet's layer": {"name": "open_clip:small-RN", "layer": 2, **RANDOM},
    "a user's class": {"name": "own_encoder:Quarters", "image_size": 60},
}
SLOW = {
    "butd-grid": {"name": "butd-grid", **SMALL},
    "fasterrcnn": {"name": "fasterrcnn_resnet50_fpn_v2", **RANDOM},
}
TEXT = {family: {"name": f"hf:{family}"} for family in ("clip", "siglip-left", "clip-text", "roberta", "t5")} | {
    "bert": {"name": "bert", "weights": "bert"},
    "bert, a layer, prompted": {"name": "bert", "weights": "bert", "layer": 1, "prompt": "a picture of {}"},
    "clip, a layer, prompted": {"name": "hf:clip", "layer": 1, "prompt": "a photo of {}"},
    "siglip, prompted": {"name": "hf:siglip", "prompt": "a photo of {}"},
    "t5, a layer": {"name": "hf:t5", "layer": 1, "dtype": "float32"},
    "sentences": {"name": "hf:mean"},
    "sentences, by the maximum": {"name": "hf:max"},
    "open_clip": {"name": "open_clip:small-ViT", **RANDOM, "prompt": "a photo of {}"},
    "open_clip, a layer": {"name": "open_clip:small-timm", **RANDOM, "layer": 1},
    "a user's class": {"name": "own_encoder:Letters"},
}
LEARNING, LEARNING_TEXT = (
    {key: case for key, case in cases.items() if not {"views", "pool"} & case.keys() and case["name"] != "vit_b_32"}
    for cases in (VISUAL, TEXT)
)


def save_tiny_bert(folder, _):
    save_bert(folder)


def save_sentences(folder, mode):
    save_sentence_model(folder, mode, True)


@pytest.fixture
def spec_of(made):
    """Return the spec of a case, whose checkpoint is written."""

    def find(case, save):
        name = case["name"].removeprefix("hf:")
        if case.get("weights") == "bert":
            return EncoderSpec(**{**case, "weights": str(made(save_tiny_bert, "bert"))})
        writer = save_sentences if name in ("mean", "max") else save
        writer = save_timm_checkpoint if name in ("small_swin", "test_vit") else writer
        return EncoderSpec(**{**case, "name": case["name"] if name == case["name"] else f"hf:{made(writer, name)}"})

    return find


@pytest.fixture
def extracted(request, tmp_path, tiny_dataset, spec_of):
    """Extract with the spec of a case; return the cache, the spec and the pictures."""
    side, case = request.param
    spec = spec_of(case, save_image_model if side == "visual" else save_text_model)
    options = Options(**{"visual": None, "text": None, side: spec}, batch_size=4, device="cpu")
    manifest, url = load_manifest(tiny_dataset(train=3, val=2, test=2)), str(tmp_path / "s.zarr")
    extract(manifest, url, options)
    return FeatureCache.open(url), spec, [manifest.images / f"{number}.jpg" for number in range(7)]


def cases(side, named):
    return pytest.mark.parametrize("extracted", [(side, case) for case in named.values()], ids=named, indirect=True)


def is_kept_for_pictures(cache, spec, paths):
    features = cache.image_set()
    encoder = load_visual(spec, "cpu")
    check_encoder(encoder)
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


@cases("visual", VISUAL)
def test_image_encoders_keep_the_contract(extracted):
    encoder = is_kept_for_pictures(*extracted)
    _, spec, paths = extracted
    if spec.views:
        return
    pixels = torch.stack([encoder.decode(path)[0] for path in paths[:3]])
    local, global_ = encoder.encode(pixels)
    assert np.abs(global_[0] - global_[1]).max() > 1e-3
    assert [array.tobytes() for array in encoder.encode(pixels)] == [local.tobytes(), global_.tobytes()]


@pytest.mark.slow
@cases("visual", SLOW)
def test_large_encoders_keep_the_contract(extracted):
    is_kept_for_pictures(*extracted)


@cases("visual", {"plain-ground": {"name": "plain-ground"}})
def test_regions_without_weights_keep_the_contract(extracted):
    is_kept_for_pictures(*extracted)


@cases("text", TEXT)
def test_text_encoders_keep_the_contract(extracted):
    cache, spec, _ = extracted
    features, texts = cache.caption_set(), cache.caption_texts(0, cache.captions)
    encoder = load_text(spec, "cpu")
    check_encoder(encoder)
    assert (features.channels, features.global_channels) == (encoder.channels, encoder.global_channels)
    assert (features.kind, features.space) == (encoder.kind, encoder.space)
    again = Origin.of(features).load_captions(None, "cpu", trust=True)
    assert again.identity == encoder.identity
    ids = encoder.tokenize(texts)
    local, global_ = encoder.encode(ids)
    assert [array.tobytes() for array in encoder.encode(ids)] == [local.tobytes(), global_.tobytes()]
    (found,) = encode_captions_by_all([(again, features.dtype)], "cpu", texts)
    at = np.arange(len(texts))
    np.testing.assert_allclose(found.global_, features.global_(at), rtol=2e-3, atol=2e-3)
    assert found.length.tolist() == features.length.tolist() == [len(caption) for caption in ids]
    packed = np.concatenate([rows[:length] for rows, length in zip(found.local, found.length, strict=True)])
    np.testing.assert_allclose(packed, features.local(at), rtol=2e-3, atol=2e-3)


def learn(encoder, *inputs):
    """Take a step along the gradient; return the features before it."""
    encoder.network.requires_grad_(True)
    local, global_ = encoder.features(*inputs)
    before = local.detach(), global_.detach()
    (local.square().mean() + global_.sin().mean()).backward()
    found = [parameter for parameter in encoder.network.parameters() if parameter.grad is not None]
    assert len(found) > 8
    with torch.no_grad():
        for parameter in found:
            parameter.sub_(parameter.grad.sign(), alpha=0.01)
    encoder.network.requires_grad_(False)
    return before


def saved(encoder, run, branch):
    """Save an encoder as a fine-tuned run does; return the spec of what is there, as `run.json` has it."""
    run.mkdir()
    encoder.save(path := run / f"{branch}_backbone{encoder.suffix}")
    return EncoderSpec.from_json(encoder.spec.without_folders().to_json()).with_source(str(path))


def is_the_same(again, encoder, before, *inputs):
    assert again.identity == {**encoder.identity, "weights": encoder.weights_id()}
    assert again.identity["weights"] != encoder.identity["weights"]
    assert again.space is None  # the other tower has not learnt with it
    with torch.no_grad():
        learnt = encoder.features(*inputs)
        for was, now, read in zip(before, learnt, again.features(*inputs), strict=True):
            assert torch.equal(read, now)
            assert not torch.allclose(was, now, atol=1e-4)


@pytest.mark.parametrize("case", LEARNING.values(), ids=LEARNING)
def test_an_image_encoder_learns_and_is_read_back(case, spec_of, tmp_path):
    encoder = load_visual(replace(spec_of(case, save_image_model), dtype="float32"), "cpu")
    if not hasattr(encoder, "network"):
        return
    random = np.random.default_rng(0)
    pictures = [Image.fromarray(random.integers(0, 256, (90, 120, 3), dtype=np.uint8)) for _ in range(2)]
    pixels = torch.stack([encoder.prepare(picture) for picture in pictures])
    before = learn(encoder, pixels)
    again = load_visual(saved(encoder, tmp_path / "run", "image"), "cpu")
    is_the_same(again, encoder, before, pixels)
    assert torch.equal(torch.stack([again.prepare(picture) for picture in pictures]), pixels)


@pytest.mark.parametrize("case", LEARNING_TEXT.values(), ids=LEARNING_TEXT)
def test_a_text_encoder_learns_and_is_read_back(case, spec_of, tmp_path):
    encoder = load_text(replace(spec_of(case, save_text_model), dtype="float32"), "cpu")
    if not hasattr(encoder, "network"):
        return
    ids = encoder.tokenize(TEXTS)
    length = torch.tensor([len(caption) for caption in ids])
    token = torch.nn.utils.rnn.pad_sequence([torch.tensor(caption) for caption in ids], True)
    before = learn(encoder, token, length)
    again = load_text(saved(encoder, tmp_path / "run", "text"), "cpu")
    is_the_same(again, encoder, before, token, length)
    assert again.tokenize(TEXTS) == ids
    packed, pooled = encoder.encode(ids)
    local, global_ = encoder.features(torch.nn.functional.pad(token, (0, 2), value=7), length)  # whatever stands there
    inside = torch.arange(local.shape[1]) < length[:, None]
    np.testing.assert_allclose(local[inside].numpy(), packed, atol=1e-5)
    np.testing.assert_allclose(global_.numpy(), pooled, atol=1e-5)
    assert not local[~inside].any()


def test_one_tower_is_no_other(tmp_path):
    """What is saved of a CLIP is one of its towers."""
    folder = save_text_model(tmp_path / "clip", "clip")
    image_encoder(f"hf:{folder}").save(tmp_path / "image")
    text_encoder(f"hf:{folder}").save(tmp_path / "text")
    save_tokenizer(tmp_path / "image", "<s>", "</s>")
    refused(r"do not fit their config.json: \d+ missing \(text_", text_encoder, f"hf:{tmp_path / 'image'}")
    refused(r"do not fit their config.json: \d+ missing \(vis", image_encoder, f"hf:{tmp_path / 'text'}")


@pytest.mark.parametrize(
    ("name", "weights", "options", "sentence"),
    [
        ("no_such_module:Encoder", "w", {}, "no encoder 'no_such_module:Encoder'.*lists them; a class of your own"),
        ("own_encoder:Absent", "w", {}, "a class of your own, .*Absent"),
        (
            "own_encoder:Unfinished",
            "broken",
            {},
            "Unfinished, .* cannot be loaded .Zero.* it is broken.; correct the class",
        ),
        ("own_encoder:Unfinished", "w", {}, "lacks channels, decode, encode, extras, .*, see `VisualEncoder`"),
        ("own_encoder:Askew", "w", {}, r"its grid is \(2, 2\), which `VisualEncoder` .* does not allow"),
        ("own_encoder:Nameless", "w", {}, r"Nameless' lacks identity\['layer'\], see `VisualEncoder`"),
        ("own_encoder:Quarters", "w", {"views": "dihedral:2"}, "'own_encoder:Quarters' lacks prepare"),
    ],
)
def test_a_class_that_is_no_encoder_is_refused(name, weights, options, sentence):
    refused(sentence, image_encoder, name, weights, **options)


@pytest.mark.parametrize(
    ("name", "sentence"),
    [
        ("own_encoder:Absent", "no encoder.*a class of your own, .*Absent"),
        ("own_encoder:Quarters", "Quarters cannot be loaded .TypeError"),
        ("own_encoder:Wordless", r"its vocabulary is \('a', 'b'\), which `TextEncoder` .* does not allow"),
        ("timm:resnet18", "no text encoder 'timm:resnet18'"),
    ],
)
def test_a_class_that_is_no_text_encoder_is_refused(name, sentence):
    refused(sentence, text_encoder, name)


def test_states_and_global_features_of_captions_are_as_many_as_declared(tmp_path, tiny_dataset):
    options = Options(None, EncoderSpec("own_encoder:Unsure"), device="cpu")
    with pytest.raises(EncoderError, match=r"global features of shape \(1, 2\) and declares \(\d+, 2\)"):
        extract(load_manifest(tiny_dataset(train=4)), str(tmp_path / "s.zarr"), options)


@cases("visual", {"own": VISUAL["a user's class"]})
def test_a_program_is_not_run_because_a_store_names_it(extracted):
    with pytest.raises(EncoderError, match=r"made by own_encoder:Quarters, a program of its own; .*give `trust`"):
        Origin.of(extracted[0].image_set()).load_images(None, "cpu")


@pytest.mark.parametrize(
    ("name", "found"),
    [
        ("Fewer", r"local features of shape \(4, 1, 3\) and declares \(4, 6, 3\)"),
        ("Narrow", r"global features of shape \(4, 1\) and declares \(4, 3\)"),
        ("Boxes", r"boxes features of shape \(4,\) and declares \(6, 4\)"),
    ],
)
def test_features_that_are_not_of_the_declared_shape_are_refused(name, found, tmp_path, tiny_dataset):
    options = Options(visual=EncoderSpec(f"own_encoder:{name}", image_size=60), text=None, batch_size=4, device="cpu")
    manifest = load_manifest(tiny_dataset(train=4))
    with pytest.raises(EncoderError, match=f"'own_encoder:{name}' gives {found}"):
        extract(manifest, str(tmp_path / "s.zarr"), options)
    with pytest.raises(EncoderError, match=f"'own_encoder:{name}' gives "):
        pictures = [manifest.images / f"{number}.jpg" for number in range(4)]
        next(encode_images_by_all([(load_visual(options.visual, "cpu"), "float32")], "cpu", pictures))


@pytest.mark.parametrize(("side", "projection"), [("visual", "visual_projection"), ("text", "text_projection")])
def test_global_features_beyond_the_dtype_are_refused(side, projection, tmp_path, tiny_dataset, made):
    save = save_image_model if side == "visual" else save_text_model
    folder = shutil.copytree(made(save, "clip"), tmp_path / "large")
    weights = load_file(folder / "model.safetensors")
    weights[f"{projection}.weight"] *= 1e6
    save_file(weights, folder / "model.safetensors", {"format": "pt"})
    options = build_options(**{"visual": None, "text": None, side: f"hf:{folder}"}, device="cpu", splits=("train",))
    with pytest.raises(CacheError, match="is beyond float16; extract with `dtype` float32"):
        extract(load_manifest(tiny_dataset(train=3)), str(tmp_path / "s.zarr"), options)


def test_encoders_that_nobody_has_are_given_up():
    left = weakref.ref(image_encoder("resnet18", "random:1", 64))
    gc.collect()
    assert left() is None
