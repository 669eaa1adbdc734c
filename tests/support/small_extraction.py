"""An extraction that takes a moment, and every byte that it wrote."""

from pathlib import Path

from xret.pipeline.extraction.options import build_options

SMALL = build_options(visual="resnet18", visual_weights="random:0", image_size=64, text="words", batch_size=4)


def files(url) -> dict[str, bytes]:
    """Return the content of every file below a store."""
    return {str(p.relative_to(url)): p.read_bytes() for p in sorted(Path(url).rglob("*")) if p.is_file()}
