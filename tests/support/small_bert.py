"""Models of the BERT family of a moment, in folders as the hub has them."""

import json

import torch
import transformers

SPECIAL = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
VOCABULARY = [*SPECIAL, "a", "red", "dog", "cat", "runs", "in", "##s", ".", "two", "small"]
TEXTS = ["A red dog runs.", "cats", "two small dogs in a red cat .", ""]
SMALL = {
    "hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 32,
    "max_position_embeddings": 20, "pad_token_id": 0, "initializer_range": 0.5,
}  # fmt: skip
WORDS = ["a", "picture", "of", "thing", "number", *map(str, range(10)), *(f"##{digit}" for digit in range(10))]


def save_model(
    folder, kind=transformers.BertModel, config=transformers.BertConfig, seed=0, vocabulary=VOCABULARY, **changes
):
    """Write a tiny model with its tokenizer; return the folder."""
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model = kind(config(**{**SMALL, "vocab_size": len(vocabulary), **changes}))
    model.save_pretrained(folder)
    (folder / "vocab.txt").write_text("\n".join(vocabulary) + "\n")
    settings = {"tokenizer_class": "BertTokenizer", "do_lower_case": True, "model_max_length": 512}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    return folder


def save_bert(folder, seed=0):
    """Write a model of two layers that knows the words of `tiny_dataset`; return the folder."""
    return save_model(folder, seed=seed, vocabulary=[*SPECIAL, *WORDS])
