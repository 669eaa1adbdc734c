"""Frozen backbones: `base` says what an encoder is, `registry` names them, the others are one file each."""

from .base import TextEncoder, TrainableEncoder, VisualEncoder, as_stored, sees_whole, turns_upright
from .registry import (
    AUGMENTATIONS,
    HUB,
    IMAGE_SIZE,
    LIBRARIES,
    OPEN_CLIP,
    REGION_ENCODERS,
    is_own,
    load_text,
    load_visual,
    make_text,
    make_visual,
)
from .threads import encoding, loading

__all__ = [
    "AUGMENTATIONS",
    "HUB",
    "IMAGE_SIZE",
    "LIBRARIES",
    "OPEN_CLIP",
    "REGION_ENCODERS",
    "TextEncoder",
    "TrainableEncoder",
    "VisualEncoder",
    "as_stored",
    "encoding",
    "is_own",
    "load_text",
    "load_visual",
    "loading",
    "make_text",
    "make_visual",
    "sees_whole",
    "turns_upright",
]
