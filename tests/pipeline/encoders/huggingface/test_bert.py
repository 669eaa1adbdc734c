"""``bert``: token features against a plain transformers forward, and what bad weights get."""

import json
import shutil

import minilm
import numpy as np
import pytest
import torch
import transformers
from encoder_contract import close, refused, text_encoder
from safetensors.torch import load_file, save_file
from small_bert import SPECIAL, TEXTS, VOCABULARY, save_model
from small_checkpoints import save_image_model, save_text_model


def load(folder, **options):
    return text_encoder("bert", folder, **options)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return save_model(tmp_path_factory.mktemp("bert"))


@pytest.fixture
def broken(folder, tmp_path):
    """Return a copy of the tiny model to break."""
    return shutil.copytree(folder, tmp_path / "copy")


def check_states(folder, encoder, layer, texts=TEXTS):
    """Compare an encoder with transformers' states of a layer, one caption after the other, and their maxima."""
    model = transformers.AutoModel.from_pretrained(folder, dtype=torch.float32).eval()
    ids = encoder.tokenize(texts)
    local, global_ = encoder.encode(ids)
    with torch.inference_mode():
        found = [model(input_ids=torch.tensor([caption]), output_hidden_states=True).hidden_states for caption in ids]
    rows = [states[layer][0].numpy() for states in found]
    close(local, np.concatenate(rows), 2e-5)
    close(global_, np.stack([states.max(0) for states in rows]), 2e-5)


def test_ids_have_the_special_tokens(folder):
    encoder = load(folder)
    words = [[VOCABULARY[i] for i in ids] for ids in encoder.tokenize(["Two DOGS", "zebra", ""])]
    assert words == [["[CLS]", "two", "dog", "##s", "[SEP]"], ["[CLS]", "[UNK]", "[SEP]"], ["[CLS]", "[SEP]"]]
    assert encoder.tokenize([]) == []


def test_padding_changes_nothing_even_if_its_vector_is_huge(broken):
    file = broken / "model.safetensors"
    state, plain = load_file(file), load(broken)
    state["embeddings.word_embeddings.weight"][0] = 1e4
    save_file(state, file, metadata={"format": "pt"})
    ids = plain.tokenize(TEXTS)
    for ours, reference in zip(load(broken).encode(ids), plain.encode(ids), strict=True):
        np.testing.assert_allclose(ours, reference, atol=1e-5)


def test_long_captions_are_cut_and_counted(folder):
    encoder = load(folder)
    texts = [" ".join(["dog"] * count) for count in (1, 18, 19, 100)]
    for _ in range(2):
        assert [len(ids) for ids in encoder.tokenize(texts)] == [3, 20, 20, 20]
        assert encoder.count_truncated(texts) == 2
    assert encoder.tokenize(texts)[3][-1] == VOCABULARY.index("[SEP]")


@pytest.mark.parametrize(
    ("kind", "max_length", "changes"),
    [
        ("Roberta", 19, {}),
        ("XLMRoberta", 17, {"pad_token_id": 2}),
        ("MPNet", 18, {"pad_token_id": 1}),
        ("Electra", 20, {"embedding_size": 8}),
        ("Albert", 20, {"embedding_size": 8}),
        ("DistilBert", 20, {"dim": 16, "n_heads": 2, "n_layers": 2}),
    ],
)
def test_relatives_of_bert(tmp_path, kind, max_length, changes):
    model, config = (getattr(transformers, f"{kind}{end}") for end in ("Model", "Config"))
    encoder = load(save_model(tmp_path, model, config, **changes))
    assert encoder.max_length == max_length
    check_states(tmp_path, encoder, -1, [*TEXTS, "dog " * 50])


@pytest.mark.parametrize("layer", [0, 2, 3, -1, -3])
@pytest.mark.parametrize(
    ("kind", "changes"),
    [
        ("Bert", {}),
        ("DistilBert", {"dim": 16, "n_heads": 2}),
        ("Albert", {"embedding_size": 8}),  # one layer, three times
        ("RobertaPreLayerNorm", {}),  # it normalises after the last
    ],
)
def test_states_of_any_layer_are_those_of_transformers(tmp_path, kind, changes, layer):
    model, config = (getattr(transformers, f"{kind}{end}") for end in ("Model", "Config"))
    encoder = load(save_model(tmp_path, model, config, num_hidden_layers=3, **changes), layer=layer)
    check_states(tmp_path, encoder, layer)
    assert encoder.identity["layer"] == ("last_hidden_state" if layer in (3, -1) else f"hidden_states.{layer % 4}")


def test_states_of_the_real_minilm_are_those_of_transformers():
    encoder = load(minilm.folder())
    assert (encoder.tokenize(["A dog"]), encoder.max_length) == ([[101, 1037, 3899, 102]], 512)
    check_states(minilm.folder(), encoder, -1, ["Two dogs play in the snow.", "A playground next to a river"])


def test_heads_of_another_task_are_left_out(tmp_path, folder):
    encoder = load(save_model(tmp_path, transformers.BertForPreTraining, seed=5))
    body = transformers.BertModel.from_pretrained(tmp_path, add_pooling_layer=False)
    body.save_pretrained(tmp_path / "body")
    for name in ("vocab.txt", "tokenizer_config.json"):
        shutil.copy(folder / name, tmp_path / "body")
    assert load(tmp_path / "body").identity == encoder.identity


def test_identity_follows_weights_and_tokenizer_but_not_the_place(broken, folder, tmp_path):
    first = load(folder).identity
    assert load(broken).identity == first
    (broken / "vocab.txt").write_text("\n".join([*SPECIAL, *reversed(VOCABULARY[5:])]) + "\n")
    other = load(broken).identity
    assert other["weights"] == first["weights"] != load(save_model(tmp_path, seed=1)).identity["weights"]
    assert other["preprocessing"]["tokenizer"] != first["preprocessing"]["tokenizer"]


def test_nothing_is_printed_and_settings_come_back(folder, capfd):
    before = transformers.logging.get_verbosity(), transformers.logging.is_progress_bar_enabled()
    encoder = load(folder)
    encoder.count_truncated(["dog " * 1000])
    encoder.encode(encoder.tokenize(TEXTS))
    assert capfd.readouterr() == ("", "")
    assert (transformers.logging.get_verbosity(), transformers.logging.is_progress_bar_enabled()) == before


@pytest.mark.parametrize(("family", "save"), [("clip", save_image_model), ("t5", save_text_model)])
def test_models_of_other_families_are_named_and_the_way_to_them(made, family, save):
    path = made(save, family)
    way = f"and 'bert' takes the BERT family; give them as hf:{path}"
    refused(f"text weights '{path}' are of a {family} model, {way}$", load, path)


def change_config(folder, **changes):
    path = folder / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))


BREAKS = {
    "no tokenizer": (lambda f: [(f / n).unlink() for n in ("vocab.txt", "tokenizer_config.json")], "vocab.txt"),
    "no vocabulary": (lambda f: (f / "vocab.txt").unlink(), "cannot be loaded .*vocab"),
    "no weights": (lambda f: (f / "model.safetensors").unlink(), "cannot be loaded .*model.safetensors"),
    "no config": (lambda f: (f / "config.json").unlink(), "cannot be loaded .*config.json"),
    "damaged": (lambda f: (f / "model.safetensors").write_bytes(b"torn"), "cannot be loaded"),
    "bad config": (lambda f: (f / "config.json").write_text("{"), "cannot be loaded .*JSON"),
    "more layers": (lambda f: change_config(f, num_hidden_layers=3), r"16 missing \(encoder.layer.2.*, …\)"),
    "fewer layers": (lambda f: change_config(f, num_hidden_layers=1), r"16 unknown \(.*encoder.layer.1"),
    "narrow": (lambda f: change_config(f, hidden_size=8), "of another shape"),
    "large vocabulary": (
        lambda f: (f / "vocab.txt").write_text("\n".join([*VOCABULARY, "owl"])),
        f"tokenizer has {len(VOCABULARY) + 1} tokens and the model knows {len(VOCABULARY)}",
    ),
}


@pytest.mark.parametrize("fault", BREAKS)
def test_a_folder_that_is_no_whole_model_is_refused(broken, fault, capfd):
    damage, message = BREAKS[fault]
    damage(broken)
    capfd.readouterr()
    refused(f"{broken}.*{message}|{message}.*{broken}", load, broken)
    assert capfd.readouterr().err == ""


@pytest.mark.parametrize("weights", ["/nowhere/at/all", "./absent", "a/b/c", "~/x"])
def test_a_missing_folder_is_refused(weights):
    refused("there is no such folder", load, weights)


def test_without_a_network_a_hub_model_says_what_to_do(monkeypatch, capfd):
    asked = []

    def offline(weights, local_files_only, **_):
        asked.append((weights, local_files_only))
        raise OSError("We could not connect.\nSee the manual.")

    monkeypatch.setattr(transformers.AutoConfig, "from_pretrained", offline)
    refused(r"weights some-bert, cannot be loaded .*could not connect\); check its weights", load, "some-bert")
    assert asked == [("some-bert", True), ("some-bert", False)]
    assert capfd.readouterr().err == "Fetching text weights 'some-bert' from the Hugging Face hub, into its cache.\n"
