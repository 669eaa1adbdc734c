"""A BERT of a moment, in a folder as the hub has them, that knows the words of `tiny_dataset`."""

import json

import torch
import transformers

WORDS = ["a", "picture", "of", "thing", "number", *map(str, range(10)), *(f"##{digit}" for digit in range(10))]
VOCABULARY = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *WORDS]


def save_bert(folder, seed=0):
    """Write a model of two layers with its tokenizer; return the folder."""
    config = transformers.BertConfig(
        vocab_size=len(VOCABULARY),
        hidden_size=16,
        num_hidden_layers=2,
        num_attention_heads=2,
        intermediate_size=32,
        max_position_embeddings=20,
        initializer_range=0.5,
    )
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model = transformers.BertModel(config)
    model.save_pretrained(folder)
    (folder / "vocab.txt").write_text("\n".join(VOCABULARY) + "\n")
    settings = {"tokenizer_class": "BertTokenizer", "do_lower_case": True, "model_max_length": 512}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    return folder
