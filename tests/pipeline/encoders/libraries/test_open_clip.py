"""Features of open_clip's models against open_clip called as its documentation does, and what bad input gets."""

import sys

import numpy as np
import open_clip
import pytest
import small_open_clip
import torch
from encoder_contract import are_pixels, close, image_encoder, prepared, refused, text_encoder
from PIL import Image
from small_checkpoints import TEXT, save_text_model
from small_open_clip import save_clip

# By architecture height and width of the grid, and the tokens that stand before its rows.
EXPECTED = {
    "small-ViT": ((4, 4), 1),
    "small-attentive": ((4, 4), 1),
    "small-RN": ((2, 2), 0),
    "small-timm": ((10, 10), 1),
}
TEXTS = ["a photo of a dog", "Two CATS, sleeping!", "", "one " * 99]


@pytest.fixture
def vit(made):
    return made(save_clip, "small-ViT")


def image_tower(name, weights, image_size=None, **options):
    return image_encoder(f"open_clip:{name}", weights, image_size, **options)


def text_tower(name, weights, **options):
    return text_encoder(f"open_clip:{name}", weights, **options)


def documented(name, file, photographs=(), **options):
    """Return a model and pixels, as the README makes them."""
    model, _, transform = open_clip.create_model_and_transforms(name, pretrained=str(file), **options)
    return model.eval(), torch.stack([transform(Image.open(path)) for path in photographs]) if photographs else None


@torch.inference_mode()
@pytest.mark.parametrize("name", EXPECTED)
def test_image_features_are_those_of_the_documented_call(made, photographs, name):
    encoder = image_tower(name, made(save_clip, name))
    model, pixels = documented(name, made(save_clip, name), photographs)
    are_pixels(encoder, photographs, pixels)
    local, global_ = encoder.encode(pixels)
    close(global_, model.encode_image(pixels))
    maps = model.visual.forward_intermediates(pixels, normalize_intermediates=name in ("small-ViT", "small-timm"))
    close(local, maps["image_intermediates"][-1].flatten(2).transpose(1, 2))
    if name == "small-ViT":
        model.visual.output_tokens = True
        close(local, model.visual(pixels)[1])
    assert (encoder.name, (encoder.grid, encoder.identity["tokens_left_out"])) == (name, EXPECTED[name])


@torch.inference_mode()
@pytest.mark.parametrize("name", ["small-ViT", "small-timm"])
def test_text_features_are_those_of_the_documented_call(made, name):
    encoder = text_tower(name, made(save_clip, name))
    model, _ = documented(name, made(save_clip, name), force_custom_text=True)
    rows, ids = open_clip.get_tokenizer(name)(TEXTS), encoder.tokenize(TEXTS)
    lengths = [int(row.argmax()) + 1 for row in rows]  # up to the end's mark, the largest id
    assert ids == [row[:length].tolist() for row, length in zip(rows, lengths, strict=True)]
    assert [len(caption) for caption in ids][2:] == [2, 16]
    states, pooled = encoder.encode(ids)
    close(pooled, model.encode_text(rows))
    model.text.output_tokens = True
    whole = model.text(rows)[1].numpy()
    close(states, np.concatenate([row[:length] for row, length in zip(whole, lengths, strict=True)]))
    assert encoder.count_truncated(TEXTS) == 1


def test_both_towers_share_a_space(vit, tmp_path):
    image, text = image_tower("small-ViT", vit), text_tower("small-ViT", vit)
    assert image.space == text.space == image_tower("small-ViT", vit, 64).space is not None
    other = save_clip(tmp_path / "other.pt", "small-ViT", seed=1)
    assert text_tower("small-ViT", other).space != text.space
    assert image_tower("small-ViT", "random:3").space == text_tower("small-ViT", "random:3").space != text.space
    image.save(tmp_path / "image.safetensors")
    alone = image_tower("small-ViT", tmp_path / "image.safetensors")
    assert (alone.identity, alone.space) == (image.identity, None)
    sentence = r"do not fit .*: \d+ missing \(text\."
    refused(sentence, text_tower, "small-ViT", tmp_path / "image.safetensors")


@torch.inference_mode()
@pytest.mark.parametrize(("layer", "block"), [(0, 0), (-2, 1)])
def test_other_layers(made, photographs, layer, block):
    for name, blocks in (("small-ViT", 3), ("small-RN", 5)):
        encoder = image_tower(name, made(save_clip, name), layer=layer)
        model, pixels = documented(name, made(save_clip, name), photographs)
        local, global_ = encoder.encode(pixels)
        index = block if layer >= 0 else blocks - 2
        maps = model.visual.forward_intermediates(pixels)["image_intermediates"]
        close(local, maps[index].flatten(2).transpose(1, 2))
        close(global_, model.encode_image(pixels))
        assert encoder.identity["layer"] == f"intermediates.{index}"


@torch.inference_mode()
def test_other_layers_of_texts(vit):
    model, _ = documented("small-ViT", vit, force_custom_text=True)
    rows = open_clip.get_tokenizer("small-ViT")(TEXTS[:1])
    blocks = model.text.forward_intermediates(rows, output_fmt="NLC")["text_intermediates"]
    first = model.text.token_embedding(rows) + model.text.positional_embedding
    for layer, expected in ((0, first), (1, blocks[0]), (-2, blocks[1])):
        encoder = text_tower("small-ViT", vit, layer=layer)
        states, global_ = encoder.encode(encoder.tokenize(TEXTS[:1]))
        close(states, expected[0, : len(states)])
        close(global_, model.encode_text(rows))
        assert encoder.identity["layer"] == f"hidden_states.{layer % 4}"


@torch.inference_mode()
def test_pictures_of_another_size_and_whole_ones(vit, photographs):
    encoder = image_tower("small-ViT", vit, 64)
    model, pixels = documented("small-ViT", vit, photographs, force_image_size=64)
    are_pixels(encoder, photographs, pixels)
    close(encoder.encode(pixels)[1], model.encode_image(pixels))
    assert encoder.grid == (8, 8)
    assert image_tower("small-ViT", vit, 32).identity == image_tower("small-ViT", vit).identity
    whole = image_tower("small-ViT", vit, whole=True)
    _, pixels = documented("small-ViT", vit, photographs, image_resize_mode="squash")
    are_pixels(whole, photographs, pixels)
    assert whole.identity["preprocessing"]["stretch"] == 32


@pytest.fixture
def download(vit, monkeypatch):
    """Give an architecture a tag, and let a function take the place of its download."""
    config = {"hf_hub": "own/clip/", "mean": (0.5,) * 3, "std": (0.4,) * 3, "resize_mode": "squash", "quick_gelu": True}
    monkeypatch.setitem(open_clip.pretrained._PRETRAINED, "small-ViT", {"own": config})

    def replace(function):
        for module in (open_clip, open_clip.factory):
            monkeypatch.setattr(module, "download_pretrained", function)

    return replace


def test_a_tag_fetches_the_hubs_weights_and_says_how_pictures_are_prepared(vit, photographs, download):
    asked = set()
    download(lambda config, **_: asked.add(config["hf_hub"]) or str(vit))
    encoder = image_tower("small-ViT/own", "imagenet")
    assert asked == {"own/clip/"}
    model, pixels = documented("small-ViT", "own", photographs)
    are_pixels(encoder, photographs, pixels)
    with torch.inference_mode():
        close(encoder.encode(pixels)[1], model.encode_image(pixels))
    assert encoder.name == "small-ViT-own" and encoder.identity["preprocessing"]["stretch"] == 32
    assert image_tower("small-ViT/own", vit).identity == encoder.identity != image_tower("small-ViT", vit).identity
    assert text_tower("small-ViT/own", "imagenet").space == encoder.space
    sentence = "takes whole pictures by itself; leave `whole` out"
    refused(sentence, image_tower, "small-ViT/own", "imagenet", whole=True)


def test_without_a_connection_that_is_named(download):
    def fail(*_, **__):
        raise OSError("no route to the hub\nTraceback")

    download(fail)
    for load in (image_tower, text_tower):
        refused(r"open_clip:small-ViT/own cannot be loaded .*no route to the hub\); check", load, "small-ViT/own", None)


@torch.inference_mode()
def test_a_tower_of_transformers_and_its_tokenizer(made, tmp_path):
    folder = str(made(save_text_model, "roberta"))
    own = {"hf_model_name": folder, "hf_tokenizer_name": folder, "context_length": 12, "hf_pooler_type": "mean_pooler"}
    small_open_clip.register(small_roberta={**small_open_clip.CONFIGS["small-ViT"], "text_cfg": own})
    file = save_clip(tmp_path / "w.pt", "small-roberta")
    encoder, (model, _) = text_tower("small-roberta", file), documented("small-roberta", file)
    texts = ["a picture of thing 7", "a " * 40]
    rows = open_clip.get_tokenizer("small-roberta")(texts)
    lengths = (rows != model.text.config.pad_token_id).sum(1).tolist()
    states, pooled = encoder.encode(encoder.tokenize(texts))
    model.text.output_tokens = True
    projected, whole = model.text(rows)
    close(pooled, projected)
    close(states, np.concatenate([row[:length] for row, length in zip(whole.numpy(), lengths, strict=True)]))
    layers = model.text.config.num_hidden_layers
    close(text_tower("small-roberta", file, layer=layers).encode(encoder.tokenize(texts))[0], states)
    assert text_tower("small-roberta", file, layer=0).identity["layer"] == "hidden_states.0"


@torch.inference_mode()
def test_a_tokenizer_that_pads_with_the_end(made, tmp_path):
    """SigLIP's: captions are padded with the mark of their end, and nothing is masked."""
    folder = str(made(save_text_model, "siglip"))
    text = {**small_open_clip._TEXT, "vocab_size": TEXT["vocab_size"], "hf_tokenizer_name": folder, "pool_type": "last"}
    config = {**small_open_clip.CONFIGS["small-ViT"], "text_cfg": {**text, "no_causal_mask": True}, "custom_text": True}
    small_open_clip.register(small_siglip=config)
    file = save_clip(tmp_path / "w.pt", "small-siglip")
    encoder, (model, _) = text_tower("small-siglip", file), documented("small-siglip", file)
    texts = ["a picture of thing 7", "a", ""]
    expected = model.encode_text(open_clip.get_tokenizer("small-siglip")(texts))
    close(encoder.encode(encoder.tokenize(texts))[1], expected)
    assert [caption[-1] for caption in encoder.tokenize(texts)] == [1, 1, 1]
    assert [len(caption) for caption in encoder.tokenize(texts)[1:]] == [2, 1]


@torch.inference_mode()
def test_random_weights_are_those_of_the_library(photographs, capfd, caplog):
    encoder = image_tower("small-ViT", "random:4")
    assert capfd.readouterr() == ("", "") and not caplog.records
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(4)
        model = open_clip.create_model("small-ViT", force_custom_text=True).eval()
    pixels = prepared(encoder, photographs) / 255
    close(encoder.encode(pixels)[1], model.encode_image(pixels))
    text = text_tower("small-ViT", "random:4")
    assert encoder.identity["weights"] == text.identity["weights"] == "random:4"
    refused("cannot mask words; set finetune.mask_words=0", text.words, TEXTS)


@pytest.mark.parametrize(
    ("name", "weights", "sentence"),
    [
        ("ViT-B-33", "random:0", r"open_clip has no architecture 'ViT-B-33' \(did you mean 'ViT-B-32'\?\)"),
        ("ViT-B/32", "random:0", r"open_clip has no architecture 'ViT-B' \(did you mean"),
        ("ViT-B-32/laion2b", None, "no weights 'ViT-B-32/laion2b' .did you mean 'laion2b_.*its tags: openai,"),
        ("ViT-B-32/openai", None, "another activation than ViT-B-32 has; give open_clip:ViT-B-32-quickgelu/openai"),
        ("small-ViT", None, "give a file, or open_clip:small-ViT/TAG .its tags: none"),
        ("small-ViT", "absent.pt", "'absent.pt' are no file, nor 'imagenet' or 'random:SEED'"),
    ],
)
def test_names_and_weights_that_are_unknown(name, weights, sentence):
    refused(sentence, image_tower, name, weights)


def test_what_does_not_fit(made, vit, tmp_path, monkeypatch):
    sentence = r"these weights do not fit 'open_clip:small-ViT': \d+ missing .*; \d+ unknown"
    refused(sentence, image_tower, "small-ViT", made(save_clip, "small-RN"))
    refused("do not fit 'open_clip:small-ViT'", text_tower, "small-ViT", made(save_clip, "small-timm"))
    state = torch.load(vit, weights_only=True)
    state["visual.ln_post.bias"] = torch.full((32,), torch.inf)
    torch.save(state, tmp_path / "w.pt")
    refused("visual.ln_post.bias holds NaN or infinity", image_tower, "small-ViT", tmp_path / "w.pt")
    refused("attnpool.positional_embedding", image_tower, "small-RN", made(save_clip, "small-RN"), image_size=96)
    refused("has no layer 3; choose one from 0 to 2", image_tower, "small-ViT", "random:0", layer=3)
    refused("has no layer 4; choose one from 0", text_tower, "small-ViT", "random:0", layer=4)
    text = {**small_open_clip._TEXT, "hf_tokenizer_name": str(tmp_path)}
    small_open_clip.register(small_lost={**small_open_clip.CONFIGS["small-ViT"], "text_cfg": text})
    refused("open_clip:small-lost, .* cannot be loaded", text_tower, "small-lost", "random:0")
    monkeypatch.setitem(sys.modules, "open_clip", None)
    for load in (image_tower, text_tower):
        refused(r"open_clip is not installed .*pip install 'xret\[open-clip\]'", load, "small-ViT", "random:8")
