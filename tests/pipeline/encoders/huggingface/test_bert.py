"""Token features against a plain transformers forward."""

import shutil

import minilm
import numpy as np
import pytest
import torch
import transformers
from bert_family import SPECIAL, TEXTS, VOCABULARY, assert_states, hidden_states, save_model
from loaded import text_encoder
from safetensors.torch import load_file, save_file


def test_ids_have_the_special_tokens(folder):
    encoder = text_encoder("bert", folder)
    words = [[VOCABULARY[i] for i in ids] for ids in encoder.tokenize(["Two DOGS", "zebra", ""])]
    assert words == [["[CLS]", "two", "dog", "##s", "[SEP]"], ["[CLS]", "[UNK]", "[SEP]"], ["[CLS]", "[SEP]"]]
    assert encoder.tokenize([]) == []


def test_states_are_those_of_transformers_one_by_one(folder):
    encoder = text_encoder("bert", folder)
    model = transformers.BertModel.from_pretrained(folder).eval()
    ids = encoder.tokenize(TEXTS)
    local, global_ = encoder.encode(ids)
    with torch.inference_mode():
        alone = [model(input_ids=torch.tensor([caption])).last_hidden_state[0].numpy() for caption in ids]
    np.testing.assert_allclose(local, np.concatenate(alone), atol=1e-5)
    np.testing.assert_allclose(global_, np.stack([states.max(0) for states in alone]), atol=1e-5)


def test_padding_changes_nothing_even_if_its_vector_is_huge(copy):
    file = copy / "model.safetensors"
    state = load_file(file)
    plain = text_encoder("bert", copy)
    state["embeddings.word_embeddings.weight"][0] = 1e4
    save_file(state, file, metadata={"format": "pt"})
    huge = text_encoder("bert", copy)
    ids = plain.tokenize(TEXTS)
    for ours, reference in zip(huge.encode(ids), plain.encode(ids), strict=True):
        np.testing.assert_allclose(ours, reference, atol=1e-5)


def test_long_captions_are_cut_and_counted(folder):
    encoder = text_encoder("bert", folder)
    texts = [" ".join(["dog"] * count) for count in (1, 18, 19, 100)]
    assert encoder.max_length == 20
    assert [len(ids) for ids in encoder.tokenize(texts)] == [3, 20, 20, 20]
    assert encoder.tokenize(texts)[3][-1] == VOCABULARY.index("[SEP]")
    assert encoder.count_truncated(texts) == 2
    assert [len(ids) for ids in encoder.tokenize(texts)] == [3, 20, 20, 20]
    assert encoder.encode(encoder.tokenize(texts))[0].shape == (63, 16)


@pytest.mark.parametrize(
    ("kind", "config", "max_length", "changes"),
    [
        (transformers.RobertaModel, transformers.RobertaConfig, 19, {}),
        (transformers.XLMRobertaModel, transformers.XLMRobertaConfig, 17, {"pad_token_id": 2}),
        (transformers.MPNetModel, transformers.MPNetConfig, 18, {"pad_token_id": 1}),
        (transformers.ElectraModel, transformers.ElectraConfig, 20, {"embedding_size": 8}),
        (transformers.AlbertModel, transformers.AlbertConfig, 20, {"embedding_size": 8}),
        (transformers.DistilBertModel, transformers.DistilBertConfig, 20, {"dim": 16, "n_heads": 2, "n_layers": 2}),
    ],
)
def test_relatives_of_bert(tmp_path, kind, config, max_length, changes):
    encoder = text_encoder("bert", save_model(tmp_path, kind, config, **changes))
    assert encoder.max_length == max_length
    ids = encoder.tokenize([*TEXTS, "dog " * 50])
    local, global_ = encoder.encode(ids)
    alone = [encoder.encode([caption]) for caption in ids]
    np.testing.assert_allclose(local, np.concatenate([states for states, _ in alone]), atol=1e-5)
    np.testing.assert_allclose(global_, np.concatenate([pooled for _, pooled in alone]), atol=1e-5)


def test_heads_of_another_task_are_left_out(tmp_path, folder):
    plain = save_model(tmp_path, transformers.BertForPreTraining, seed=5)
    encoder = text_encoder("bert", plain)
    assert encoder.channels == 16
    body = transformers.BertModel.from_pretrained(plain, add_pooling_layer=False)
    body.save_pretrained(tmp_path / "body")
    for name in ("vocab.txt", "tokenizer_config.json"):
        shutil.copy(folder / name, tmp_path / "body")
    assert text_encoder("bert", tmp_path / "body").identity == encoder.identity


def test_identity_follows_weights_and_tokenizer_but_not_the_place(copy, folder, tmp_path):
    first = text_encoder("bert", folder).identity
    assert text_encoder("bert", copy).identity == first
    words = [*SPECIAL, *reversed(VOCABULARY[5:])]
    (copy / "vocab.txt").write_text("\n".join(words) + "\n")
    other = text_encoder("bert", copy).identity
    assert other["weights"] == first["weights"]
    assert other["preprocessing"]["tokenizer"] != first["preprocessing"]["tokenizer"]
    weights = text_encoder("bert", save_model(tmp_path, seed=1)).identity["weights"]
    assert weights != first["weights"]


def test_nothing_is_printed_and_settings_come_back(folder, capfd):
    before = transformers.logging.get_verbosity(), transformers.logging.is_progress_bar_enabled()
    encoder = text_encoder("bert", folder)
    encoder.count_truncated(["dog " * 1000])
    encoder.encode(encoder.tokenize(TEXTS))
    captured = capfd.readouterr()
    assert captured.out + captured.err == ""
    assert (transformers.logging.get_verbosity(), transformers.logging.is_progress_bar_enabled()) == before


def test_states_of_the_real_minilm_are_those_of_transformers():
    weights = minilm.folder()
    encoder = text_encoder("bert", weights)
    assert (encoder.tokenize(["A dog"]), encoder.max_length) == ([[101, 1037, 3899, 102]], 512)
    ids = encoder.tokenize(["Two dogs play in the snow.", "A playground next to a river"])
    assert_states(encoder.encode(ids), hidden_states(weights, ids), -1, slice(None))


FAMILIES = {
    "bert": (transformers.BertModel, transformers.BertConfig, {}),
    "distilbert": (transformers.DistilBertModel, transformers.DistilBertConfig, {"dim": 16, "n_heads": 2}),
    "albert": (transformers.AlbertModel, transformers.AlbertConfig, {"embedding_size": 8}),  # one layer, three times
    "normalised after the last": (transformers.RobertaPreLayerNormModel, transformers.RobertaPreLayerNormConfig, {}),
}


@pytest.mark.parametrize("layer", [0, 2, 3, -1, -3])
@pytest.mark.parametrize("family", FAMILIES)
def test_states_of_any_layer_are_those_of_transformers(tmp_path, family, layer):
    kind, config, changes = FAMILIES[family]
    folder = save_model(tmp_path, kind, config, num_hidden_layers=3, **changes)
    encoder = text_encoder("bert", folder, layer=layer)
    ids = encoder.tokenize(TEXTS[:3])
    assert_states(encoder.encode(ids), hidden_states(folder, ids), layer, slice(None), atol=2e-5)
    last = layer in (3, -1)
    assert encoder.identity["layer"] == ("last_hidden_state" if last else f"hidden_states.{layer % 4}")
