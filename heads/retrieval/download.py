"""Runs by their names on the Hugging Face hub."""

import json
import re
from pathlib import Path
from typing import Any

from huggingface_hub import snapshot_download
from huggingface_hub.errors import HfHubHTTPError, HFValidationError

from ...pipeline.errors import RunError
from ...pipeline.wording import reason
from ..recipes.own import brings_code, file_of
from ..recipes.recipe import own_names

# The bases of the first are OSError and all errors of the hub's HTTP client, whose name depends on its version.
HUB_ERRORS: Any = (*HfHubHTTPError.__bases__, HFValidationError)
_HUB_ID = re.compile(r"(\w[\w.-]*/\w[\w.-]*)(?:@(\w[\w./-]*))?")  # with a branch, tag or commit if need be
_BACKBONES = [f"{branch}_backbone{suffix}" for branch in ("image", "text") for suffix in ("", ".safetensors")]
COPIED = ("model.safetensors", *_BACKBONES)


def local_folder(name: str | Path, trust: bool = False) -> Path:
    """Return the folder of a run: `name` itself, or, where there is none and it is a hub id, what the hub has of it.

    RunError where the hub has no such model, or is not reached and it is not in the cache; or where it brings code, the
    parts of somebody's own, and that is not to be trusted.
    """
    found = _HUB_ID.fullmatch(str(name))
    if Path(name).exists() or not found:
        return Path(name)
    repo, revision = found.groups()
    try:
        patterns = ["recipe.yaml", "run.json", *COPIED, "*_backbone/*", "*.py"]
        folder = Path(snapshot_download(repo, revision=revision, allow_patterns=patterns))
    except HUB_ERRORS as error:
        raise RunError(
            f"there is no run {name} here, and as a model of the Hugging Face hub it cannot be loaded"
            f" ({reason(error)}); check the name and the connection"
        ) from error
    if not trust and (parts := _own_parts(folder / "run.json")):
        raise RunError(brings_code(str(name), [str(folder / file_of(part.partition(":")[0])) for part in parts]))
    return folder


def _own_parts(file: Path) -> list[str]:
    """Return which parts of its own a run names; none where it cannot be read, which opening it says."""
    try:
        return own_names(json.loads(file.read_text(encoding="utf-8"))["recipe"])
    except (OSError, ValueError, TypeError, KeyError):
        return []
