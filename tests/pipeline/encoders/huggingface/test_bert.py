"""Token features against a plain transformers forward, and what bad input gets."""

import json
import shutil
import sys
from itertools import pairwise
from pathlib import Path

import minilm
import numpy as np
import pytest
import torch
import transformers
from encoder_contract import FeatureContract
from safetensors.torch import load_file, save_file
from small_checkpoints import save_image_model, save_text_model
from tokenizers import ByteLevelBPETokenizer

from xret.pipeline.encoders import load_text
from xret.pipeline.encoders.huggingface.bert import BertEncoder
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
    """The real all-MiniLM-L6-v2."""

    @pytest.fixture
    def weights(self):
        return minilm.folder()

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


# ---- layers, special tokens and lengths ----


def save_roberta(folder):
    """Write a tiny RoBERTa with a byte-level tokenizer of its own: <s> … </s>, padding 1."""
    trained = ByteLevelBPETokenizer()
    trained.train_from_iterator(["a red dog runs in two small cats"] * 3, 290, special_tokens=["<s>", "<pad>", "</s>"])
    tokenizer = transformers.RobertaTokenizer(
        vocab=trained.get_vocab(), merges=[], unk_token="a", mask_token="<s>", model_max_length=512
    )
    tokenizer.save_pretrained(folder)
    sizes = {
        **SMALL,
        "vocab_size": len(tokenizer),
        "pad_token_id": 1,
        "max_position_embeddings": 60,
        "num_hidden_layers": 3,
    }
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = transformers.RobertaModel(transformers.RobertaConfig(**sizes))
    model.save_pretrained(folder)
    return folder


FAMILIES = {
    "bert": lambda folder: save_model(folder, num_hidden_layers=3),
    "roberta": save_roberta,
    "distilbert": lambda folder: save_model(
        folder, transformers.DistilBertModel, transformers.DistilBertConfig, dim=16, n_heads=2, num_hidden_layers=3
    ),
    "albert": lambda folder: save_model(  # one layer, run three times
        folder, transformers.AlbertModel, transformers.AlbertConfig, embedding_size=8, num_hidden_layers=3
    ),
    "deberta": lambda folder: save_model(
        folder,
        transformers.DebertaV2Model,
        transformers.DebertaV2Config,
        relative_attention=True,
        pos_att_type=["c2p", "p2c"],
        num_hidden_layers=3,
    ),
    "normalised after the last layer": lambda folder: save_model(
        folder, transformers.RobertaPreLayerNormModel, transformers.RobertaPreLayerNormConfig, num_hidden_layers=3
    ),
}


@pytest.fixture(scope="module", params=FAMILIES)
def family(request, tmp_path_factory):
    return FAMILIES[request.param](tmp_path_factory.mktemp("family"))


def hidden_states(folder, ids):
    """Return transformers' own hidden states of one caption after the other, a tuple of all layers for each."""
    model = transformers.AutoModel.from_pretrained(folder, dtype=torch.float32).eval()
    with torch.inference_mode():
        return [model(input_ids=torch.tensor([caption]), output_hidden_states=True).hidden_states for caption in ids]


def assert_states(encoded, states, layer, kept, atol=1e-5):
    """Compare what an encoder gave with transformers' states of one layer, the rows `kept` of each caption."""
    rows = [caption[layer][0, kept].numpy() for caption in states]
    np.testing.assert_allclose(encoded[0], np.concatenate(rows), atol=atol, rtol=1e-5)
    np.testing.assert_allclose(encoded[1], np.stack([caption.max(0) for caption in rows]), atol=atol, rtol=1e-5)


@pytest.fixture(scope="module")
def reference(family):
    """The ids of some captions, special tokens included, and their hidden states."""
    tokenizer = transformers.AutoTokenizer.from_pretrained(family)
    ids = [tokenizer(text)["input_ids"] for text in TEXTS[:3]]
    return ids, hidden_states(family, ids)


@pytest.mark.parametrize("layer", [0, 2, 3, -1, -3])
@pytest.mark.parametrize("kept", [slice(None), slice(1, -1)], ids=["special tokens", "none"])
def test_states_of_any_layer_are_those_of_transformers(family, reference, layer, kept):
    encoder = BertEncoder(str(family), "cpu", layer, special_tokens=kept == slice(None))
    ids, states = reference
    assert encoder.tokenize(TEXTS[:3]) == [caption[kept] for caption in ids]
    assert_states(encoder.encode(encoder.tokenize(TEXTS[:3])), states, layer, kept, atol=2e-5)


def test_layers_above_are_not_computed_where_they_can_be_left_out(family, request):
    encoder = BertEncoder(str(family), "cpu", 1)
    stacks = [module for module in encoder.network.modules() if isinstance(module, torch.nn.ModuleList)]
    whole = request.node.callspec.params["family"] == "normalised after the last layer"
    assert max(map(len, stacks)) == (3 if whole else 1)


def test_real_middle_layer_without_special_tokens():
    weights = minilm.folder()
    encoder = BertEncoder(str(weights), "cpu", -3, False, 8)
    ids = encoder.tokenize(["Two dogs play in the snow.", "many planes are parked in an airport", "a dog"])
    tokenizer = transformers.AutoTokenizer.from_pretrained(weights)
    assert [tokenizer.decode(caption) for caption in ids] == [
        "two dogs play in the snow",
        "many planes are parked in an",
        "a dog",
    ]
    states = hidden_states(weights, [[101, *caption, 102] for caption in ids])
    assert_states(encoder.encode(ids), states, 4, slice(1, -1))
    assert encoder.identity["layer"] == "hidden_states.4"


def test_a_caption_of_special_tokens_only_keeps_one_unk(folder):
    encoder = BertEncoder(str(folder), "cpu", special_tokens=False)
    ids = encoder.tokenize(["", "dog"])
    assert [[VOCABULARY[i] for i in caption] for caption in ids] == [["[UNK]"], ["dog"]]
    cls, sep = VOCABULARY.index("[CLS]"), VOCABULARY.index("[SEP]")
    states = hidden_states(folder, [[cls, *caption, sep] for caption in ids])
    assert_states(encoder.encode(ids), states, -1, slice(1, -1))


@pytest.mark.parametrize("special_tokens", [True, False])
def test_max_tokens_cuts_earlier_and_counts(folder, special_tokens):
    encoder = BertEncoder(str(folder), "cpu", special_tokens=special_tokens, max_tokens=6)
    texts = [" ".join(["dog"] * count) for count in (1, 4, 5, 100)]
    kept = [3, 6, 6, 6] if special_tokens else [1, 4, 4, 4]
    assert [len(ids) for ids in encoder.tokenize(texts)] == kept
    assert encoder.count_truncated(texts) == 2
    assert encoder.encode(encoder.tokenize(texts))[0].shape == (sum(kept), 16)
    # What was cut off leaves no trace.
    plain = BertEncoder(str(folder), "cpu", special_tokens=special_tokens)
    four = encoder.tokenize(texts[1:2])
    np.testing.assert_allclose(encoder.encode(encoder.tokenize(texts[3:]))[0], plain.encode(four)[0], atol=1e-5)


def test_identity_changes_only_with_options_that_change_features(folder):
    default = BertEncoder(str(folder), "cpu").identity
    assert default["layer"] == "last_hidden_state"
    assert set(default["preprocessing"]) == {"tokenizer", "max_length"}
    for same in ({"layer": 2}, {"layer": -1, "special_tokens": True, "max_tokens": 20}):
        assert BertEncoder(str(folder), "cpu", **same).identity == default
    first, before_last = (BertEncoder(str(folder), "cpu", layer).identity for layer in (1, -2))
    assert first == before_last == {**default, "layer": "hidden_states.1"}
    assert BertEncoder(str(folder), "cpu", -3).identity["layer"] == "hidden_states.0"
    changed = BertEncoder(str(folder), "cpu", special_tokens=False, max_tokens=9).identity
    preprocessing = {**default["preprocessing"], "special_tokens": False, "max_length": 9}
    assert changed == {**default, "preprocessing": preprocessing}


@pytest.mark.parametrize("layer", [3, -4])
def test_a_layer_that_is_not_there_is_refused(folder, layer):
    message = f"have no layer {layer}; choose a --text-layer from 0, the embeddings, to 2, or from -1.* down to -3$"
    with pytest.raises(EncoderError, match=message):
        BertEncoder(str(folder), "cpu", layer)


@pytest.mark.parametrize("count", [21, 2, 0, -1])
def test_a_length_that_does_not_fit_is_refused(folder, count):
    with pytest.raises(
        EncoderError, match=f"take 3 to 20 tokens a caption, 2 of them special tokens, and not {count};"
    ):
        BertEncoder(str(folder), "cpu", max_tokens=count)


def change_config(folder, **changes):
    path = folder / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))


@pytest.mark.parametrize(("family", "save"), [("clip", save_image_model), ("t5", save_text_model)])
def test_models_of_other_families_are_named_and_the_way_to_them(tmp_path, family, save):
    save(tmp_path / "m", family)
    with pytest.raises(EncoderError) as caught:
        BertEncoder(str(tmp_path / "m"), "cpu")
    way = f"and --text bert takes the BERT family; give them as --text hf:{tmp_path / 'm'}"
    assert str(caught.value) == f"text weights '{tmp_path / 'm'}' are of a {family} model, {way}"


BREAKS = {
    "no_tokenizer": (lambda f: [(f / n).unlink() for n in ("vocab.txt", "tokenizer_config.json")], "vocab.txt"),
    "no_vocabulary": (lambda f: (f / "vocab.txt").unlink(), "needs config.json, the weights and the tokenizer"),
    "no_weights": (lambda f: (f / "model.safetensors").unlink(), "not a complete text model .*model.safetensors"),
    "no_config": (lambda f: (f / "config.json").unlink(), "not a complete text model .*config.json"),
    "damaged": (lambda f: (f / "model.safetensors").write_bytes(b"torn"), "not a complete text model"),
    "bad_config": (lambda f: (f / "config.json").write_text("{"), "not a complete text model .*JSON"),
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
    assert capfd.readouterr().err == "Fetching text weights 'some-bert' from the Hugging Face hub, into its cache.\n"


def test_a_model_that_does_not_encode_tokens_is_refused(tmp_path):
    sizes = {"d_model": 16, "d_kv": 8, "d_ff": 32, "num_layers": 1, "num_heads": 2}
    folder = save_model(tmp_path, transformers.T5Model, transformers.T5Config, **sizes)
    with pytest.raises(EncoderError, match="are of a t5 model, and --text bert takes the BERT"):
        BertEncoder(str(folder), "cpu")


def test_an_object_is_made_once_a_process(folder):
    assert load_text(str(folder), "cpu") is load_text(str(folder), "cpu")
