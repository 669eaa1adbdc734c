"""Embeddings that anybody computed, judged by their cosine without a store that stays."""

import json
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from ...pipeline.data.caption_files import caption_rows
from ...pipeline.data.rows import RowReader
from ...pipeline.errors import RunError
from ...pipeline.exchange.importers.source import ImportOptions
from ...pipeline.exchange.importing import import_features
from .evaluation import Evaluation, evaluate


def evaluate_embeddings(
    images: str | Path, captions: str | Path, index: str | Path, *, split: str = "test", **how: Any
) -> Evaluation:
    """Evaluate two matrices of embeddings of one width (``xret eval --embeddings``).

    Args:
        images: a ``.npy`` with a row an image in the order in which `index` first names them, or a row a caption.
        captions: a ``.npy`` with a row a line of the index.
        index: CSV or JSON lines with ``file_name`` and ``caption``, and at most ``split``.
        split: whose lines count; all where the index names no splits.
        how: ties, protocol, hubness and device, as of `evaluate`.

    Raises:
        SourceError, ManifestError: a file is missing, or they do not fit each other.
        RunError: there is no such split.
    """
    rows = list(caption_rows(Path(index), reader := RowReader(Path(index))))
    reader.note_unread()
    named = {row.split or split for _, row in rows}
    if split not in named:
        raise RunError(f"{index} has no split '{split}', but {', '.join(sorted(named))}; choose one of these")
    with TemporaryDirectory(prefix="xret-eval-") as folder:
        for name, file in (("images.npy", images), ("captions.npy", captions)):
            Path(folder, name).symlink_to(Path(file).absolute())
        lines = [
            {"file_name": row.file_name, "caption": text, "split": row.split or split}
            for _, row in rows
            for text, _ in row.captions
        ]
        text = "".join(json.dumps(line) + "\n" for line in lines)
        Path(folder, "index.jsonl").write_text(text, encoding="utf-8")
        store = str(Path(folder, "store.zarr"))
        options = ImportOptions(
            splits=tuple(sorted(named)),
            format_="embeddings",
            source=Path(folder),
            encoder=("embeddings",),
            dtype="float32",
        )
        import_features(None, store, options)
        found = evaluate(store, split=split, **how)
    return replace(found, runs=(f"{images} and {captions}",), stores=(str(index),))
