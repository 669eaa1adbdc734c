"""Layers, special tokens and lengths of token features, against the hidden states of transformers."""

import minilm
import numpy as np
import pytest
import torch
import transformers
from bert_family import SMALL, TEXTS, VOCABULARY, assert_states, hidden_states, save_model
from tokenizers import ByteLevelBPETokenizer

from xret.pipeline.encoders.huggingface.bert import BertEncoder
from xret.pipeline.errors import EncoderError


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
