"""An extraction that takes a moment, and every byte that it wrote."""

import json
from dataclasses import replace
from pathlib import Path

from xret.pipeline.extraction.options import build_options

OPTIONS = {"visual": "resnet18", "visual_weights": "random:0", "image_size": 64, "text": "words", "batch_size": 4}
SMALL = build_options(**OPTIONS)
IMAGES = replace(SMALL, text=None)


def files(url) -> dict[str, bytes]:
    """Return the content of every file below a store."""
    found = [path for path in sorted(Path(url).rglob("*")) if path.is_file() and path.name != ".lock"]
    return {str(path.relative_to(url)): path.read_bytes() for path in found}


def captions_of(manifest):
    """Return what stands in a caption file, to be changed."""
    return json.loads(manifest.captions.read_text())
