"""The folder that the inference of clip-retrieval writes.

``img_emb/img_emb_N.npy`` and ``text_emb/text_emb_N.npy``, a row a pair, and ``metadata/metadata_N.parquet`` with the
columns ``image_path`` and ``caption``, N from 0, with leading zeros; or all files in one folder. ``image_path`` is a
file as it was found, or the key in a tar.
"""

import re
from collections.abc import Iterator
from pathlib import Path

from ...versions import require_pyarrow
from .embeddings import Embeddings, Line, Matrix, within_folder
from .source import SourceError

_KINDS = {"img_emb": ".npy", "text_emb": ".npy", "metadata": ".parquet"}
_COLUMNS = ("image_path", "caption")


def open_clip_retrieval(folder: Path) -> Embeddings:
    """Look through clip-retrieval's folder.

    Raises:
        SourceError: files are missing or not of their form, or do not fit each other; or pyarrow is not installed.
    """
    parts = {kind: _parts(folder, kind) for kind in _KINDS}
    numbers = sorted(set().union(*parts.values()))
    if not numbers:
        raise SourceError(f"{folder} holds no img_emb_*.npy of clip-retrieval's inference; check --source")
    for kind, files in parts.items():
        if missing := [number for number in numbers if number not in files]:
            there = next(own[missing[0]] for own in parts.values() if missing[0] in own)
            raise SourceError(
                f"{folder} has {there.name} and no part {missing[0]} of {kind}; complete the folder"
                if files
                else f"{folder} has {there.name} and no {kind}_*{_KINDS[kind]}; run clip-retrieval's inference with"
                " images and texts"
            )
    images, captions = (Matrix.of([parts[kind][number] for number in numbers]) for kind in ("img_emb", "text_emb"))
    index = [parts["metadata"][number] for number in numbers]
    lines: list[Line] = []
    for image, caption, path in zip(images.parts, captions.parts, index, strict=True):
        before = len(lines)
        lines += _lines(path)
        if not image.rows == caption.rows == len(lines) - before:
            raise SourceError(
                f"{image.path} has {image.rows:,} rows, {caption.path.name} {caption.rows:,} and {path.name}"
                f" {len(lines) - before:,}; they do not belong together, get the part anew"
            )
    return Embeddings.of(images, captions, within_folder(lines, folder), index)


def _parts(folder: Path, kind: str) -> dict[int, Path]:
    """Return the files of a kind by their number."""
    found: dict[int, Path] = {}
    for place in (folder / kind, folder):
        for path in sorted(place.glob(f"{kind}_*{_KINDS[kind]}")):
            match = re.fullmatch(rf"{kind}_(\d+)", path.stem)
            if match is None:
                continue
            number = int(match[1])
            if number in found:
                raise SourceError(f"{found[number]} and {path} are both part {number}; remove one")
            found[number] = path
    return found


def _lines(path: Path) -> Iterator[Line]:
    """Yield image and caption of each row of a metadata file."""
    pa = require_pyarrow(SourceError, "clip-retrieval's metadata needs")
    try:
        with pa.parquet.ParquetFile(path) as file:
            schema = file.schema_arrow
            for column in _COLUMNS:
                if column not in schema.names:
                    raise SourceError(
                        f"{path} has no column '{column}', but {', '.join(schema.names)}; run clip-retrieval's"
                        " inference with images and texts"
                    )
                if not any(test(schema.field(column).type) for test in (pa.types.is_string, pa.types.is_large_string)):
                    raise SourceError(f"{path}: column '{column}' is {schema.field(column).type}, not text")
            for batch in file.iter_batches(columns=list(_COLUMNS)):
                names, texts = (batch.column(column).to_pylist() for column in _COLUMNS)
                for name, text in zip(names, texts, strict=True):
                    if not name or text is None:
                        missing = "caption" if name else "image_path"
                        raise SourceError(f"{path}: a row has no {missing} ('{name or text}'); repair or remove it")
                    yield name, text, None
    except (OSError, pa.ArrowException) as error:
        raise SourceError(f"{path} is no Parquet file, is damaged or was cut off; get it anew") from error
