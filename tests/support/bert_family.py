"""Models of the BERT family of a moment, in folders as the hub has them, and what transformers makes of captions."""

import json

import numpy as np
import torch
import transformers

SPECIAL = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
VOCABULARY = [*SPECIAL, "a", "red", "dog", "cat", "runs", "in", "##s", ".", "two", "small"]
TEXTS = ["A red dog runs.", "cats", "two small dogs in a red cat .", ""]
SMALL = {
    "hidden_size": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "intermediate_size": 32,
    "max_position_embeddings": 20,
    "pad_token_id": 0,
    "initializer_range": 0.5,
}


def save_model(
    folder, kind=transformers.BertModel, config=transformers.BertConfig, seed=0, vocabulary=VOCABULARY, **changes
):
    """Write a tiny model with its tokenizer, as the hub has them; return the folder."""
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model = kind(config(**{**SMALL, "vocab_size": len(vocabulary), **changes}))
    model.save_pretrained(folder)
    (folder / "vocab.txt").write_text("\n".join(vocabulary) + "\n")
    settings = {"tokenizer_class": "BertTokenizer", "do_lower_case": True, "model_max_length": 512}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    return folder


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
