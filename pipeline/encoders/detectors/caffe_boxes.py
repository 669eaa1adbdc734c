"""Boxes as the Caffe detectors count them: x1, y1, x2, y2 are pixels inside the box, so that a width is x2 - x1 + 1."""

import math

import torch
from torch import Tensor
from torchvision.ops import clip_boxes_to_image, nms

STRIDE = 16  # pixels of the image a cell of the feature map
_BASE = 16  # side of the anchor that ratios and scales are applied to
_RATIOS = (0.5, 1.0, 2.0)  # height over width
_SCALES = (4, 8, 16, 32)
_LARGEST = math.log(1000 / 16)  # of a side's logarithmic factor; larger ones fill any image


def cell_anchors() -> Tensor:
    """Return the anchors of the first cell [12,4]: ratio by ratio, and in each scale by scale.

    Each side is rounded before it is scaled, and the centre is 7.5, half a pixel off the middle of the cell: the
    published weights were trained with that (Ren et al., Faster R-CNN, 2015, section 3.1.1, and its Caffe code).
    """
    middle = (_BASE - 1) / 2
    boxes = []
    for ratio in _RATIOS:
        width = round(math.sqrt(_BASE**2 / ratio))
        height = round(width * ratio)
        for scale in _SCALES:
            x, y = (width * scale - 1) / 2, (height * scale - 1) / 2
            boxes.append([middle - x, middle - y, middle + x, middle + y])
    return torch.tensor(boxes)


def grid_anchors(height: int, width: int, device: torch.device) -> Tensor:
    """Return the anchors of a feature map, row by row and cell by cell, [H·W·12,4]."""
    y, x = torch.meshgrid(torch.arange(height), torch.arange(width), indexing="ij")
    shifts = torch.stack([x, y, x, y], -1).reshape(-1, 1, 4) * STRIDE
    return (cell_anchors() + shifts).reshape(-1, 4).to(device)


def decode(boxes: Tensor, deltas: Tensor) -> Tensor:
    """Move and stretch boxes [n,4] as a regression says (Girshick et al., R-CNN, 2014, equations 1 to 4).

    The deltas [n,4] are shifts of the centre in widths and heights, and logarithms of the factors of the sides. As in
    the Caffe code, x2 and y2 of the boxes returned [n,4] are one pixel beyond what the widths say.
    """
    sides = boxes[:, 2:] - boxes[:, :2] + 1
    centres = boxes[:, :2] + sides / 2 + deltas[:, :2] * sides
    sides = sides * deltas[:, 2:].clamp(max=_LARGEST).exp()
    return torch.cat([centres - sides / 2, centres + sides / 2], 1)


def clip(boxes: Tensor, height: int, width: int) -> Tensor:
    """Cut boxes [n,4] off at the border of an image."""
    return clip_boxes_to_image(boxes, (height - 1, width - 1))


def corners(boxes: Tensor) -> Tensor:
    """Return boxes [n,4] with x2 and y2 one pixel more: their outlines, as torchvision counts."""
    return boxes + boxes.new_tensor([0, 0, 1, 1])


def propose(
    boxes: Tensor, objectness: Tensor, smallest: float, before: int = 6000, after: int = 300, overlap: float = 0.7
) -> Tensor:
    """Return which of the clipped boxes [n,4] are proposals, best first, at most `after` of them.

    The best `before` by objectness [n] are compared; of two boxes whose intersection over union exceeds `overlap` the
    worse is dropped. The shortest side is `smallest`, unless no box is that large, in an image of a few pixels.
    """
    sides = boxes[:, 2:] - boxes[:, :2] + 1
    large = (sides >= smallest).all(1)
    large |= ~large.any()
    best = objectness.masked_fill(~large, -torch.inf).argsort(descending=True, stable=True)
    best = best[: min(before, int(large.sum()))]
    return best[nms(corners(boxes[best]), objectness[best], overlap)[:after]]
