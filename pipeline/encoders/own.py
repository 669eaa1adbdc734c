"""A user's own image encoder: a class, named by its import path, that keeps the contract of `base.VisualEncoder`."""

import re
import sys
from pathlib import Path
from pkgutil import resolve_name
from typing import Any

from ..errors import EncoderError
from ..wording import reason
from .base import Encoder, VisualEncoder
from .registry import unknown
from .spec import EncoderSpec

IMAGE_SIZE = 224  # side of the square input by default, pixels
_CONTRACT = sorted({"decode", "encode", *Encoder.__annotations__, *VisualEncoder.__annotations__} - {"spec"})
_EXPLAINED = "`VisualEncoder` in xret's pipeline/encoders/base.py"


class OwnEncoder:
    """Calls a user's class; what that makes takes the place of an instance."""

    takes = frozenset({"weights", "image_size", "pool", "views"})

    def __new__(cls, spec: EncoderSpec, device: str) -> Any:
        """Return an encoder of the class at an import path, ``my_module:MyEncoder``; whatever lies there is run.

        The class is called with weights (``imagenet`` by default), the side of the input in pixels and the device. The
        module is also looked for in the working folder. The import path joins the identity. EncoderError: there is no
        such class, or what it makes does not keep the contract.
        """
        if (here := str(Path.cwd())) not in sys.path:
            sys.path.insert(0, here)
        try:
            kind = resolve_name(spec.name)
        except (ImportError, AttributeError, ValueError) as error:
            raise EncoderError(
                f"{unknown(spec.name, [])}; a class of your own, MODULE:CLASS, must be installed or lie in the working"
                f" folder ({reason(error)})"
            ) from error
        encoder = kind(spec.weights or "imagenet", spec.image_size or IMAGE_SIZE, device)
        _check(spec, encoder)
        encoder.identity = {**encoder.identity, "encoder": spec.name}
        return encoder


def _check(spec: EncoderSpec, encoder: Any) -> None:
    needed = [*_CONTRACT, "prepare"] if spec.views else _CONTRACT  # it takes a picture to pixels
    if missing := [part for part in needed if not hasattr(encoder, part)]:
        raise EncoderError(f"'{spec.name}' lacks {', '.join(missing)}, see {_EXPLAINED}")
    right = {
        "kind": encoder.kind in ("grid", "roi"),
        "name": bool(re.fullmatch(r"[\w.-]+", str(encoder.name), flags=re.ASCII)),
        "grid": encoder.kind != "grid" or (encoder.grid and encoder.grid[0] * encoder.grid[1] == encoder.rows),
        "identity": {"weights", "preprocessing", "layer"} <= set(encoder.identity),
    }
    for what in (what for what, kept in right.items() if not kept):
        value = getattr(encoder, what)
        raise EncoderError(f"'{spec.name}': its {what} is {value!r}, which {_EXPLAINED} does not allow")
