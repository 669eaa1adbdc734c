"""Where each slot of an image looks, iteration by iteration, with the caption nearest to what it became.

Figures 4, A2 and A3 of *Improving Cross-Modal Retrieval with Set of Diverse Embeddings* (SetDiv).
"""

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from ..pictures import Pictures
from ..views import View
from .examples import described, drawn, nearest
from .places import place_of, why_no_places


@dataclass(frozen=True)
class Slot:
    """One slot of an image.

    Attributes:
        maps: its attention at each iteration, as SVG.
        caption: the one nearest to its element.
        right: whether that is the image's own.
        share: of all attention of the last iteration, percent.
    """

    maps: list[str]
    caption: str
    right: bool
    share: float


@dataclass(frozen=True)
class Attended:
    """An image and its slots."""

    name: str
    caption: str
    picture: str
    slots: list[Slot]


def attended_images(view: View, pictures: Pictures, count: int, seed: int) -> tuple[list[Attended], str]:
    """Return the slots' attention over `count` random images, and where there is none, a sentence that says why."""
    chosen = drawn(np.arange(len(view.scores.ids)), count, seed)
    attention = attention_of(view, chosen)
    if attention is None:
        return [], "Its image embeddings are made without attention over the local features."
    if reason := why_no_places(view, pictures, chosen):
        return [], reason
    found = nearest(view.image_elements[chosen], view.caption_elements)
    shown = [_attended(view, pictures, row, attention[:, n], found[n]) for n, row in enumerate(chosen)]
    return [one for one in shown if one], "The pictures cannot be read." if not any(shown) else ""


@torch.no_grad()
def attention_of(view: View, images: list[int]) -> Tensor | None:
    """Return the attention over the rows of some images, the mean of its heads, ``[T, B, K, N]``; None without any."""
    made = view.model.embed_images(view.batches.image_source.fetch(np.array(images))())
    return None if made.attention is None else made.attention.float().mean(2).cpu()


def _attended(view: View, pictures: Pictures, row: int, attention: Tensor, found: Tensor) -> Attended | None:
    """Draw one image; `attention` is ``[T, K, N]``, `found` the caption nearest to each of K elements."""
    name, caption = view.scores.ids[row], view.first_caption(row)
    place = place_of(view, pictures, row)
    if place is None:
        return None
    share = 100 * attention[-1].sum(1) / attention[-1].sum().clamp(min=1e-9)
    slots = []
    for k in range(attention.shape[1]):
        maps = [
            place.drawn(weights[k].numpy(), f"Attention of slot {k + 1} at iteration {t} over image {name}")
            for t, weights in enumerate(attention, 1)
        ]
        text = view.scores.texts[int(found[k])]
        own = int(view.scores.caption_image[int(found[k])]) == row
        slots.append(Slot(maps, text, own, float(share[k])))
    return Attended(name, caption, place.picture.svg(described(name, caption)), slots)
