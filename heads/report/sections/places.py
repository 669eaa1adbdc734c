"""Where the local features of an image lie in its picture, and how attention over them is drawn there."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from ....pipeline.reading.joined_sets import JoinedSets
from ..pictures import Picture, Pictures, box_outline, heat, input_of
from ..views import View

CELLS = 36  # of a side of the map that regions are drawn on
OUTLINED = 2  # cells or regions with the largest weights


@dataclass(frozen=True)
class Place:
    """An image whose local features can be drawn.

    Attributes:
        picture: the image, a grid's as its network saw it.
        boxes: x1, y1, x2, y2 of its N rows as shares of the picture's width and height, [N, 4].
        cells: height and width of the map that attention is drawn on.
    """

    picture: Picture
    boxes: np.ndarray
    cells: tuple[int, int]

    def drawn(self, weights: np.ndarray, alt: str) -> str:
        """Return the picture as SVG with attention over it.

        It is coloured where much is attended to, and the foremost boxes are outlined.

        Args:
            weights: of each row; what comes after them is padding.
            alt: what it shows.
        """
        relative = weights[: len(self.boxes)] / max(weights.max(), 1e-9)
        y, x = ((np.arange(count) + 0.5) / count for count in self.cells)
        across = (self.boxes[:, 0, None] <= x) & (x <= self.boxes[:, 2, None])
        down = (self.boxes[:, 1, None] <= y) & (y <= self.boxes[:, 3, None])
        lit = relative[:, None, None] * (down[:, :, None] & across[:, None, :])
        foremost = self.boxes[np.argsort(-relative, kind="stable")[:OUTLINED]].tolist()
        outlines = "".join(box_outline(box, self.picture) for box in foremost)
        return self.picture.svg(alt, heat(lit.max(0), *self.picture.size) + outlines)


def why_no_places(view: View, pictures: Pictures, images: list[int]) -> str:
    """Return why attention over these images cannot be drawn, as a sentence; empty where it can."""
    features = view.batches.image_set
    if pictures.why_not:
        return "The pictures are not at hand."
    if isinstance(features, JoinedSets):
        return "Its rows are those of several feature sets, which do not share one division of the picture."
    if features.kind == "frames":
        return "Its rows are frames of a video, not places of a picture."
    if features.kind == "roi" and "boxes" not in features.array_names():
        return "The store does not know where its regions are."
    if features.kind == "roi" and not features.array("size", view.batches.image_rows[images]).all():
        return "The store does not know how large the pictures of its regions are."
    if features.kind == "grid" and features.grid is None:
        return f"The store does not know how its grid of {features.rows} cells lies."
    return ""


def place_of(view: View, pictures: Pictures, image: int) -> Place | None:
    """Return where the rows of an image lie; None where its picture cannot be read."""
    features, row = view.batches.image_set, view.batches.image_rows[[image]]
    assert not isinstance(features, JoinedSets), "why_no_places says so"
    name = view.scores.file_names[image]
    picture = pictures.hold(name, input_of(features))
    if picture is None:
        return None
    if features.grid is not None:
        if features.cells is None:
            return Place(picture, grid_boxes(*features.grid), features.grid)
        return Place(picture, grid_boxes(*features.cells, features.identity["pool"]), features.cells)
    boxes, size = features.array("boxes", row)[0], features.array("size", row)[0]
    if (picture.size[0] - picture.size[1]) * (int(size[0]) - int(size[1])) < 0:  # imports do not say how they turned it
        picture = pictures.seen(not pictures.upright).hold(name) or picture
    return Place(picture, boxes[: int(features.length[row][0])] / np.tile(size, 2), (CELLS, CELLS))


def grid_boxes(height: int, width: int, pool: Sequence[int] = (1, 1)) -> np.ndarray:
    """Return the boxes of windows of `pool` cells in a grid, row by row, [N, 4]; at the edges they are cut off."""
    down, across = (range(0, side, step) for side, step in zip((height, width), pool, strict=True))
    first = np.array([[x, y] for y in down for x in across])
    last = np.minimum(first + np.array(pool[::-1]), [width, height])
    return np.concatenate([first, last], axis=1) / [width, height, width, height]
