"""A user's own encoder: a class, named by its import path, that keeps the contract of its side in `base`."""

import json
import re
import sys
from inspect import isfunction
from pathlib import Path
from pkgutil import resolve_name
from typing import Any

from ..errors import EncoderError
from ..wording import reason
from .base import Encoder, TextEncoder, VisualEncoder
from .registry import unknown
from .spec import EncoderSpec

IDENTITY = ("layer", "preprocessing", "weights")  # what an encoder's identity has at least
IMAGE_SIZE = 224  # side of the square input by default, pixels


class OwnImageEncoder:
    """Calls a user's class with weights (``imagenet`` by default), the side of the input in pixels and the device."""

    takes = frozenset({"weights", "image_size", "pool", "views"})

    def __new__(cls, spec: EncoderSpec, device: str) -> Any:
        """Return what the class at an import path makes; EncoderError: see `_class_at` and `_checked`."""
        encoder = _class_at(spec.name)(spec.weights or "imagenet", spec.image_size or IMAGE_SIZE, device)
        more = ["prepare"] if spec.views else []  # it takes a picture to pixels
        return _checked(encoder, spec, VisualEncoder, more, {"kind": ("grid", "roi")})


class OwnTextEncoder:
    """Calls a user's class with weights (None by default) and the device."""

    takes = frozenset({"weights"})

    def __new__(cls, spec: EncoderSpec, device: str) -> Any:
        """Do as `OwnImageEncoder` does."""
        encoder = _class_at(spec.name)(spec.weights, device)
        return _checked(encoder, spec, TextEncoder, [], {"kind": ("tokens",), "vocabulary": (None,)})


def _class_at(name: str) -> Any:
    """Return what lies at an import path, ``my_module:MyEncoder``, also in the working folder; its module is run."""
    if (here := str(Path.cwd())) not in sys.path:
        sys.path.insert(0, here)
    try:
        return resolve_name(name)
    except (ImportError, AttributeError, ValueError) as error:
        raise EncoderError(
            f"{unknown(name, [])}; a class of your own, MODULE:CLASS, must be installed or lie in the working folder"
            f" ({reason(error)})"
        ) from error


def _checked(
    encoder: Any, spec: EncoderSpec, contract: type, more: list[str], values: dict[str, tuple[Any, ...]]
) -> Any:
    """Return an encoder with its import path in its identity; EncoderError where it does not keep the contract."""
    explained = f"`{contract.__name__}` in xret's pipeline/encoders/base.py"
    methods = [name for name, value in vars(contract).items() if isfunction(value) and not name.startswith("_")]
    needed = {*methods, *more, *Encoder.__annotations__, *contract.__annotations__} - {"spec"}
    missing = sorted(part for part in needed if not hasattr(encoder, part))
    missing += [f"identity['{key}']" for key in IDENTITY if key not in getattr(encoder, "identity", IDENTITY)]
    if missing:
        raise EncoderError(f"'{spec.name}' lacks {', '.join(missing)}, see {explained}")
    grid = getattr(encoder, "grid", None)
    right = {name: getattr(encoder, name) in allowed for name, allowed in values.items()} | {
        "name": bool(re.fullmatch(r"[\w.-]+", str(encoder.name), flags=re.ASCII)),
        "grid": encoder.kind != "grid" or (grid and grid[0] * grid[1] == encoder.rows),
    }
    for what in (what for what, kept in right.items() if not kept):
        raise EncoderError(f"'{spec.name}': its {what} is {getattr(encoder, what)!r}, which {explained} does not allow")
    encoder.identity = json.loads(json.dumps({**encoder.identity, "encoder": spec.name}))  # tuples are lists in a store
    return encoder
