"""A user's own image encoder: a class, named by its import path, that keeps the contract of `base.VisualEncoder`."""

import re
import sys
from pathlib import Path
from pkgutil import resolve_name
from typing import Any

from ..errors import EncoderError
from ..wording import reason
from .base import Encoder, VisualEncoder

_KINDS = ("grid", "roi")
_ASKED = ("decode", "encode", *Encoder.__annotations__, *VisualEncoder.__annotations__)


def make_own(name: str, weights: str, image_size: int, device: str) -> Any:
    """Return an encoder of the class at an import path, ``my_module:MyEncoder``; whatever lies there is run.

    The class is called with `weights`, `image_size` and `device` as `registry.load_visual` has them. The module is
    looked for in the working folder, too. The import path joins the identity, so that the encoder is found again.

    Raises:
        EncoderError: there is no such class, it cannot be made, or what it makes does not keep the contract.
    """
    if (here := str(Path.cwd())) not in sys.path:
        sys.path.insert(0, here)
    try:
        kind = resolve_name(name)
    except (ImportError, AttributeError, ValueError) as error:
        raise EncoderError(
            f"'{name}' cannot be imported ({reason(error)}); give MODULE:CLASS, of a module that is installed or lies"
            " in the working folder"
        ) from error
    try:
        encoder = kind(weights, image_size, device)
    except EncoderError:
        raise
    except Exception as error:  # it may raise anything
        raise EncoderError(
            f"'{name}' cannot be made ({type(error).__name__}: {reason(error)}); it is called as {name.split(':')[-1]}"
            f"({weights!r}, {image_size}, {device!r})"
        ) from error
    _require(name, encoder)
    encoder.identity = {**encoder.identity, "encoder": name}
    return encoder


def _require(name: str, encoder: Any) -> None:
    """Refuse what does not keep the contract as far as that can be told."""
    missing = [asked for asked in _ASKED if not hasattr(encoder, asked)]
    if missing:
        raise EncoderError(
            f"'{name}' lacks {', '.join(missing)}, which `VisualEncoder` in xret's pipeline/encoders/base.py explains"
        )
    problems = {
        "kind": encoder.kind not in _KINDS,
        "name": not re.fullmatch(r"[\w.-]+", str(encoder.name), flags=re.ASCII),
        "grid": encoder.kind == "grid" and (encoder.grid is None or encoder.grid[0] * encoder.grid[1] != encoder.rows),
        "identity": not {"weights", "preprocessing", "layer"} <= set(encoder.identity),
    }
    for what, wrong in problems.items():
        if wrong:
            raise EncoderError(
                f"'{name}': its {what} is {getattr(encoder, what)!r}, which `VisualEncoder` in xret's"
                " pipeline/encoders/base.py does not allow"
            )
