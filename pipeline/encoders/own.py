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
        module is also looked for in the working folder. The import path joins the identity.

        Raises:
            EncoderError: there is no such class, it cannot be made, or what it makes does not keep the contract.
        """
        if (here := str(Path.cwd())) not in sys.path:
            sys.path.insert(0, here)
        name, arguments = spec.name, (spec.weights or "imagenet", spec.image_size or IMAGE_SIZE, device)
        try:
            kind = resolve_name(name)
        except (ImportError, AttributeError, ValueError) as error:
            raise EncoderError(
                f"{unknown(name, [])}; a class of your own, MODULE:CLASS, must be installed or lie in the working"
                f" folder ({reason(error)})"
            ) from error
        try:
            encoder = kind(*arguments)
        except EncoderError:
            raise
        except Exception as error:  # it may raise anything
            call = f"{spec.model}{arguments!r}"
            raise EncoderError(f"{call} of '{name}' fails ({type(error).__name__}: {reason(error)})") from error
        _check(name, encoder)
        encoder.identity = {**encoder.identity, "encoder": name}
        if spec.views is not None and not hasattr(encoder, "prepare"):
            raise EncoderError(
                f"'{name}' needs a method `prepare` that takes a picture to pixels for --views; leave it out"
            )
        return encoder


def _check(name: str, encoder: Any) -> None:
    """Raise EncoderError unless the contract is kept, as far as can be seen."""
    if missing := [part for part in _CONTRACT if not hasattr(encoder, part)]:
        raise EncoderError(f"'{name}' lacks {', '.join(missing)}, see {_EXPLAINED}")
    problems = {
        "kind": encoder.kind not in ("grid", "roi"),
        "name": not re.fullmatch(r"[\w.-]+", str(encoder.name), flags=re.ASCII),
        "grid": encoder.kind == "grid" and (encoder.grid is None or encoder.grid[0] * encoder.grid[1] != encoder.rows),
        "identity": not {"weights", "preprocessing", "layer"} <= set(encoder.identity),
    }
    for what in (what for what, wrong in problems.items() if wrong):
        raise EncoderError(f"'{name}': its {what} is {getattr(encoder, what)!r}, which {_EXPLAINED} does not allow")
