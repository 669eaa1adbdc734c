"""The published weights of the bottom-up-attention detector, brought into one network by rules.

The layouts were published as converted from one Caffe model:

- ``airsplay``: airsplay/py-bottom-up-attention's pickles and Hugging Face's frcnn-vg-finetuned. One logit an anchor,
  background last, no box regression for it.
- ``milvlg``: MILVLG/bottom-up-attention.pytorch's ``bua-caffe-frcn-*.pth``. Two logits an anchor (first twelve times
  background, then twelve times object), background first.
- ``vse_infty``: the backbone alone, VSE∞'s ``original_updown_backbone.pth``, in two Sequentials.

``checkpoints/LAYOUT.tsv`` lists the names and shapes of each; what it marks as optional is not in all of its files.
"""

import re
from collections.abc import Mapping
from functools import lru_cache
from pathlib import Path

import torch
from torch import Tensor

from ...errors import EncoderError
from ..weights import misfits
from .butd_network import ANCHORS, CLASSES
from .caffe_boxes import cell_anchors

DETECTORS = ("airsplay", "milvlg")
GRIDS = ("vse_infty",)
_FOLDER = Path(__file__).with_name("checkpoints")
_ANCHORS = "proposal_generator.anchor_generator.cell_anchors.0"
_RULES = [
    (re.compile(pattern), name)
    for pattern, name in (
        (r"^backbone\.stem\.conv1\.", "backbone.stem."),
        (r"^proposal_generator\.rpn_head\.", "rpn."),
        (r"^roi_heads\.res5\.", "res5."),
        (r"^roi_heads\.box_predictor\.", "predictor."),
        (r"\bcls_embed(ding)?\.", "class_embedding."),
        (r"\b(fc_attr|attr_linear1)\.", "attribute_hidden."),
        (r"\b(attr_score|attr_linear2)\.", "attribute_score."),
        (r"^base\.0\.", "backbone.stem."),
        (r"^base\.1\.", "backbone.stem.norm."),
        (r"^base\.4\.", "backbone.res2."),
        (r"^base\.5\.", "backbone.res3."),
        (r"^base\.6\.", "backbone.res4."),
        (r"^top\.0\.", "res5."),
        (r"\.bn(\d)\.", r".conv\1.norm."),
        (r"\.downsample\.0\.", ".shortcut."),
        (r"\.downsample\.1\.", ".shortcut.norm."),
    )
]


def convert(weights: Mapping[str, Tensor], layouts: tuple[str, ...], origin: str) -> dict[str, Tensor]:
    """Return published weights, read from `origin`, named and ordered as those of `DetectorNetwork` or `GridNetwork`.

    Raises:
        EncoderError: they have none of these layouts; the message lists by the file's own names what is missing,
            unknown or of another shape in the nearest.
    """
    weights = {name: value for name, value in weights.items() if not name.endswith("num_batches_tracked")}
    layout = max(layouts, key=lambda name: _likeness(weights, name))
    expected, optional = read_layout(layout)
    if faults := misfits(expected, weights, optional, most=10):
        raise EncoderError(
            f"{origin}: these weights do not fit the bottom-up-attention network in the layout of {layout}: {faults};"
            " give the published file"
        )
    state = {_rename(name): value.float() for name, value in weights.items() if name != _ANCHORS}
    if layout in DETECTORS:
        _caffe_rows(state)
        if _ANCHORS in weights:
            _order_anchors(state, weights[_ANCHORS], origin)
    return state


def published(state: Mapping[str, Tensor], layout: str) -> dict[str, Tensor]:
    """Return a network's weights, on the CPU, under the names of a layout that differs from it in nothing else."""
    return {name: state[_rename(name)].detach().cpu().contiguous() for name in read_layout(layout)[0]}


@lru_cache(8)
def read_layout(layout: str) -> tuple[dict[str, list[int]], frozenset[str]]:
    """Return the shapes of a published layout by name, and the names that may be missing."""
    rows = [line.split("\t") for line in (_FOLDER / f"{layout}.tsv").read_text().splitlines()]
    shapes = {row[0]: [int(size) for size in row[1].split(",")] for row in rows}
    return shapes, frozenset(row[0] for row in rows if row[2:] == ["optional"])


def _likeness(weights: Mapping[str, Tensor], layout: str) -> int:
    """Return how many weights have a name and shape of a layout."""
    shapes, _ = read_layout(layout)
    return sum(shapes.get(name) == list(getattr(value, "shape", ())) for name, value in weights.items())


def _rename(name: str) -> str:
    for pattern, new in _RULES:
        name = pattern.sub(new, name)
    return name


def _order_anchors(state: dict[str, Tensor], anchors: Tensor, origin: str) -> None:
    """Put the anchors' rows into Caffe's order; the file's own anchors tell theirs.

    Only their sides are compared: some conversions moved them by a pixel. The Caffe ones were trained with and stay.
    """
    own, theirs = (boxes[:, 2:] - boxes[:, :2] for boxes in (cell_anchors(), anchors.float()))
    ratios = (own[:, None] / theirs[None]).log().abs().amax(2)
    order = ratios.argmin(1)
    if sorted(order.tolist()) != list(range(ANCHORS)) or not bool((ratios.amin(1) < 0.1).all()):
        raise EncoderError(
            f"{origin}: its anchors ({_ANCHORS}) are not those of 64 to 512 pixels; give the published file"
        )
    for head in ("objectness_logits", "anchor_deltas"):
        for kind in ("weight", "bias"):
            value = state[f"rpn.{head}.{kind}"]
            state[f"rpn.{head}.{kind}"] = value.reshape(ANCHORS, -1, *value.shape[1:])[order].flatten(0, 1)


def _caffe_rows(state: dict[str, Tensor]) -> None:
    """Make one logit an anchor, and put background first, without box regression."""
    for kind in ("weight", "bias"):
        logits = state[f"rpn.objectness_logits.{kind}"]
        if len(logits) == 2 * ANCHORS:  # a softmax over two is the sigmoid of their difference
            state[f"rpn.objectness_logits.{kind}"] = logits[ANCHORS:] - logits[:ANCHORS]
    if len(state["predictor.bbox_pred.bias"]) == 4 * CLASSES:
        for name, value in state.items():
            if re.match(r"predictor\.(cls_score|class_embedding|attribute_score)\.", name):
                state[name] = torch.roll(value, 1, 0)
    else:
        for kind in ("weight", "bias"):
            state[f"predictor.bbox_pred.{kind}"] = state[f"predictor.bbox_pred.{kind}"][4:]
