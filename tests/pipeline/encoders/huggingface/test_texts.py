"""Features of text encoders against transformers called as its documentation does, and what bad input gets."""

import itertools
import json
import shutil
import sys

import pytest
import torch
import transformers
from encoder_contract import close, image_encoder, refused, text_encoder
from safetensors.torch import load_file, save_file
from small_checkpoints import (
    BERT,
    TEXT_FAMILIES,
    save_image_model,
    save_sentence_model,
    save_text_model,
    save_tokenizer,
)

TEXTS = ["a photo of two dogs", "Red square", "", "a picture of thing number 3 of thing number 4 zebra"]
JOINT = ["clip", "metaclip2", "siglip", "siglip-masked", "siglip-left"]


@pytest.fixture
def checkpoint(made):
    return lambda family: made(save_text_model, family)


def load(folder, **options):
    return text_encoder(f"hf:{folder}", **options)


def change(file, **settings):
    file.write_text(json.dumps({**(json.loads(file.read_text()) if file.exists() else {}), **settings}))


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
    encoder = load(checkpoint(family))
    ids = encoder.tokenize(TEXTS)
    local, global_ = encoder.encode(ids)
    states, pooled = documented(checkpoint(family), family, TEXTS)
    assert [len(caption) for caption in ids] == [len(rows) for rows in states]
    close(local, torch.cat(states))
    close(global_, pooled)
    assert (encoder.name, encoder.space is not None) == (family, family in JOINT)


def test_a_tokenizer_that_pads_on_the_left_changes_no_feature(copy):
    """Learned positions are counted from a caption's own beginning, however long the others of its batch are."""
    folder = copy(save_text_model, "bert")
    plain = load(folder)
    ids = plain.tokenize(TEXTS)
    change(folder / "tokenizer_config.json", padding_side="left")
    for found, expected in zip(load(folder).encode(ids), plain.encode(ids), strict=True):
        close(found, expected)


def test_a_model_that_sees_padding_is_refused(tmp_path):
    small = {key: value for key, value in BERT.items() if key != "num_attention_heads"}
    transformers.FNetModel(transformers.FNetConfig(**small)).save_pretrained(tmp_path)
    save_tokenizer(tmp_path, "<s>", "</s>")
    refused("the model sees the padding of a text beside a longer one", load, tmp_path)


@pytest.mark.parametrize("family", ["clip", "siglip"])
def test_both_towers_share_a_space(checkpoint, tmp_path, family):
    name = f"hf:{checkpoint(family)}"
    image, text = image_encoder(name), text_encoder(name)
    assert image.space == text.space == image_encoder(name, layer=1).space is not None
    assert image.global_channels == text.global_channels
    assert load(save_text_model(tmp_path / family, family, seed=1)).space not in (None, text.space)


@pytest.mark.parametrize("family", ["clip", "siglip", "roberta", "t5"])
def test_another_layer_gives_its_states(checkpoint, family):
    encoder, whole = load(checkpoint(family), layer=1), load(checkpoint(family))
    ids = encoder.tokenize(TEXTS[:1])
    local, global_ = encoder.encode(ids)
    kind = transformers.T5EncoderModel if family == "t5" else transformers.AutoModel
    model = kind.from_pretrained(checkpoint(family))
    padded = torch.tensor([ids[0] + [1] * (20 - len(ids[0]))]) if family == "siglip" else torch.tensor(ids)
    with torch.inference_mode():
        found = getattr(model, "get_text_features", model)(input_ids=padded, output_hidden_states=True)
    expected = found.hidden_states[1][0, : len(ids[0])]
    close(local, expected)
    close(global_, whole.encode(ids)[1] if family in JOINT else expected.amax(0)[None])
    refused("has no layer 5; choose one from 0 to 2", load, checkpoint(family), layer=5)


def by_the_library(folder, texts, **how):
    import sentence_transformers  # which takes seconds

    return sentence_transformers.SentenceTransformer(str(folder), device="cpu").encode(texts, **how)


def check_sentences(folder, tmp_path):
    """Assert that a folder gives what sentence-transformers makes of it, and what is saved of it likewise."""
    encoder = load(folder)
    close(encoder.encode(encoder.tokenize(TEXTS))[1], by_the_library(folder, TEXTS))
    encoder.save(tmp_path / "saved")
    assert load(tmp_path / "saved").identity == encoder.identity
    return encoder


@pytest.mark.parametrize(
    ("mode", "normalised"), [("mean", True), ("mean", False), ("cls", True), ("max", False), ("lasttoken", False)]
)
def test_folders_of_sentence_transformers_pool_as_they_say(tmp_path, mode, normalised):
    encoder = check_sentences(save_sentence_model(tmp_path / "sentences", mode, normalised), tmp_path)
    assert encoder.max_length == 12 and encoder.count_truncated(TEXTS) == 1
    assert text_encoder("bert", tmp_path / "sentences").identity["encoder"] == "bert"


def test_dense_layers_of_sentence_transformers_are_part_of_the_identity(tmp_path):
    import sentence_transformers
    from sentence_transformers.sentence_transformer import modules

    plain, identities = save_sentence_model(tmp_path / "plain", "mean", False), []
    for number, activation in enumerate([torch.nn.Tanh(), torch.nn.Tanh(), torch.nn.ReLU()]):
        torch.manual_seed(min(number, 1))
        parts = [modules.Transformer(str(plain)), modules.Pooling(16), modules.Dense(16, 8, True, activation)]
        sentence_transformers.SentenceTransformer(modules=parts, device="cpu").save(str(tmp_path / f"{number}"))
        (tmp_path / f"of-{number}").mkdir()
        identities.append(check_sentences(tmp_path / f"{number}", tmp_path / f"of-{number}").identity)
    assert all(one != other for one, other in itertools.combinations(identities, 2))


def with_pooling(folder, **settings):
    """Let a folder of a plain model be one of sentence-transformers, as older versions wrote it."""
    kinds = ("Transformer", "Pooling")
    modules = [
        {"idx": n, "name": str(n), "path": f"{n}_{kind}" if n else "", "type": f"sentence_transformers.models.{kind}"}
        for n, kind in enumerate(kinds)
    ]
    (folder / "modules.json").write_text(json.dumps(modules))
    (folder / "1_Pooling").mkdir()
    (folder / "1_Pooling" / "config.json").write_text(json.dumps({"word_embedding_dimension": 16, **settings}))
    return folder


@pytest.mark.parametrize(
    ("settings", "described"),
    [
        ({"pooling_mode": "weightedmean"}, "weightedmean"),
        ({"pooling_mode": ["mean", "max"]}, "['mean', 'max']"),
        ({"pooling_mode_cls_token": False, "pooling_mode_mean_tokens": True}, "pooling_mode_mean_tokens"),
    ],
)
def test_folders_of_any_age_and_pooling(copy, tmp_path, settings, described, monkeypatch):
    folder = with_pooling(copy(save_text_model, "mpnet"), **settings)
    assert check_sentences(folder, tmp_path).identity["global"] == described
    monkeypatch.setitem(sys.modules, "sentence_transformers.util", None)
    refused(r"sentence_transformers is not installed .*pip install 'xret\[sentences\]'", load, folder)


def test_a_folder_that_changes_its_texts_or_has_other_modules_is_refused(tmp_path):
    folder = save_sentence_model(tmp_path / "sentences", "mean", False)
    about = {"prompts": {"query": "two ", "other": "one "}, "default_prompt_name": "query"}
    change(folder / "config_sentence_transformers.json", **about)
    refused(r"see 'two ' before every text; give `prompt` 'two \{\}', another prompt, or", load, folder)
    encoder = load(folder, prompt="two {}")
    close(encoder.encode(encoder.tokenize(TEXTS[:1]))[1], by_the_library(folder, TEXTS[:1]))
    change(folder / "1_Pooling" / "config.json", include_prompt=False)
    refused(r"leave the tokens of a prompt out of the vector.*`prompt` '\{\}'", load, folder, prompt="two {}")
    encoder = load(folder, prompt="{}")
    close(encoder.encode(encoder.tokenize(TEXTS[:1]))[1], by_the_library(folder, TEXTS[:1], prompt=""))
    plain = (folder / "sentence_bert_config.json").read_text()
    others = {"do_lower_case": True, "transformer_task": "fill-mask", "processing_kwargs": {"text": {"max_length": 3}}}
    for key, value in others.items():
        change(folder / "sentence_bert_config.json", **{key: value})
        refused(f"want {key}, which xret does not run", load, folder, prompt="{}")
        (folder / "sentence_bert_config.json").write_text(plain)
    change(folder / "config_sentence_transformers.json", truncate_dim=5)
    cut = load(folder, prompt="{}")
    close(cut.encode(cut.tokenize(TEXTS[:1]))[1], by_the_library(folder, TEXTS[:1], prompt=""))
    assert cut.global_channels == 5 and cut.identity != encoder.identity
    modules = json.loads((folder / "modules.json").read_text())
    modules[1]["type"] = "os.path.join"
    (folder / "modules.json").write_text(json.dumps(modules))
    refused(r"want modules of .*os\.path\.join, which xret does not run", load, folder, prompt="{}")


def test_a_prompt_is_encoded_in_the_place_of_the_caption(checkpoint):
    plain, prompted = load(checkpoint("clip")), load(checkpoint("clip"), prompt="a photo of {}")
    assert prompted.tokenize(["two dogs"]) == plain.tokenize(["a photo of two dogs"])
    assert prompted.identity["preprocessing"].pop("prompt") == "a photo of {}"
    assert prompted.identity == plain.identity and prompted.space == plain.space


def test_words_are_not_masked_by_the_mark_of_the_end(copy):
    """As in CLIP's tokenizer, where the unknown token is the mark of the end."""
    folder = copy(save_text_model, "clip")
    change(folder / "tokenizer_config.json", pad_token="</s>", unk_token="</s>", mask_token=None)
    refused("words cannot be masked; set finetune.mask_words=0", load(folder).words, TEXTS)


def damage_weights(folder):
    weights = load_file(folder / "model.safetensors")
    weights["text_projection.weight"][0, 0] = torch.inf
    save_file(weights, folder / "model.safetensors", {"format": "pt"})


def forget_words(folder):
    config, weights = json.loads((folder / "config.json").read_text()), load_file(folder / "model.safetensors")
    name = "text_model.embeddings.token_embedding.weight"
    weights[name] = weights[name][:9].clone()
    save_file(weights, folder / "model.safetensors", {"format": "pt"})
    change(folder / "config.json", text_config={**config["text_config"], "vocab_size": 9})


@pytest.mark.parametrize(
    ("damage", "sentence"),
    [
        (damage_weights, "text_projection.weight holds NaN or infinity"),
        (forget_words, "the tokenizer has 45 tokens and the model knows 9; put the model's own tokenizer next to it"),
        (lambda folder: [(folder / f"tokenizer{end}.json").unlink() for end in ("", "_config")], "cannot be loaded"),
        (shutil.rmtree, "there is no such folder; give a folder or a hub id"),
    ],
)
def test_what_does_not_encode_texts_is_refused(copy, damage, sentence):
    folder = copy(save_text_model, "clip")
    damage(folder)
    refused(sentence, load, folder)


def test_image_models_take_no_texts(made):
    refused("a ViTModel, which takes no texts; give a text model, or use it as", load, made(save_image_model, "vit"))
