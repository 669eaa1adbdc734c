"""What bad text weights get: one sentence each."""

import json

import pytest
import transformers
from bert_family import VOCABULARY, save_model
from loaded import text_encoder
from small_checkpoints import save_image_model, save_text_model

from xret.pipeline.errors import EncoderError


def change_config(folder, **changes):
    path = folder / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))


@pytest.mark.parametrize(("family", "save"), [("clip", save_image_model), ("t5", save_text_model)])
def test_models_of_other_families_are_named_and_the_way_to_them(tmp_path, family, save):
    save(tmp_path / "m", family)
    with pytest.raises(EncoderError) as caught:
        text_encoder("bert", tmp_path / "m")
    way = f"and 'bert' takes the BERT family; give them as hf:{tmp_path / 'm'}"
    assert str(caught.value) == f"text weights '{tmp_path / 'm'}' are of a {family} model, {way}"


BREAKS = {
    "no_tokenizer": (lambda f: [(f / n).unlink() for n in ("vocab.txt", "tokenizer_config.json")], "vocab.txt"),
    "no_vocabulary": (lambda f: (f / "vocab.txt").unlink(), "a folder config.json, the weights and the tokenizer"),
    "no_weights": (lambda f: (f / "model.safetensors").unlink(), "cannot be loaded .*model.safetensors"),
    "no_config": (lambda f: (f / "config.json").unlink(), "cannot be loaded .*config.json"),
    "damaged": (lambda f: (f / "model.safetensors").write_bytes(b"torn"), "cannot be loaded"),
    "bad_config": (lambda f: (f / "config.json").write_text("{"), "cannot be loaded .*JSON"),
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
        text_encoder("bert", copy)
    assert str(copy) in str(caught.value)
    assert "\n" not in str(caught.value)
    assert capfd.readouterr().err == ""


@pytest.mark.parametrize("weights", ["/nowhere/at/all", "./absent", "a/b/c", "~/x"])
def test_a_missing_folder_is_refused(weights):
    with pytest.raises(EncoderError, match="there is no such folder"):
        text_encoder("bert", weights)


def test_without_a_network_a_hub_model_says_what_to_do(monkeypatch, capfd):
    asked = []

    def offline(weights, local_files_only, **_):
        asked.append((weights, local_files_only))
        raise OSError("We could not connect.\nSee the manual.")

    monkeypatch.setattr(transformers.AutoConfig, "from_pretrained", offline)
    with pytest.raises(EncoderError, match=r"'some-bert' cannot be loaded .*could not connect\); a hub id needs"):
        text_encoder("bert", "some-bert")
    assert asked == [("some-bert", True), ("some-bert", False)]
    assert capfd.readouterr().err == "Fetching text weights 'some-bert' from the Hugging Face hub, into its cache.\n"


def test_a_model_that_does_not_encode_tokens_is_refused(tmp_path):
    sizes = {"d_model": 16, "d_kv": 8, "d_ff": 32, "num_layers": 1, "num_heads": 2}
    folder = save_model(tmp_path, transformers.T5Model, transformers.T5Config, **sizes)
    with pytest.raises(EncoderError, match="are of a t5 model, and 'bert' takes the BERT"):
        text_encoder("bert", folder)
