"""A BERT of a moment that knows the words of `tiny_dataset`."""

from bert_family import SPECIAL, save_model

WORDS = ["a", "picture", "of", "thing", "number", *map(str, range(10)), *(f"##{digit}" for digit in range(10))]


def save_bert(folder, seed=0):
    """Write a model of two layers with its tokenizer; return the folder."""
    return save_model(folder, seed=seed, vocabulary=[*SPECIAL, *WORDS])
