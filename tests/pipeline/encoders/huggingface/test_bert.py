"""Token features against a plain transformers forward."""

import json
import shutil
import sys
from itertools import pairwise

import minilm
import numpy as np
import pytest
import torch
import transformers
from bert_family import SPECIAL, TEXTS, VOCABULARY, save_model
from encoder_contract import FeatureContract
from loaded import text_encoder
from safetensors.torch import load_file, save_file


class TokenContract(FeatureContract):
    def lengths(self, encoder, batch):
        return [len(caption) for caption in batch]

    def split(self, encoder, batch, local):
        return np.split(local, np.cumsum(self.lengths(encoder, batch))[:-1])


class TestTinyBert(TokenContract):
    @pytest.fixture
    def encoder(self, folder):
        return text_encoder("bert", folder)

    @pytest.fixture
    def batch(self, encoder):
        return encoder.tokenize(TEXTS)


class TestMiniLM(TokenContract):
    """The real all-MiniLM-L6-v2."""

    @pytest.fixture
    def weights(self):
        return minilm.folder()

    @pytest.fixture
    def encoder(self, weights):
        return text_encoder("bert", weights)

    @pytest.fixture
    def batch(self, encoder):
        return encoder.tokenize(["a dog", "many planes are parked in an airport near several buildings .", ""])

    def test_states_are_those_of_transformers(self, encoder, weights):
        tokenizer = transformers.AutoTokenizer.from_pretrained(weights)
        model = transformers.AutoModel.from_pretrained(weights, dtype=torch.float32).eval()
        texts = ["Two dogs play in the snow.", "A playground next to a river"]
        local, global_ = encoder.encode(encoder.tokenize(texts))
        inputs = tokenizer(texts, padding=True, return_tensors="pt")
        with torch.inference_mode():
            states = model(**inputs).last_hidden_state
        kept = [state[mask] for state, mask in zip(states, inputs["attention_mask"].bool(), strict=True)]
        np.testing.assert_allclose(local, torch.cat(kept).numpy(), atol=1e-5)
        np.testing.assert_allclose(global_, torch.stack([rows.amax(0) for rows in kept]).numpy(), atol=1e-5)

    def test_likeness_of_sentences(self, encoder):
        texts = ["a plane is parked", "aircraft at an airport", "green trees in a forest", "a wood with many trees"]
        local, _ = encoder.encode(encoder.tokenize(texts))
        bounds = np.cumsum([0, *map(len, encoder.tokenize(texts))])
        means = np.stack([local[a:b].mean(0) for a, b in pairwise(bounds)])
        likeness = means @ means.T / np.outer(*[np.linalg.norm(means, axis=1)] * 2) - 2 * np.eye(4)
        assert likeness.argmax(1).tolist() == [1, 0, 3, 2]

    def test_ids_are_those_of_the_vocabulary(self, encoder):
        assert encoder.tokenize(["A dog"]) == [[101, 1037, 3899, 102]]
        assert encoder.max_length == 512


def test_real_weights_are_only_loaded_if_they_are_those_that_were_published(tmp_path, monkeypatch):
    package = tmp_path / minilm.PACKAGE
    (package / "model").mkdir(parents=True)
    (package / "__init__.py").write_text("raise AssertionError('it was run')")
    (package / "model" / "model.safetensors").write_bytes(b"others")
    monkeypatch.setattr(sys, "path", [str(tmp_path)])
    with pytest.raises(pytest.fail.Exception, match="is not what sentence-transformers publishes"):
        minilm.folder()
    monkeypatch.setattr(sys, "path", [])
    with pytest.raises(pytest.skip.Exception, match="is not here"):
        minilm.folder()


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


def test_half_precision_weights_are_computed_in_float32(copy):
    file = copy / "model.safetensors"
    save_file({k: v.half() for k, v in load_file(file).items()}, file, metadata={"format": "pt"})
    settings = json.loads((copy / "config.json").read_text())
    (copy / "config.json").write_text(json.dumps({**settings, "dtype": "float16"}))
    encoder = text_encoder("bert", copy)
    assert encoder.encode(encoder.tokenize(["a dog"]))[0].dtype == np.float32


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


def test_identity_does_not_change_with_use(folder):
    used = text_encoder("bert", folder)
    used.tokenize(TEXTS)
    assert used.identity == text_encoder("bert", folder).identity


def test_nothing_is_printed_and_settings_come_back(folder, capfd):
    before = transformers.logging.get_verbosity(), transformers.logging.is_progress_bar_enabled()
    encoder = text_encoder("bert", folder)
    encoder.count_truncated(["dog " * 1000])
    encoder.encode(encoder.tokenize(TEXTS))
    captured = capfd.readouterr()
    assert captured.out + captured.err == ""
    assert (transformers.logging.get_verbosity(), transformers.logging.is_progress_bar_enabled()) == before
