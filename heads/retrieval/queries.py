"""Texts and pictures are checked before a network sees them."""

import re
from collections.abc import Sequence
from pathlib import Path
from shlex import quote
from typing import Any

from PIL import Image

from ...pipeline.data.images import SUFFIXES, PictureFile
from ...pipeline.data.samples import tokenize
from ...pipeline.errors import QueryError
from ...pipeline.wording import some_of

_SURROGATE = re.compile("[\ud800-\udfff]")  # what Python makes of bytes on the command line that are not UTF-8


class UnknownWordsWarning(UserWarning):
    """Texts have words that are not in the run's vocabulary: its `<unk>` stands for them."""


def require_samples(items: Any, kind: Any, what: str, wanted: str) -> None:
    """Raise QueryError unless `items` are a list, or the like, of at least one sample of a kind."""
    if not isinstance(items, Sequence) or isinstance(items, str) or not all(isinstance(item, kind) for item in items):
        raise QueryError(f"{what}s must be {wanted}")
    if not items:
        raise QueryError(f"there is no {what} to embed; give at least one")


def require_texts(texts: Any) -> None:
    """Raise QueryError unless `texts` are a list of at least one text, none with lone surrogates."""
    require_samples(texts, str, "text", "a list of str, for example encode_text(['a red cube'])")
    if any(map(_SURROGATE.search, texts)):
        raise QueryError("the text has bytes that are not UTF-8; type it again")


def require_query(query: Any) -> None:
    """Raise QueryError unless this is a picture, or a text that is neither empty nor a file's name.

    Whether there is such a file is not looked up, as clients of a server could ask for any.
    """
    if not isinstance(query, str | Path | PictureFile | Image.Image):
        raise QueryError(
            f"a query is one text (str) or one picture (pathlib.Path or PIL image) and not a {type(query).__name__}"
            "; several are embedded by encode_text and encode_images"
        )
    if not isinstance(query, str):
        return
    require_texts([query])
    name = query.strip()
    if not name:
        raise QueryError("the query is empty; describe in a few words what to look for")
    if name.lower().endswith(SUFFIXES) and ("/" in name or len(name.split()) == 1):
        raise QueryError(
            f"'{name}' is a file name and not a text; to search by a picture use --image {quote(name)}, in Python"
            f" pathlib.Path({name!r})"
        )


def require_known_word(query: str, unknown: Sequence[str]) -> None:
    """Raise QueryError if a text has no word that is in the run's vocabulary."""
    if len(unknown) < len(set(tokenize(query))):
        return
    if not unknown:
        raise QueryError(f"'{query}' has no words; describe in a few words what to look for")
    raise QueryError(
        f"no word of the query is in the vocabulary of this run ({', '.join(some_of(list(unknown), 10))}); use words of"
        " the captions that it was trained on, which run.json in its folder lists"
    )


def unknown_sentence(words: Sequence[str]) -> str:
    """Return the notice of words that are not in a run's vocabulary."""
    return f"not in the vocabulary: {', '.join(some_of(list(words), 10))}"
