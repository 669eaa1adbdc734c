"""Features of open_clip's models against open_clip called as its documentation does, and what bad input gets."""

import sys

import numpy as np
import open_clip
import pytest
import small_open_clip
import torch
from encoder_contract import picture
from loaded import image_encoder, text_encoder
from PIL import Image
from small_checkpoints import TEXT, save_text_model

from xret.pipeline.errors import EncoderError

SIZES = [(180, 140), (90, 200), (64, 64)]
# By architecture height and width of the grid, and the tokens that stand before its rows.
EXPECTED = {
    "small-ViT": ((4, 4), 1),
    "small-attentive": ((4, 4), 1),
    "small-RN": ((2, 2), 0),
    "small-timm": ((10, 10), 1),
}
TEXTS = ["a photo of a dog", "Two CATS, sleeping!", "", "one " * 99]


@pytest.fixture(scope="module")
def file_of(tmp_path_factory):
    """Return the file of an architecture's weights, written once."""
    root = tmp_path_factory.mktemp("weights")

    def find(name):
        file = root / f"{name}.pt"
        return file if file.exists() else small_open_clip.save_clip(file, name)

    return find


@pytest.fixture
def photographs(tmp_path):
    return [picture(tmp_path / f"{number}.jpg", size, number) for number, size in enumerate(SIZES)]


def image_tower(name, weights, image_size=None, **options):
    return image_encoder(f"open_clip:{name}", weights, image_size, **options)


def text_tower(name, weights, **options):
    return text_encoder(f"open_clip:{name}", weights, **options)


def documented(name, file, **options):
    """Return a model and its transform, as the README makes them."""
    model, _, transform = open_clip.create_model_and_transforms(name, pretrained=str(file), **options)
    return model.eval(), transform


def close(found, expected):
    expected = np.asarray(expected)
    np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-5 * np.abs(expected).max())


@pytest.mark.parametrize("name", EXPECTED)
def test_image_features_are_those_of_the_documented_call(file_of, photographs, name):
    grid, before = EXPECTED[name]
    encoder = image_tower(name, file_of(name))
    model, transform = documented(name, file_of(name))
    pixels = torch.stack([transform(Image.open(path)) for path in photographs])
    ours = torch.stack([encoder.decode(path)[0] for path in photographs])
    assert torch.equal(ours, pixels)
    local, global_ = encoder.encode(ours)
    with torch.inference_mode():
        close(global_, model.encode_image(pixels))
        maps = model.visual.forward_intermediates(pixels, normalize_intermediates=name in ("small-ViT", "small-timm"))
        close(local, maps["image_intermediates"][-1].flatten(2).transpose(1, 2))
        if name == "small-ViT":
            model.visual.output_tokens = True
            close(local, model.visual(pixels)[1])
    assert (encoder.name, encoder.grid, encoder.identity["tokens_left_out"]) == (name, grid, before)
    assert encoder.versions["open_clip"] == open_clip.__version__


@pytest.mark.parametrize("name", ["small-ViT", "small-timm"])
def test_text_features_are_those_of_the_documented_call(file_of, name):
    encoder = text_tower(name, file_of(name))
    model, _ = documented(name, file_of(name), force_custom_text=True)
    rows = open_clip.get_tokenizer(name)(TEXTS)
    ids = encoder.tokenize(TEXTS)
    lengths = [int(row.argmax()) + 1 for row in rows]  # up to the end's mark, the largest id
    assert ids == [row[:length].tolist() for row, length in zip(rows, lengths, strict=True)]
    assert [len(caption) for caption in ids][2:] == [2, 16]
    states, pooled = encoder.encode(ids)
    with torch.inference_mode():
        close(pooled, model.encode_text(rows))
        model.text.output_tokens = True
        whole = model.text(rows)[1].numpy()
    close(states, np.concatenate([row[:length] for row, length in zip(whole, lengths, strict=True)]))
    assert encoder.count_truncated(TEXTS) == 1
    assert (encoder.name, encoder.channels, encoder.global_channels) == (name, 16, 24)


def test_both_towers_share_a_space(file_of, tmp_path):
    image, text = image_tower("small-ViT", file_of("small-ViT")), text_tower("small-ViT", file_of("small-ViT"))
    assert image.space == text.space is not None
    assert image_tower("small-ViT", file_of("small-ViT"), 64).space == text.space
    other = small_open_clip.save_clip(tmp_path / "other.pt", "small-ViT", seed=1)
    assert text_tower("small-ViT", other).space != text.space
    assert image_tower("small-ViT", "random:3").space == text_tower("small-ViT", "random:3").space != text.space


def test_one_tower_in_a_file_is_enough_for_itself(file_of, tmp_path):
    image = image_tower("small-ViT", file_of("small-ViT"))
    image.save(tmp_path / "image.safetensors")
    again = image_tower("small-ViT", tmp_path / "image.safetensors")
    assert (again.identity, again.space) == (image.identity, None)
    assert again.weights_id() == image.identity["weights"]
    refused(text_tower, "small-ViT", tmp_path / "image.safetensors", r"do not fit .*: \d+ missing \(text\.")


@pytest.mark.parametrize(("layer", "block"), [(0, 0), (-2, 1)])
def test_other_layers(file_of, photographs, layer, block):
    for name, blocks in (("small-ViT", 3), ("small-RN", 5)):
        encoder = image_tower(name, file_of(name), layer=layer)
        model, transform = documented(name, file_of(name))
        pixels = torch.stack([transform(Image.open(path)) for path in photographs])
        local, global_ = encoder.encode(pixels)
        index = block if layer >= 0 else blocks - 2
        with torch.inference_mode():
            maps = model.visual.forward_intermediates(pixels)["image_intermediates"]
            close(local, maps[index].flatten(2).transpose(1, 2))
            close(global_, model.encode_image(pixels))
        assert encoder.identity["layer"] == f"intermediates.{index}"


def test_other_layers_of_texts(file_of):
    model, _ = documented("small-ViT", file_of("small-ViT"), force_custom_text=True)
    rows = open_clip.get_tokenizer("small-ViT")(TEXTS[:1])
    length = int(rows[0].argmax()) + 1
    with torch.inference_mode():
        blocks = model.text.forward_intermediates(rows, output_fmt="NLC")["text_intermediates"]
        first = model.text.token_embedding(rows) + model.text.positional_embedding
        pooled = model.encode_text(rows)
    for layer, expected in ((0, first), (1, blocks[0]), (-2, blocks[1])):
        encoder = text_tower("small-ViT", file_of("small-ViT"), layer=layer)
        states, global_ = encoder.encode(encoder.tokenize(TEXTS[:1]))
        close(states, expected[0, :length])
        close(global_, pooled)
        assert encoder.identity["layer"] == f"hidden_states.{layer % 4}"


def test_pictures_of_another_size(file_of, photographs):
    encoder = image_tower("small-ViT", file_of("small-ViT"), 64)
    model, transform = documented("small-ViT", file_of("small-ViT"), force_image_size=64)
    pixels = torch.stack([transform(Image.open(path)) for path in photographs])
    assert torch.equal(torch.stack([encoder.decode(path)[0] for path in photographs]), pixels)
    with torch.inference_mode():
        close(encoder.encode(pixels)[1], model.encode_image(pixels))
    assert encoder.grid == (8, 8)
    own = image_tower("small-ViT", file_of("small-ViT"), 32)
    assert own.identity == image_tower("small-ViT", file_of("small-ViT")).identity


@pytest.fixture
def tagged(file_of, monkeypatch):
    """Give an architecture a tag, whose download is replaced; return what was asked for."""
    asked = []
    config = {"hf_hub": "own/clip/", "mean": (0.5,) * 3, "std": (0.4,) * 3, "resize_mode": "squash", "quick_gelu": True}
    monkeypatch.setitem(open_clip.pretrained._PRETRAINED, "small-ViT", {"own": config})

    def download(found, **_):
        asked.append(found["hf_hub"])
        return str(file_of("small-ViT"))

    for module in (open_clip, open_clip.factory):
        monkeypatch.setattr(module, "download_pretrained", download)
    return asked


def test_whole_pictures_where_the_middle_is_cut_out(file_of, photographs):
    encoder = image_tower("small-ViT", file_of("small-ViT"), whole=True)
    _, transform = documented("small-ViT", file_of("small-ViT"), image_resize_mode="squash")
    for path in photographs:
        assert torch.equal(encoder.decode(path)[0], transform(Image.open(path)))
    assert encoder.identity["preprocessing"]["stretch"] == 32


def test_a_tag_says_how_pictures_are_prepared(file_of, photographs, tagged):
    encoder = image_tower("small-ViT/own", "imagenet")
    assert set(tagged) == {"own/clip/"}
    model, _, transform = open_clip.create_model_and_transforms("small-ViT", pretrained="own")
    pixels = torch.stack([transform(Image.open(path)) for path in photographs])
    assert torch.equal(torch.stack([encoder.decode(path)[0] for path in photographs]), pixels)
    with torch.inference_mode():
        close(encoder.encode(pixels)[1], model.eval().encode_image(pixels))
    assert encoder.name == "small-ViT-own" and encoder.identity["preprocessing"]["stretch"] == 32
    assert image_tower("small-ViT/own", file_of("small-ViT")).identity == encoder.identity
    assert image_tower("small-ViT", file_of("small-ViT")).identity != encoder.identity
    assert text_tower("small-ViT/own", "imagenet").space == encoder.space
    refused(image_tower, "small-ViT/own", "imagenet", "takes whole pictures by itself; leave --whole out", whole=True)


def test_without_a_connection_a_file_is_asked_for(tagged, monkeypatch):
    def download(*_, **__):
        raise OSError("no route to the hub\nTraceback")

    monkeypatch.setattr(open_clip, "download_pretrained", download)
    monkeypatch.setattr(open_clip.factory, "download_pretrained", download)
    for load in (image_tower, text_tower):
        sentence = r"open_clip:small-ViT/own cannot be loaded .*no route to the hub\); check its weights"
        refused(load, "small-ViT/own", "imagenet", sentence, layer=1)


def test_a_tower_of_transformers_and_its_tokenizer(tmp_path):
    folder = str(save_text_model(tmp_path / "roberta", "roberta"))
    own = {"hf_model_name": folder, "hf_tokenizer_name": folder, "context_length": 12, "hf_pooler_type": "mean_pooler"}
    small_open_clip.register(small_roberta={**small_open_clip.CONFIGS["small-ViT"], "text_cfg": own})
    file = small_open_clip.save_clip(tmp_path / "w.pt", "small-roberta")
    encoder = text_tower("small-roberta", file)
    model, _ = documented("small-roberta", file)
    texts = ["a picture of thing 7", "a " * 40]
    rows = open_clip.get_tokenizer("small-roberta")(texts)
    lengths = (rows != model.text.config.pad_token_id).sum(1).tolist()
    states, pooled = encoder.encode(encoder.tokenize(texts))
    model.text.output_tokens = True
    with torch.inference_mode():
        projected, whole = model.text(rows)
    close(pooled, projected)
    close(states, np.concatenate([row[:length] for row, length in zip(whole.numpy(), lengths, strict=True)]))
    layers = model.text.config.num_hidden_layers
    close(text_tower("small-roberta", file, layer=layers).encode(encoder.tokenize(texts))[0], states)
    assert text_tower("small-roberta", file, layer=0).identity["layer"] == "hidden_states.0"


def test_a_tokenizer_that_pads_with_the_end(tmp_path):
    """SigLIP's: captions are padded with the mark of their end, and nothing is masked."""
    folder = str(save_text_model(tmp_path / "siglip", "siglip"))
    text = {**small_open_clip._TEXT, "vocab_size": TEXT["vocab_size"], "hf_tokenizer_name": folder, "pool_type": "last"}
    config = {**small_open_clip.CONFIGS["small-ViT"], "text_cfg": {**text, "no_causal_mask": True}, "custom_text": True}
    small_open_clip.register(small_siglip=config)
    file = small_open_clip.save_clip(tmp_path / "w.pt", "small-siglip")
    encoder = text_tower("small-siglip", file)
    model, _ = documented("small-siglip", file)
    texts = ["a picture of thing 7", "a"]
    with torch.inference_mode():
        close(
            encoder.encode(encoder.tokenize(texts))[1],
            model.encode_text(open_clip.get_tokenizer("small-siglip")(texts)),
        )
    assert [caption[-1] for caption in encoder.tokenize(texts)] == [1, 1]
    assert len(encoder.tokenize(["a"])[0]) == 2


def refused(load, name, weights, sentence, **options):
    with pytest.raises(EncoderError, match=sentence) as caught:
        load(name, weights, **options)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("name", "weights", "sentence"),
    [
        ("ViT-B-33", "random:0", r"open_clip has no architecture 'ViT-B-33' \(did you mean 'ViT-B-32'\?\)"),
        ("ViT-B/32", "random:0", r"open_clip has no architecture 'ViT-B' \(did you mean"),
        (
            "ViT-B-32/laion2b",
            "imagenet",
            "has no weights 'ViT-B-32/laion2b' .did you mean 'laion2b_.*its tags: openai,",
        ),
        (
            "ViT-B-32/openai",
            "imagenet",
            "another activation than ViT-B-32 has; give open_clip:ViT-B-32-quickgelu/openai",
        ),
        ("small-ViT", "imagenet", "give a file, or open_clip:small-ViT/TAG .its tags: none"),
        ("small-ViT", "absent.pt", "'absent.pt' are no file, nor 'imagenet' or 'random:SEED'"),
    ],
)
def test_names_and_weights_that_are_unknown(name, weights, sentence):
    refused(image_tower, name, weights, sentence)


def test_files_that_do_not_fit(file_of, tmp_path):
    sentence = r"these weights do not fit 'open_clip:small-ViT': \d+ missing .*; \d+ unknown"
    refused(image_tower, "small-ViT", file_of("small-RN"), sentence)
    refused(text_tower, "small-ViT", file_of("small-timm"), "do not fit 'open_clip:small-ViT'")
    state = torch.load(file_of("small-ViT"), weights_only=True)
    state["visual.ln_post.bias"] = torch.full((32,), torch.inf)
    torch.save(state, tmp_path / "w.pt")
    refused(image_tower, "small-ViT", tmp_path / "w.pt", "visual.ln_post.bias holds NaN or infinity")
    refused(image_tower, "small-RN", file_of("small-RN"), "visual.attnpool.positional_embedding", image_size=96)


def test_options_that_do_not_fit():
    refused(image_tower, "small-ViT", "random:0", "has no layer 3; choose one from 0 to 2", layer=3)
    refused(text_tower, "small-ViT", "random:0", "has no layer 4; choose one from 0", layer=4)


def test_a_tokenizer_that_cannot_be_loaded(tmp_path):
    text = {**small_open_clip._TEXT, "hf_tokenizer_name": str(tmp_path)}
    small_open_clip.register(small_lost={**small_open_clip.CONFIGS["small-ViT"], "text_cfg": text})
    refused(text_tower, "small-lost", "random:0", "open_clip:small-lost cannot be loaded")


def test_random_weights_are_those_of_the_library(photographs):
    encoder = image_tower("small-ViT", "random:4")
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(4)
        model = open_clip.create_model("small-ViT", force_custom_text=True).eval()
    pixels = torch.stack([encoder.decode(path)[0] for path in photographs])
    with torch.inference_mode():
        close(encoder.encode(pixels)[1], model.encode_image(pixels))
    assert encoder.identity["weights"] == text_tower("small-ViT", "random:4").identity["weights"] == "random:4"


def test_nothing_is_said_while_a_model_is_loaded(capfd, caplog):
    image_tower("small-ViT", "random:77")
    assert capfd.readouterr() == ("", "") and not caplog.records


def test_the_library_is_an_extra(monkeypatch):
    monkeypatch.setitem(sys.modules, "open_clip", None)
    sentence = r"open_clip is not installed .*pip install 'xret\[open-clip\]'"
    refused(image_tower, "small-ViT", "random:8", sentence)
    refused(text_tower, "small-ViT", "random:8", sentence)
