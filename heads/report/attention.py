"""Where each slot of an image looks, iteration by iteration, with the caption nearest to what it became.

Figures 4, A2 and A3 of *Improving Cross-Modal Retrieval with Set of Diverse Embeddings* (SetDiv).
"""

from dataclasses import dataclass
from functools import partial
from math import isqrt

import numpy as np
import torch
from torch import Tensor

from ...pipeline.batches import Features
from .examples import described, drawn, nearest
from .pictures import Picture, Pictures, shade
from .views import View

IMAGES = 3
CELLS = 36  # of a side of the map that regions are drawn on
OUTLINED = 2  # regions of a slot with the largest weight


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


def attended_images(view: View, pictures: Pictures, seed: int) -> tuple[list[Attended], str]:
    """Return the slots' attention over a few random images, and where there is none, a sentence that says why."""
    chosen = drawn(np.arange(len(view.embedded.ids)), IMAGES, seed)
    attention = attention_of(view, chosen)
    if attention is None:
        return [], "Its image embeddings are made without attention over the local features."
    if pictures.why_not:
        return [], "The pictures are not at hand."
    features = view.image_set
    if features.kind == "frames":
        return [], "Its rows are frames of a video, not places of a picture."
    if features.kind == "roi" and "boxes" not in features.array_names():
        return [], "The store does not know where its regions are."
    if features.kind == "roi" and not features.array("size", view.image_rows[chosen]).all():
        return [], "The store does not know how large the pictures of its regions are."
    if features.kind == "grid" and isqrt(attention.shape[3]) ** 2 != attention.shape[3]:
        return [], f"Its grid of {attention.shape[3]} cells is no square."
    found = nearest(view.image_elements[chosen], view.caption_elements)
    shown = [_attended(view, pictures, row, attention[:, n], found[n]) for n, row in enumerate(chosen)]
    return [one for one in shown if one], "The pictures cannot be read." if not any(shown) else ""


@torch.no_grad()
def attention_of(view: View, images: list[int]) -> Tensor | None:
    """Return the attention over the rows of some images, the mean of its heads, ``[T, B, K, N]``; None without any."""
    device = next(view.model.parameters()).device
    features, rows = view.image_set, view.image_rows[images]
    read = {
        name: torch.from_numpy(reader(rows)).to(device)
        for name, reader in (("local", features.local), ("global", features.global_))
        if name in view.model.image_fields
    }
    length = torch.from_numpy(features.length[rows].astype(np.int64)).to(device)
    made = view.model.embed_images(Features(length, read.get("local"), read.get("global")))
    return None if made.attention is None else made.attention.float().mean(2).cpu()


def grid_overlay(weights: np.ndarray, picture: Picture) -> str:
    """Return SVG that darkens a picture away from the cells of a square grid [N] that are attended to."""
    side = isqrt(len(weights))
    return shade(weights.reshape(side, side) / max(weights.max(), 1e-9), *picture.size)


def region_overlay(boxes: np.ndarray, weights: np.ndarray, picture: Picture) -> str:
    """Return SVG that darkens a picture away from the regions that are attended to, and outlines the foremost.

    Args:
        boxes: x1, y1, x2, y2 of N regions as shares of the picture's width and height, [N, 4].
        weights: of each; what stands behind them is padding.
        picture: what it is drawn over.
    """
    relative = weights[: len(boxes)] / max(weights.max(), 1e-9)
    middle = (np.arange(CELLS) + 0.5) / CELLS
    across = (boxes[:, 0, None] <= middle) & (middle <= boxes[:, 2, None])
    down = (boxes[:, 1, None] <= middle) & (middle <= boxes[:, 3, None])
    inside = down[:, :, None] & across[:, None, :]
    width, height = picture.size
    outlines = [
        f'<rect x="{x1 * width:.1f}" y="{y1 * height:.1f}" width="{(x2 - x1) * width:.1f}" '
        f'height="{(y2 - y1) * height:.1f}" class="outline"/>'
        for x1, y1, x2, y2 in boxes[np.argsort(-relative, kind="stable")[:OUTLINED]].tolist()
    ]
    return shade((relative[:, None, None] * inside).max(0), width, height) + "".join(outlines)


def _attended(view: View, pictures: Pictures, row: int, attention: Tensor, found: Tensor) -> Attended | None:
    """Draw one image; `attention` is ``[T, K, N]``, `found` the caption nearest to each of K elements."""
    name, caption, features = view.embedded.ids[row], view.first_caption(row), view.image_set
    grid = features.kind == "grid"
    picture = pictures.hold(view.embedded.file_names[row], features if grid else None)
    if picture is None:
        return None
    share = 100 * attention[-1].sum(1) / attention[-1].sum().clamp(min=1e-9)
    over = (
        partial(grid_overlay, picture=picture) if grid else partial(region_overlay, _boxes(view, row), picture=picture)
    )
    slots = []
    for k in range(attention.shape[1]):
        maps = [
            picture.svg(f"Attention of slot {k + 1} at iteration {t} over image {name}", over(weights[k].numpy()))
            for t, weights in enumerate(attention, 1)
        ]
        text = view.embedded.texts[int(found[k])]
        own = int(view.embedded.caption_image[int(found[k])]) == row
        slots.append(Slot(maps, text, own, float(share[k])))
    return Attended(name, caption, picture.svg(described(name, caption)), slots)


def _boxes(view: View, row: int) -> np.ndarray:
    """Return the regions of an image, as shares of its width and height, [N, 4]."""
    features, rows = view.image_set, view.image_rows[[row]]
    size = np.tile(features.array("size", rows)[0], 2)
    return features.array("boxes", rows)[0][: int(features.length[rows][0])] / size
