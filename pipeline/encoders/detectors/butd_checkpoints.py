"""The published weights of the bottom-up-attention detector, brought into one network by rules.

The layouts were published as converted from one Caffe model:

- airsplay/py-bottom-up-attention's pickles and Hugging Face's frcnn-vg-finetuned: one logit an anchor, background
  last, no box regression for it.
- MILVLG/bottom-up-attention.pytorch's ``bua-caffe-frcn-*.pth``: two logits an anchor (first twelve times background,
  then twelve times object), background first.
- The backbone alone, VSE∞'s ``original_updown_backbone.pth``, in two Sequentials.
"""

import re
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from ...errors import EncoderError
from ..spec import EncoderSpec
from ..weights import require_fit
from .butd_network import ANCHORS, CLASSES
from .caffe_boxes import cell_anchors

# What of the weights decides neither the regions nor their features; a file need not have the latter two.
IDLE = ("predictor.bbox_pred.", "predictor.attribute_", "predictor.class_embedding.")
_ANCHORS = "proposal_generator.anchor_generator.cell_anchors.0"
_RULES = {
    r"^backbone\.stem\.conv1\.": "backbone.stem.",
    r"^proposal_generator\.rpn_head\.": "rpn.",
    r"^roi_heads\.res5\.": "res5.",
    r"^roi_heads\.box_predictor\.": "predictor.",
    r"\bcls_embed(ding)?\.": "class_embedding.",
    r"\b(fc_attr|attr_linear1)\.": "attribute_hidden.",
    r"\b(attr_score|attr_linear2)\.": "attribute_score.",
    r"^base\.0\.": "backbone.stem.",
    r"^base\.1\.": "backbone.stem.norm.",
    r"^base\.4\.": "backbone.res2.",
    r"^base\.5\.": "backbone.res3.",
    r"^base\.6\.": "backbone.res4.",
    r"^top\.0\.": "res5.",
    r"\.bn(\d)\.": r".conv\1.norm.",
    r"\.downsample\.0\.": ".shortcut.",
    r"\.downsample\.1\.": ".shortcut.norm.",
}


def convert(weights: Mapping[str, Any], own: Mapping[str, Tensor], spec: EncoderSpec) -> dict[str, Tensor]:
    """Return published weights named and ordered as `own`, the state dict of `DetectorNetwork` or `GridNetwork`.

    EncoderError: they have none of the layouts; the message lists what is missing, unknown or of another shape.
    """
    state = {rename(name): value for name, value in weights.items() if not name.endswith("num_batches_tracked")}
    anchors = state.pop(_ANCHORS, None)
    _caffe_rows(state)
    require_fit(own, state, spec, {name for name in own if name.startswith(IDLE[1:])})
    if anchors is not None:
        _order_anchors(state, anchors, spec)
    return {name: value.float() for name, value in state.items()}


def rename(name: str) -> str:
    """Return a published name as the networks here have it."""
    for pattern, new in _RULES.items():
        name = re.sub(pattern, new, name)
    return name


def _order_anchors(state: dict[str, Tensor], anchors: Tensor, spec: EncoderSpec) -> None:
    """Put the anchors' rows into Caffe's order; the file's own anchors tell theirs.

    Only their sides are compared: some conversions moved them by a pixel. The Caffe ones were trained with and stay.
    """
    own, theirs = (boxes[:, 2:] - boxes[:, :2] for boxes in (cell_anchors(), anchors.float()))
    ratios = (own[:, None] / theirs[None]).log().abs().amax(2)
    order = ratios.argmin(1)
    if sorted(order.tolist()) != list(range(ANCHORS)) or not bool((ratios.amin(1) < 0.1).all()):
        raise EncoderError(f"{spec.weights}: its anchors ({_ANCHORS}) are not those of the published files")
    for head in ("objectness_logits", "anchor_deltas"):
        for kind in ("weight", "bias"):
            value = state[f"rpn.{head}.{kind}"]
            state[f"rpn.{head}.{kind}"] = value.reshape(ANCHORS, -1, *value.shape[1:])[order].flatten(0, 1)


def _caffe_rows(state: dict[str, Any]) -> None:
    """Make one logit an anchor, and put background first, without box regression."""
    for kind in ("weight", "bias"):
        logits = state.get(f"rpn.objectness_logits.{kind}", ())
        if len(logits) == 2 * ANCHORS:  # a softmax over two is the sigmoid of their difference
            state[f"rpn.objectness_logits.{kind}"] = logits[ANCHORS:] - logits[:ANCHORS]
    rows = len(state.get("predictor.bbox_pred.bias", ()))
    if rows == 4 * CLASSES:
        for name, value in state.items():
            if re.match(r"predictor\.(cls_score|class_embedding|attribute_score)\.", name):
                state[name] = torch.roll(value, 1, 0)
    elif rows == 4 * (CLASSES + 1):
        for kind in ("weight", "bias"):
            state[f"predictor.bbox_pred.{kind}"] = state[f"predictor.bbox_pred.{kind}"][4:]
