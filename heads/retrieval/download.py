"""Runs by their names on the Hugging Face hub."""

import re
from pathlib import Path

from ...pipeline.errors import RunError
from ...pipeline.wording import reason

_HUB_ID = re.compile(r"(\w[\w.-]*/\w[\w.-]*)(?:@(\w[\w./-]*))?")  # with a branch, tag or commit if need be
_BACKBONES = [f"{branch}_backbone{suffix}" for branch in ("image", "text") for suffix in ("", ".safetensors")]
COPIED = ("model.safetensors", *_BACKBONES)


def hub_errors() -> tuple[type[Exception], ...]:
    """Return what the hub raises: OSError and all errors of the HTTP client, whose name depends on its version."""
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError

    return (*HfHubHTTPError.__bases__, HFValidationError)


def local_folder(name: str | Path) -> Path:
    """Return the folder of a run: `name` itself, or, where there is none and it is a hub id, what the hub has of it.

    RunError where the hub has no such model, or is not reached and it is not in the cache.
    """
    hub_id = _HUB_ID.fullmatch(str(name))
    if Path(name).exists() or not hub_id:
        return Path(name)
    from huggingface_hub import snapshot_download

    repo, revision = hub_id.groups()
    try:
        patterns = ["recipe.yaml", "run.json", *COPIED, "*_backbone/*", "*.py"]
        folder = Path(snapshot_download(repo, revision=revision, allow_patterns=patterns))
    except hub_errors() as error:
        raise RunError(
            f"there is no run {name} here, and as a model of the Hugging Face hub it cannot be loaded"
            f" ({reason(error)}); check the name and the connection"
        ) from error
    return folder
