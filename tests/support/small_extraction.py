"""An extraction that takes a moment, and every byte that it wrote."""

import json
from pathlib import Path

from xret.pipeline.extraction.extraction import Options

SMALL = Options(visual="resnet18", visual_weights="random:0", image_size=64, text="words", shard_images=8, batch_size=4)


def files(url) -> dict[str, bytes]:
    """Return the content of every file below a store."""
    return {str(p.relative_to(url)): p.read_bytes() for p in sorted(Path(url).rglob("*")) if p.is_file()}


def without_commands(found: dict[str, bytes]) -> dict[str, bytes]:
    """Return the files with sets that do not say which command made them, so that others can have made the same."""
    return {
        name: _without_command(content) if name.endswith("/zarr.json") and name.count("/") == 2 else content
        for name, content in found.items()
    }


def _without_command(content: bytes) -> bytes:
    group = json.loads(content)
    for key in ("command", "digest"):
        group["attributes"].pop(key, None)
    return json.dumps(group).encode()
