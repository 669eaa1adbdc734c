"""Regions: which of a detector's boxes stand for an image, and what the detectors have in common."""

from abc import abstractmethod
from dataclasses import asdict, dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torchvision.ops import box_iou

from ...errors import EncoderError
from ...store.regions import Regions
from ..base import VisualEncoder, library_versions

REGIONS = 36, 36  # fewest and most boxes of an image by default


@dataclass(frozen=True)
class Selection:
    """A choice of boxes as the published bottom-up-attention features make it (Anderson et al., 2018, section 3.1)."""

    fewest: int  # boxes of an image, unless there are fewer
    most: int  # boxes of an image
    proposals: int  # from how many boxes they are chosen
    confidence: float  # from which a box is kept
    overlap: float  # intersection over union above which the worse of two boxes is suppressed

    def __post_init__(self) -> None:
        if not 1 <= self.fewest <= self.most <= self.proposals:
            raise EncoderError(
                f"--regions {self.fewest}-{self.most}: give the fewest and the most boxes in order, from 1 to"
                f" {self.proposals}; the published features have 36 or 10-100"
            )

    def select(self, scores: Tensor, overlaps: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Choose among n boxes by their scores [n,C], background excluded, and intersections over union [n,n].

        Non-maximum suppression runs for every class on its own. The confidence of a box is its best score among the
        classes in which it survives, zero where it survives in none. Return which boxes, most confident first and equal
        ones in their order; the class of each, which for a box that survives in none is its best; and its confidence.
        """
        left = scores * surviving(scores, overlaps > self.overlap)
        confidences, classes = left.max(1)
        classes = torch.where(confidences > 0, classes, scores.argmax(1))
        wanted = int((confidences >= self.confidence).sum())
        count = min(max(wanted, self.fewest), self.most)
        order = confidences.argsort(descending=True, stable=True)[:count]
        return order, classes[order], confidences[order]


def surviving(scores: Tensor, close: Tensor) -> Tensor:
    """Return whether a box stays [n,C] in greedy non-maximum suppression, which runs for all classes at once.

    The boxes are the same in every class, only the order of their scores [n,C] differs; so the classes go in step, best
    box first. Of two boxes that are `close` [n,n] the worse goes.
    """
    order = scores.T.argsort(descending=True, stable=True)
    rank = order.argsort()
    alive = torch.ones_like(order, dtype=torch.bool)
    for position, boxes in enumerate(order.T):
        suppressing = alive.gather(1, boxes[:, None])
        alive &= ~(close[boxes] & suppressing & (rank > position))
    return alive.T


class Detected(NamedTuple):
    """The proposals of a picture."""

    outlines: Tensor  # [n,4], x1, y1, x2, y2 in any pixels; x2 and y2 lie outside
    features: Tensor  # pooled from them [n,C]
    scores: Tensor  # [n,classes], background excluded
    boxes: Tensor  # [n,4], as they are stored
    size: tuple[int, int]  # width and height of the picture


class RegionEncoder(VisualEncoder):
    """Encode images as regions: a region is a proposal, the box from which its feature was pooled."""

    takes = frozenset({"weights", "regions"})
    kind = "roi"
    extras = ("boxes", "classes", "scores")
    first_class = 0  # the number of the first class that is not background

    def __init__(self, selection: Selection, weights: str, preprocessing: dict[str, Any], layer: str) -> None:
        self._selection = selection
        self.rows = selection.most
        self.identity: dict[str, Any] = {
            "encoder": self.name,
            "weights": weights,
            "preprocessing": preprocessing,
            "layer": layer,
            "regions": {"boxes": "proposals", **asdict(selection)},
        }
        self.versions = library_versions("torch", "torchvision", "PIL")

    @abstractmethod
    def detect(self, picture: Any) -> Detected:
        """Return the proposals of a decoded picture."""

    @torch.inference_mode()
    def encode(self, pictures: list[Any]) -> list[Regions]:
        """Encode pictures, each by itself, so that none depends on the others; regions come most confident first."""
        return [self._select(self.detect(picture)) for picture in pictures]

    def _select(self, found: Detected) -> Regions:
        order, classes, confidences = self._selection.select(found.scores, box_iou(found.outlines, found.outlines))
        parts = (found.features[order], found.boxes[order], classes + self.first_class, confidences)
        local, places, numbers, scores = (part.cpu().numpy() for part in parts)
        return Regions(local, places, numbers, scores, found.size)
