"""Where the local features of an image lie in its picture, and how attention over them is drawn there."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from math import isqrt

import numpy as np

from ..pictures import Picture, Pictures, box_outline, input_of, shade
from ..views import View

CELLS = 36  # of a side of the map that regions are drawn on
OUTLINED = 2  # cells or regions with the largest weights


@dataclass(frozen=True)
class Place:
    """An image whose local features can be drawn.

    Attributes:
        picture: the image, a grid's as its network saw it.
        over: takes the weights of its rows, ``[N]``, to SVG over the picture.
    """

    picture: Picture
    over: Callable[[np.ndarray], str]

    def drawn(self, weights: np.ndarray, alt: str) -> str:
        """Return the picture as SVG with attention over it; `alt` says what it shows."""
        return self.picture.svg(alt, self.over(weights))


def why_no_places(view: View, pictures: Pictures, images: list[int]) -> str:
    """Return why attention over these images cannot be drawn, as a sentence; empty where it can."""
    features = view.batches.image_set
    if pictures.why_not:
        return "The pictures are not at hand."
    if features.kind == "frames":
        return "Its rows are frames of a video, not places of a picture."
    if features.kind == "roi" and "boxes" not in features.array_names():
        return "The store does not know where its regions are."
    if features.kind == "roi" and not features.array("size", view.batches.image_rows[images]).all():
        return "The store does not know how large the pictures of its regions are."
    if features.kind == "grid" and isqrt(features.rows) ** 2 != features.rows:
        return f"Its grid of {features.rows} cells is no square."
    return ""


def place_of(view: View, pictures: Pictures, image: int) -> Place | None:
    """Return where the rows of an image lie; None where its picture cannot be read."""
    picture = pictures.hold(view.scores.file_names[image], input_of(view.batches.image_set))
    if picture is None:
        return None
    if view.batches.image_set.kind == "grid":
        return Place(picture, partial(grid_overlay, picture=picture))
    return Place(picture, partial(region_overlay, _boxes(view, image), picture=picture))


def grid_overlay(weights: np.ndarray, picture: Picture) -> str:
    """Return SVG that greys a picture away from the cells of a square grid [N] that are attended to.

    The foremost cells are outlined.
    """
    side = isqrt(len(weights))
    down, across = np.divmod(np.arange(len(weights)), side)
    boxes = np.stack([across, down, across + 1, down + 1], 1) / side
    relative = weights / max(weights.max(), 1e-9)
    return shade(relative.reshape(side, side), *picture.size) + _foremost(boxes, relative, picture)


def region_overlay(boxes: np.ndarray, weights: np.ndarray, picture: Picture) -> str:
    """Return SVG that greys a picture away from the regions that are attended to, and outlines the foremost.

    Args:
        boxes: x1, y1, x2, y2 of N regions as shares of the picture's width and height, [N, 4].
        weights: of each; what comes after them is padding.
        picture: what it is drawn over.
    """
    relative = weights[: len(boxes)] / max(weights.max(), 1e-9)
    middle = (np.arange(CELLS) + 0.5) / CELLS
    across = (boxes[:, 0, None] <= middle) & (middle <= boxes[:, 2, None])
    down = (boxes[:, 1, None] <= middle) & (middle <= boxes[:, 3, None])
    inside = down[:, :, None] & across[:, None, :]
    return shade((relative[:, None, None] * inside).max(0), *picture.size) + _foremost(boxes, relative, picture)


def _foremost(boxes: np.ndarray, weights: np.ndarray, picture: Picture) -> str:
    """Return SVG that outlines the boxes with the largest weights."""
    return "".join(box_outline(box, picture) for box in boxes[np.argsort(-weights, kind="stable")[:OUTLINED]].tolist())


def _boxes(view: View, image: int) -> np.ndarray:
    """Return the regions of an image, as shares of its width and height, [N, 4]."""
    features, rows = view.batches.image_set, view.batches.image_rows[[image]]
    size = np.tile(features.array("size", rows)[0], 2)
    return features.array("boxes", rows)[0][: int(features.length[rows][0])] / size
