"""Captions as word ids. The vectors belong to the head, which learns them; nothing here is trained."""

import hashlib
import json
import re
from collections import Counter
from collections.abc import Iterable, Sequence

from tokenizers import Regex, Tokenizer, models, normalizers, pre_tokenizers

from ..data.samples import tokenize
from ..errors import EncoderError
from .base import TextEncoder
from .spec import EncoderSpec

UNK = "<unk>"
MIN_COUNT = 4  # of a word in the vocabulary, as in the papers
FEW_CAPTIONS = 10_000  # with fewer to learn from, every word is in it
TOKENIZER = "lower-case words, 2"  # `samples.tokenize`; a change of its result needs another name here
# Chinese, Japanese, Thai, Lao, Burmese and Khmer, which are written without spaces.
_UNSPACED = re.compile("[\u0e00-\u0eff\u1000-\u109f\u1780-\u17ff\u3040-\u30ff\u3400-\u9fff\U00020000-\U0003ffff]")
# The words of `samples.tokenize` as the library tokenizers writes expressions.
_INSIDE = "(?:[\\p{L}\\p{N}\\p{M}]|[\u200c\u200d]+(?=[\\p{L}\\p{N}\\p{M}]))*"
_LONG = 8  # letters of a word that is a phrase; a Chinese or Japanese character counts twice


def without_spaces(texts: Iterable[str]) -> bool:
    """Return whether most words of texts are of such a script and as long as phrases: nobody has put in spaces."""
    words = [word for text in texts for word in tokenize(text)]
    unspaced = [word for word in words if _UNSPACED.search(word)]
    letters = sum(1 + (letter >= "\u3000") for word in unspaced for letter in word)
    return 2 * len(unspaced) > len(words) and letters > _LONG * len(unspaced)


class WordsEncoder(TextEncoder):
    """Turn captions into ids of a vocabulary, as `build` makes it; id 0 is ``<unk>``, for every other word.

    EncoderError: the vocabulary does not begin with ``<unk>``, or names a word twice.
    """

    name = kind = "words"
    channels = global_channels = None

    def __init__(self, vocabulary: Sequence[str]) -> None:
        self.vocabulary = tuple(vocabulary)
        self._ids = {word: number for number, word in enumerate(vocabulary)}
        if self._ids.get(UNK) != 0 or len(self._ids) < len(vocabulary):
            raise EncoderError(
                f"a vocabulary begins with '{UNK}' and names no word twice; build it again from the training captions"
            )
        sha = hashlib.sha256(json.dumps(self.vocabulary).encode()).hexdigest()
        self.identity = {"encoder": self.name, "weights": sha, "preprocessing": {"tokenizer": TOKENIZER}, "layer": None}
        self.versions = {}
        self.spec = EncoderSpec(self.name)

    @classmethod
    def build(cls, train_texts: Sequence[str], min_count: int | None = None) -> "WordsEncoder":
        """Make a vocabulary of the frequent words of captions, by count, then by the word itself.

        A word must occur `min_count` times: by default four times, as in the papers, or once where there are fewer than
        10,000 captions.
        """
        counts = Counter(word for text in train_texts for word in tokenize(text))
        automatic = 1 if len(train_texts) < FEW_CAPTIONS else MIN_COUNT
        least = automatic if min_count is None else min_count
        frequent = [word for word, count in counts.items() if count >= least and word != UNK]
        return cls([UNK, *sorted(frequent, key=lambda word: (-counts[word], word))])

    def tokenize(self, texts: Iterable[str]) -> list[list[int]]:
        """Return the ids of each caption's words; a caption without words becomes one ``<unk>``."""
        return [[self._ids.get(word, 0) for word in tokenize(text)] or [0] for text in texts]

    def portable_tokenizer(self) -> Tokenizer:
        """Return a tokenizer of the library tokenizers that gives the same ids; no words are none there."""
        tokenizer = Tokenizer(models.WordLevel(dict(self._ids), UNK))
        unseen, word = "(?![\u200b-\u200d])\\p{Cf}", rf"[\p{{L}}\p{{N}}]{_INSIDE}"
        steps = [normalizers.Replace(Regex(unseen), ""), normalizers.Lowercase(), normalizers.NFC()]
        tokenizer.normalizer = normalizers.Sequence([*steps, normalizers.Replace("’", "'")])
        words = Regex(f"{word}(?:['-]{word})*")
        tokenizer.pre_tokenizer = pre_tokenizers.Split(words, "removed", invert=True)
        tokenizer.enable_padding(pad_token=UNK)
        return tokenizer

    def encode(self, ids: Sequence[Sequence[int]]) -> None:
        """Return nothing: words have no states, a head learns their vectors."""

    def unknown_words(self, texts: Iterable[str]) -> list[str]:
        """Return the words that become ``<unk>``, each once, in their order."""
        return list(dict.fromkeys(word for text in texts for word in tokenize(text) if word not in self._ids))

    def count_truncated(self, texts: Iterable[str]) -> int:
        """Return 0: no caption is too long for a list of ids."""
        return 0
