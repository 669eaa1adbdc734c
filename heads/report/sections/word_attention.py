"""Where each word of a caption looks in an image, by the cross-attention that compares the two.

Source: SCAN (Lee et al., *Stacked Cross Attention for Image-Text Matching*, ECCV 2018, section 3.1).
"""

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from ....pipeline.reading.joined_sets import parts_of
from ...modules.embedding import Sequence
from ...modules.similarity import CrossAttention
from ..figures import number
from ..pictures import Pictures
from ..views import View
from .examples import described, drawn
from .places import Place, place_of, why_no_places

WORDS = 24  # of a caption that are drawn


@dataclass(frozen=True)
class Word:
    """A word of a caption, its attention over the image as SVG, and its largest weight in percent."""

    text: str
    map: str
    most: str


@dataclass(frozen=True)
class Caption:
    """A caption that an image is compared with.

    Attributes:
        title: why it is shown.
        text: of the caption.
        score: its similarity with the image.
        even: what each weight would be if all were equal, percent.
        words: its first words.
        more: how many words are not shown.
    """

    title: str
    text: str
    score: str
    even: str
    words: list[Word]
    more: int


@dataclass(frozen=True)
class Read:
    """An image as SVG, how many cells or regions it has, and the captions that it is compared with."""

    name: str
    picture: str
    rows: int
    captions: list[Caption]


@dataclass(frozen=True)
class Reading:
    """How a run compares words with places.

    Attributes:
        by_word: whether words attend to places (``t-i``), or places to words (``i-t``).
        what: ``cells`` or ``regions``.
        images: a few.
        reason: a sentence, where there are none.
    """

    by_word: bool
    what: str
    images: list[Read]
    reason: str


def words_over_images(view: View, pictures: Pictures, count: int, seed: int) -> Reading | None:
    """Return the words' attention over `count` random images; None where the run compares without cross-attention."""
    if not isinstance(view.model.compare, CrossAttention):
        return None
    kinds = {part.kind for part in parts_of(view.batches.image_set)}
    what = "cells" if kinds == {"grid"} else "regions"
    chosen = drawn(np.unique(view.scores.caption_image.numpy()), count, seed)
    reason = why_no_places(view, pictures, chosen)
    shown = [] if reason else [_read(view, pictures, image) for image in chosen]
    images = [one for one in shown if one]
    return Reading(_by_word(view), what, images, reason or ("" if images else "The pictures cannot be read."))


@torch.no_grad()
def word_weights(view: View, image: int, caption: int) -> Tensor:
    """Return the cross-attention between the rows of an image and the words of a caption, ``[N, L]``."""
    images, captions = view.image.embedding, view.text.embedding
    assert isinstance(images, Sequence) and isinstance(captions, Sequence)
    one, other = (Sequence(*(t[[row]] for t in side)) for row, side in ((image, images), (caption, captions)))
    weights = _compare(view).weights(one, other)[0, 0]
    return weights[: int(one.length), : int(other.length)].cpu()


def words_of(view: View, caption: int) -> list[str]:
    """Return the words of a caption as the run reads them, with its ends; tokens of a language model are numbered.

    Of several feature sets those of one follow those of the other, as their rows do.
    """
    row, labels = view.batches.caption_rows[[caption]], list[str]()
    for features in parts_of(view.batches.caption_set):
        if features.vocabulary is None:
            labels += [f"token {number + 1}" for number in range(int(features.length[row][0]))]
            continue
        words = [features.vocabulary[number] if number else "(unknown word)" for number in features.token(row).tolist()]
        labels += ["<start>", *words, "<end>"] if view.run.recipe.adapter["words"]["ends"] else words
    return labels


def _read(view: View, pictures: Pictures, image: int) -> Read | None:
    place = place_of(view, pictures, image)
    if place is None:
        return None
    way = view.ways["image_to_text"]
    closest, rank = way.right(image)
    captions = [_caption(view, place, image, closest, f"The closest of its own captions, rank {rank:,}")]
    if rank > 1:
        first = int(way.found[image])
        captions.append(_caption(view, place, image, first, "The caption that is found first, of another image"))
    name = view.scores.ids[image]
    picture = place.picture.svg(described(name, view.scores.texts[closest]))
    return Read(name, picture, int(view.image.length[image]), captions)


def _caption(view: View, place: Place, image: int, caption: int, title: str) -> Caption:
    weights, name, text = word_weights(view, image, caption), view.scores.ids[image], view.scores.texts[caption]
    words = [
        Word(word, place.drawn(over.numpy(), f"Attention of '{word}' over image {name}"), _percent(float(over.max())))
        for word, over in zip(words_of(view, caption)[:WORDS], weights.T[:WORDS], strict=True)
    ]
    return Caption(
        title,
        text,
        score=number(float(view.scores.similarity[image, caption])),
        even=_percent(1 / weights.shape[0 if _by_word(view) else 1]),
        words=words,
        more=weights.shape[1] - len(words),
    )


def _compare(view: View) -> CrossAttention:
    assert isinstance(view.model.compare, CrossAttention)
    return view.model.compare


def _by_word(view: View) -> bool:
    return _compare(view).direction == "t-i"


def _percent(share: float) -> str:
    return number(100 * share, 1)
