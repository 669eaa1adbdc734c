"""Settings, the changes of a recipe: a dictionary in Python, ``KEY=VALUE`` on the command line. Without torch."""

import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from ...pipeline.errors import RecipeError

Settings = Mapping[str, Any]  # dotted keys with values, such as {"loss.triplet.margin": 0.1}
_NAMED = re.compile(r"(aggregator|adapter)\.\w+|similarity|schedule|optimizer")  # blocks with a name


def settings_of(texts: Iterable[str]) -> dict[str, Any]:
    """Return settings of the command line as Python has them; RecipeError where one is not ``KEY=VALUE``."""
    found = {}
    for text in texts:
        key, equals, value = text.partition("=")
        if not equals or not key.strip(". "):
            raise RecipeError(f"--set '{text}' must have the form KEY=VALUE, such as optimizer.lr=0.001")
        found[key] = value
    return normalised(found)


def normalised(settings: Settings) -> dict[str, Any]:
    """Return settings with full keys and read values: equal settings are equal however they were written.

    Blocks may be nested, as in a recipe.
    """
    found: dict[str, Any] = {}
    for key, value in settings.items():
        if isinstance(value, Mapping):
            found |= normalised({f"{key}.{inner}": one for inner, one in value.items()})
        else:
            found[full_key(key.strip())] = value_of(value)
    return found


def nested(settings: Settings | Sequence[str]) -> dict[str, Any]:
    """Return settings as the blocks of a recipe; RecipeError where a key is a value and a block."""
    found: dict[str, Any] = {}
    full = normalised(settings) if isinstance(settings, Mapping) else settings_of(settings)
    for key, value in sorted(full.items()):
        *path, last = _steps(key)
        block = found
        for step in path:
            block = block.setdefault(step, {})
            if not isinstance(block, dict):
                raise RecipeError(f"{key} cannot be set: {step} is set to a single value")
        block[last] = value
    return found


def _steps(key: str) -> list[str]:
    """Return the parts of a dotted key; a user-defined loss, ``loss.package.module:Class.weight``, is one of them."""
    head, colon, tail = key.partition(":")
    if not colon:
        return key.split(".")
    block, _, module = head.partition(".")
    kind, *parameter = tail.split(".")
    return [block, f"{module}:{kind}", *parameter]


def full_key(key: str) -> str:
    """Return the key of a setting; that of a block with a name means the name."""
    return f"{key}.name" if _NAMED.fullmatch(key) else key


def value_of(value: Any) -> Any:
    """Return a value as Python has it: text that is a number, ``true``, ``false`` or ``null`` is read."""
    if getattr(value, "shape", None) == ():  # a number of NumPy's
        return value.item()
    if not isinstance(value, str):
        return value
    text = value.strip()
    if re.fullmatch(r"[+-]?\d{1,40}", text):
        return int(text)
    if re.fullmatch(r"[+-]?(\d+\.?\d*|\.\d+)(e[+-]?\d{1,3})?", text, re.IGNORECASE):
        return float(text)
    return {"true": True, "false": False, "null": None}.get(text.lower(), text)
