"""Embeddings that anybody computed, judged by their cosine without a store that stays."""

import json
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from ...pipeline.data.caption_files import caption_rows
from ...pipeline.data.rows import SPLIT_NAMES, RowReader
from ...pipeline.errors import ManifestError, RunError
from ...pipeline.exchange.importers.source import ImportOptions, SourceError, map_floats
from ...pipeline.exchange.importing import import_features
from .evaluation import evaluate
from .result import Evaluation

_INDEX = (".csv", ".tsv", ".jsonl")


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
        RunError: the index has another suffix or no such split, or the embeddings are of two widths.
    """
    files = {"images.npy": Path(images).absolute(), "captions.npy": Path(captions).absolute()}
    widths = [map_floats(file, 2).shape[1] for file in files.values()]
    if len({*widths}) > 1:
        raise RunError(f"{images} is {widths[0]} wide and {captions} {widths[1]}; give embeddings of one model")
    split = SPLIT_NAMES.get(split, split)
    if Path(index).suffix not in _INDEX:
        raise RunError(f"{index} is no index; give a file that ends in {' or '.join(_INDEX)}")
    lines = _read_lines(Path(index), split)
    named = {line["split"] for line in lines}
    if split not in named:
        raise RunError(f"{index} has no split '{split}', but {', '.join(sorted(named))}; choose one of these")
    with TemporaryDirectory(prefix="xret-eval-") as folder:
        for name, file in files.items():
            Path(folder, name).symlink_to(file)
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
        try:
            import_features(None, store, options)
        except SourceError as error:  # its files are these by other names
            text = str(error).replace(str(Path(folder, "index.jsonl")), str(index))
            for name, file in files.items():
                text = text.replace(str(Path(folder, name)), str(file))
            raise SourceError(text) from error
        evaluation = evaluate(store, split=split, **how)
    return replace(evaluation, runs=(f"{images} and {captions}",), stores=(str(index),))


def _read_lines(index: Path, split: str) -> list[dict[str, str]]:
    """Return a line a caption, in `split` where the index names none."""
    reader, lines = RowReader(index), list[dict[str, str]]()
    rows = [row for _, row in caption_rows(index, reader) if row is not None]
    reader.note_unread()
    unsplit = [row.file_name for row in rows if row.split is None]
    if 0 < len(unsplit) < len(rows):
        raise ManifestError(
            f"{index}: some lines have a split and some, such as that of '{unsplit[0]}', have none; give it to all or"
            " none"
        )
    for row in rows:
        facts = {"file_name": row.file_name, "split": SPLIT_NAMES.get(row.split or split, "other")}
        lines += [facts | {"caption": text} for text, _ in row.captions]
    return lines
