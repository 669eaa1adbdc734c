"""Frozen backbones: `spec` describes an encoder, `registry` loads it, `base` is its contract; the others make one each.

An encoder belongs to whoever loads it; nothing is kept for the next caller.
"""

from .base import TextEncoder, TrainableEncoder, VisualEncoder, encode_layers, turns_upright
from .registry import is_own, load_text, load_text_layers, load_visual, load_visual_layers
from .spec import HUB, EncoderSpec
from .threads import encoding, loading

__all__ = [
    "HUB",
    "EncoderSpec",
    "TextEncoder",
    "TrainableEncoder",
    "VisualEncoder",
    "encode_layers",
    "encoding",
    "is_own",
    "load_text",
    "load_text_layers",
    "load_visual",
    "load_visual_layers",
    "loading",
    "turns_upright",
]
