"""Which of a detector's boxes stand for an image."""

import torch
from torch import Tensor

from ...errors import EncoderError


def check_regions(regions: tuple[int, int], most: int) -> None:
    """Refuse numbers of boxes that a detector cannot give.

    Raises:
        EncoderError: they are not 1 <= MIN <= MAX <= `most`.
    """
    if not 1 <= regions[0] <= regions[1] <= most:
        raise EncoderError(
            f"--regions {regions[0]}-{regions[1]}: fewest and most boxes must be whole numbers in order, from 1 to"
            f" {most}; the published features have 36 or 10-100"
        )


def selection_identity(
    regions: tuple[int, int], proposals: int, confidence: float, overlap: float
) -> dict[str, str | int | float]:
    """Return what the identity of an encoder says of its boxes: `proposals`, of which `select` chooses some."""
    return {
        "boxes": "proposals",
        "proposals": proposals,
        "fewest": regions[0],
        "most": regions[1],
        "confidence": confidence,
        "overlap": overlap,
    }


def select(
    scores: Tensor, overlaps: Tensor, regions: tuple[int, int], confidence: float, overlap: float
) -> tuple[Tensor, Tensor, Tensor]:
    """Choose boxes as the published bottom-up-attention features do (Anderson et al., 2018, section 3.1).

    Non-maximum suppression runs for every class on its own. The confidence of a box is its best score among the
    classes in which it survives, zero where it survives in none. Boxes of at least the wanted confidence are kept,
    but no fewer than MIN and no more than MAX; and none beyond those there are.

    Args:
        scores: of n boxes in C classes, background excluded, [n, C].
        overlaps: intersection over union of each two boxes [n, n].
        regions: (MIN, MAX).
        confidence: from which a box is kept.
        overlap: above which the worse of two boxes is suppressed.

    Returns:
        Which boxes, most confident first and equal ones in their order; the class of each, which for a box that
        survives in none is its best; and its confidence.
    """
    left = scores * surviving(scores, overlaps > overlap)
    confidences, classes = left.max(1)
    classes = torch.where(confidences > 0, classes, scores.argmax(1))
    wanted = int((confidences >= confidence).sum())
    order = confidences.argsort(descending=True, stable=True)[: min(max(wanted, regions[0]), regions[1])]
    return order, classes[order], confidences[order]


def surviving(scores: Tensor, close: Tensor) -> Tensor:
    """Run greedy non-maximum suppression for all classes at once.

    The boxes are the same in every class, only their order differs; so the classes go in step, best box first.

    Args:
        scores: [n, C].
        close: whether two boxes cannot both stay, [n, n].

    Returns:
        Whether a box stays, [n, C].
    """
    order = scores.T.argsort(descending=True, stable=True)
    rank = order.argsort()
    alive = torch.ones_like(order, dtype=torch.bool)
    for position, boxes in enumerate(order.T):
        suppressing = alive.gather(1, boxes[:, None])
        alive &= ~(close[boxes] & suppressing & (rank > position))
    return alive.T
