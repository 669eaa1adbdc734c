"""Features of text encoders against transformers called as its documentation does, and what bad input gets."""

import json
import shutil
import sys

import numpy as np
import pytest
import torch
import transformers
from loaded import image_encoder, text_encoder
from safetensors.torch import load_file, save_file
from small_checkpoints import TEXT_FAMILIES, save_image_model, save_sentence_model, save_text_model

from xret.pipeline.errors import EncoderError

TEXTS = ["a photo of two dogs", "Red square", "", "a picture of thing number 3 of thing number 4 zebra"]
JOINT = ["clip", "metaclip2", "siglip", "siglip-masked", "siglip-left"]


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    """Return the folder of a family's checkpoint, written once."""
    root = tmp_path_factory.mktemp("checkpoints")

    def find(family):
        return root / family if (root / family).exists() else save_text_model(root / family, family)

    return find


def documented(folder, family, texts):
    """Return the states of each caption and global features as the model's page in the documentation makes them."""
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    padding = {"padding": "max_length", "max_length": 20} if family.startswith("siglip") else {"padding": True}
    inputs = tokenizer(texts, return_tensors="pt", truncation=True, **padding)
    kind = transformers.T5EncoderModel if family == "t5" else transformers.AutoModel
    model = kind.from_pretrained(folder)
    with torch.inference_mode():
        found = getattr(model, "get_text_features", model)(**inputs)
    # Which are no padding, whether the model is told or not.
    lengths = [len(ids) for ids in tokenizer(texts, truncation=True)["input_ids"]]
    left = tokenizer.padding_side == "left"
    states = [
        row[len(row) - length :] if left else row[:length]
        for row, length in zip(found.last_hidden_state, lengths, strict=True)
    ]
    if family in JOINT or family == "clip-text":
        return states, found.pooler_output
    return states, torch.stack([row.amax(0) for row in states])


@pytest.mark.parametrize("family", TEXT_FAMILIES)
def test_features_are_those_of_the_documented_call(checkpoint, family):
    folder = checkpoint(family)
    encoder = text_encoder(f"hf:{folder}")
    ids = encoder.tokenize(TEXTS)
    local, global_ = encoder.encode(ids)
    states, pooled = documented(folder, family, TEXTS)
    assert [len(caption) for caption in ids] == [len(rows) for rows in states]
    np.testing.assert_allclose(local, torch.cat(states), rtol=1e-5, atol=1e-5)
    np.testing.assert_allclose(global_, pooled, rtol=1e-5, atol=1e-5)
    assert (encoder.name, encoder.identity["encoder"]) == (family, "hf")
    assert (encoder.space is not None) == (family in JOINT)


@pytest.mark.parametrize("family", ["clip", "siglip"])
def test_both_towers_share_a_space(checkpoint, tmp_path, family):
    folder = checkpoint(family)
    image, text = image_encoder(f"hf:{folder}"), text_encoder(f"hf:{folder}")
    assert image.space == text.space is not None
    assert image.global_channels == text.global_channels
    other = text_encoder(f"hf:{save_text_model(tmp_path / family, family, seed=1)}")
    assert other.space not in (None, text.space)
    layer = image_encoder(f"hf:{folder}", layer=1)
    assert layer.space == image.space


@pytest.mark.parametrize("family", ["clip", "siglip", "roberta", "t5"])
def test_another_layer_gives_its_states(checkpoint, family):
    folder = checkpoint(family)
    encoder, whole = text_encoder(f"hf:{folder}", layer=1), text_encoder(f"hf:{folder}")
    ids = encoder.tokenize(TEXTS[:1])
    local, global_ = encoder.encode(ids)
    kind = transformers.T5EncoderModel if family == "t5" else transformers.AutoModel
    model = kind.from_pretrained(folder)
    padded = torch.tensor([ids[0] + [1] * (20 - len(ids[0]))]) if family == "siglip" else torch.tensor(ids)
    with torch.inference_mode():
        found = getattr(model, "get_text_features", model)(input_ids=padded, output_hidden_states=True)
    expected = found.hidden_states[1][0, : len(ids[0])]
    np.testing.assert_allclose(local, expected, rtol=1e-5, atol=1e-5)
    wanted = whole.encode(ids)[1] if family in JOINT else expected.amax(0)[None]
    np.testing.assert_allclose(global_, wanted, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    ("mode", "normalised"), [("mean", True), ("mean", False), ("cls", True), ("max", False), ("lasttoken", False)]
)
def test_folders_of_sentence_transformers_pool_as_they_say(tmp_path, mode, normalised):
    sentence_transformers = pytest.importorskip("sentence_transformers")
    folder = save_sentence_model(tmp_path / "sentences", mode, normalised)
    encoder = text_encoder(f"hf:{folder}")
    expected = sentence_transformers.SentenceTransformer(str(folder), device="cpu").encode(TEXTS)
    _, global_ = encoder.encode(encoder.tokenize(TEXTS))
    np.testing.assert_allclose(global_, expected, rtol=1e-5, atol=1e-5)
    assert encoder.max_length == 12 and encoder.count_truncated(TEXTS) == 1
    encoder.save(tmp_path / "saved")
    again = text_encoder(f"hf:{tmp_path / 'saved'}")
    assert again.identity == encoder.identity
    assert text_encoder("bert", folder).identity["encoder"] == "bert"


def pooling(folder, **settings):
    """Let a folder of a plain model be one of sentence-transformers, as older versions wrote it."""
    kinds = settings.pop("kinds", ["Transformer", "Pooling"])
    modules = [
        {"idx": n, "name": str(n), "path": f"{n}_{kind}" if n else "", "type": f"sentence_transformers.models.{kind}"}
        for n, kind in enumerate(kinds)
    ]
    (folder / "modules.json").write_text(json.dumps(modules))
    (folder / "1_Pooling").mkdir()
    (folder / "1_Pooling" / "config.json").write_text(json.dumps(settings))
    return folder


@pytest.fixture
def copy(checkpoint, tmp_path):
    """Return a copy of a family's checkpoint to change."""
    return lambda family: shutil.copytree(checkpoint(family), tmp_path / "copy")


def test_older_folders_name_their_pooling_by_switches(copy):
    switches = {"pooling_mode_cls_token": False, "pooling_mode_mean_tokens": True, "pooling_mode_max_tokens": False}
    encoder = text_encoder(f"hf:{pooling(copy('mpnet'), word_embedding_dimension=16, **switches)}")
    ids = encoder.tokenize(TEXTS[:1])
    local, global_ = encoder.encode(ids)
    np.testing.assert_allclose(global_[0], local.mean(0), rtol=1e-5, atol=1e-6)
    assert "mean" in encoder.identity["global"]


def test_a_folder_that_changes_its_texts_is_refused_or_given_its_prompt(tmp_path):
    sentence_transformers = pytest.importorskip("sentence_transformers")
    folder = save_sentence_model(tmp_path / "sentences", "mean", False)
    about = {"prompts": {"query": "two ", "other": "one "}, "default_prompt_name": "query"}
    (folder / "config_sentence_transformers.json").write_text(json.dumps(about))
    refused(folder, r"are meant to see 'two ' before every text; give --prompt 'two \{\}', another prompt, or")
    encoder = text_encoder(f"hf:{folder}", prompt="two {}")
    expected = sentence_transformers.SentenceTransformer(str(folder), device="cpu").encode(TEXTS[:1])
    np.testing.assert_allclose(encoder.encode(encoder.tokenize(TEXTS[:1]))[1], expected, rtol=1e-5, atol=1e-5)
    (folder / "sentence_bert_config.json").write_text(json.dumps({"do_lower_case": True}))
    refused(folder, "want texts in lower case, which xret leaves as they are", prompt="{}")


def test_a_prompt_is_encoded_in_the_place_of_the_caption(checkpoint):
    folder = checkpoint("clip")
    plain, prompted = text_encoder(f"hf:{folder}"), text_encoder(f"hf:{folder}", prompt="a photo of {}")
    assert prompted.tokenize(["two dogs"]) == plain.tokenize(["a photo of two dogs"])
    assert prompted.identity["preprocessing"].pop("prompt") == "a photo of {}"
    assert prompted.identity == plain.identity
    assert prompted.space == plain.space


def refused(folder, sentence, **options):
    with pytest.raises(EncoderError, match=sentence) as caught:
        text_encoder(f"hf:{folder}", **options)
    assert "\n" not in str(caught.value)


def test_what_does_not_encode_texts_is_refused(copy, tmp_path):
    refused(
        save_image_model(tmp_path / "vit", "vit"), "are a ViTModel, which takes no texts; give a text model, or use"
    )
    refused(tmp_path / "absent", "there is no such folder; give a folder or a hub id")


def test_a_tokenizer_that_does_not_fit_is_refused(copy):
    folder = copy("clip")
    config = json.loads((folder / "config.json").read_text())
    config["text_config"]["vocab_size"] = 9
    weights = load_file(folder / "model.safetensors")
    name = "text_model.embeddings.token_embedding.weight"
    weights[name] = weights[name][:9].clone()
    save_file(weights, folder / "model.safetensors", {"format": "pt"})
    (folder / "config.json").write_text(json.dumps(config))
    refused(folder, "the tokenizer has 45 tokens and the model knows 9; put the model's own tokenizer next to it")


def test_a_folder_without_tokenizer_is_refused(copy):
    folder = copy("roberta")
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (folder / name).unlink()
    refused(folder, "cannot be loaded")


def test_weights_with_nan_are_refused(copy):
    folder = copy("clip")
    weights = load_file(folder / "model.safetensors")
    weights["text_projection.weight"][0, 0] = torch.inf
    save_file(weights, folder / "model.safetensors", {"format": "pt"})
    refused(folder, "text_projection.weight holds NaN or infinity")


@pytest.mark.parametrize(
    "settings", [{"pooling_mode": "weightedmean"}, {"pooling_mode": ["mean", "max"]}, {"pooling_mode": "cls"}]
)
def test_other_pooling_needs_its_library(copy, settings, monkeypatch):
    folder = pooling(copy("mpnet"), embedding_dimension=16, **settings)
    sentence_transformers = pytest.importorskip("sentence_transformers")
    encoder = text_encoder(f"hf:{folder}")
    expected = sentence_transformers.SentenceTransformer(str(folder), device="cpu").encode(TEXTS)
    np.testing.assert_allclose(encoder.encode(encoder.tokenize(TEXTS))[1], expected, rtol=1e-5, atol=1e-5)
    monkeypatch.setitem(sys.modules, "sentence_transformers.util", None)
    refused(folder, r"sentence_transformers is not installed .*pip install 'xret\[sentences\]'")


def test_modules_of_others_are_not_run(copy):
    folder = pooling(copy("mpnet"), pooling_mode="mean")
    modules = json.loads((folder / "modules.json").read_text())
    modules[1]["type"] = "os.path.join"
    (folder / "modules.json").write_text(json.dumps(modules))
    refused(folder, "xret cannot compute their modules.json")


def test_a_layer_that_is_not_there(checkpoint):
    refused(checkpoint("clip"), "has no layer 5; choose one from 0 to 2", layer=5)
