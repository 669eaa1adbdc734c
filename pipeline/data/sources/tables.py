"""Tables with a picture in each row: Parquet files, and the Arrow files of a data set that `datasets` saved."""

import json
import threading
from bisect import bisect_right
from collections.abc import Iterator, Mapping
from itertools import accumulate
from pathlib import Path
from typing import Any

import numpy as np

from ...documents import reading
from ...errors import ManifestError, SampleError, require_pyarrow
from ..image_columns import Images, ImageSample
from ..images import PictureFile
from ..rows import RowReader, file_name
from ..texts import Texts, distinct
from .files import file_system
from .source import PackedReader, Place, Source

IMAGE = "image"  # the column of the pictures by default
_ROWS = 4096  # of captions that are read together
_PICTURES = 16  # that are read together
_BUFFER = 1 << 20  # bytes of a column that are read together
_OPEN = 32  # files at a time


class TableReader(PackedReader):
    """Pictures in rows of tables; a place is the number of a row, and 0."""

    def __init__(self, source: Source, folder: str | Path, places: Mapping[str, Place]) -> None:
        super().__init__(source, folder, places)
        self._tables: dict[str, _Parquet | _Arrow] = {}
        self._lock = threading.Lock()

    def _read(self, url: str, name: str, first: int, second: int) -> PictureFile:
        with self._lock:
            if url not in self._tables:
                if len(self._tables) >= _OPEN:
                    self._tables.pop(next(iter(self._tables)))
                self._tables[url] = _open(self.source.kind, url)
            data = self._tables[url].picture(self.source.column, first)
        where = f"{url}: row {first:,}"
        if data is None:
            raise SampleError(where, "it holds no bytes, perhaps a path alone; put the picture into the file")
        return PictureFile(data, where)


class _Parquet:
    def __init__(self, url: str) -> None:
        pyarrow = require_pyarrow(ManifestError, "Parquet needs")
        fs, path = file_system(url)
        self.table = pyarrow.parquet.ParquetFile(path, filesystem=fs, buffer_size=_BUFFER)
        self.schema = self.table.schema_arrow
        groups = range(self.table.num_row_groups)
        self._begins = [0, *accumulate(self.table.metadata.row_group(one).num_rows for one in groups)]
        self._parts: Iterator[Any] = iter(())  # the pictures of a row group, some at a time
        self._read: list[Any] = []  # the two that were read last
        self._group, self._first, self._last = -1, 0, 0  # the rows in them

    def batches(self, columns: list[str]) -> Iterator[Any]:
        return self.table.iter_batches(_ROWS, columns=columns, use_threads=False)  # type: ignore[no-any-return]

    def picture(self, column: str, row: int) -> bytes | None:
        """Return the picture in a row; cheap in order, and for threads that go nearly in order."""
        group = bisect_right(self._begins, row) - 1
        if group != self._group or row < self._first:
            columns = [f"{column}.bytes" if _is_struct(self.schema, column) else column]
            self._parts = self.table.iter_batches(_PICTURES, [group], columns, use_threads=False)
            self._group, self._first, self._last, self._read = group, self._begins[group], self._begins[group], []
        while row >= self._last:
            self._read = [*self._read[-1:], next(self._parts).column(0)]
            self._last += len(self._read[-1])
            self._first = self._last - sum(map(len, self._read))
        before, at = len(self._read[0]), row - self._first
        return _bytes(self._read[0][at] if at < before else self._read[1][at - before])


class _Arrow:
    def __init__(self, url: str) -> None:
        pyarrow = require_pyarrow(ManifestError, "saved data sets need")
        mapped = pyarrow.memory_map(url)
        self.table = pyarrow.ipc.open_stream(mapped).read_all()
        if mapped.tell() < mapped.size():
            raise ManifestError(f"{url}: something stands after the end of the stream; restore it.")
        self.schema = self.table.schema

    def batches(self, columns: list[str]) -> Iterator[Any]:
        names = list(dict.fromkeys(name.removesuffix(".path") for name in columns))
        return iter(self.table.select(names).to_batches(_ROWS))

    def picture(self, column: str, row: int) -> bytes | None:
        return _bytes(self.table.column(column)[row])


def _open(kind: str, url: str) -> _Parquet | _Arrow:
    return _Parquet(url) if kind == "parquet" else _Arrow(url)


def _is_struct(schema: Any, column: str) -> bool:
    return str(schema.field(column).type).startswith("struct")


def _bytes(value: Any) -> bytes | None:
    """Return a picture; Hugging Face's have ``bytes`` and ``path``."""
    found: bytes | dict[str, bytes | None] | None = value.as_py()
    return found["bytes"] if isinstance(found, dict) else found


def read_tables(kind: str, urls: list[tuple[str, str | None]], reader: RowReader) -> Images:
    """Return the rows of tables that have captions; the pictures themselves are not read.

    A row's name is the ``path`` beside its picture, if all rows have a different one; else its number. With each URL
    stands the split of all its rows; None: as a column says. ManifestError: a file is damaged, a column is missing or
    of another type, or a row is wrong.
    """
    paths = Texts()  # "" of a row without one

    def samples() -> Iterator[ImageSample]:
        count = 0
        for number, (url, split) in enumerate(urls):
            with reading(url, errors=Exception):
                for at, (row, path) in enumerate(_rows(_open(kind, url), url, reader)):
                    if (image := reader.image(row, f"{url}: row {at:,}", split, name="")) is not None:
                        image.file_name, image.place = f"{count:08d}", (number, at, 0)
                        paths.append(path or "")
                        yield image
                    count += 1

    images = Images(samples())
    first, which = distinct(paths)
    if len(first) == len(paths) and all(path and _is_name(path) for path in paths):
        images.names = paths
    elif again := next(filter(None, (paths[row] for row in first[np.bincount(which) > 1].tolist())), None):
        reader.note(f"'{again}' is the path of several rows, which count as different pictures; give a picture one row")
    return images


def _rows(table: _Parquet | _Arrow, url: str, reader: RowReader) -> Iterator[tuple[dict[str, Any], str | None]]:
    """Yield the rows, with None for what is not read, and the path beside each picture, if there is one."""
    found = reader.find(tuple(table.schema.names), url)
    image, kind = found.image, table.schema.field(found.image).type
    if "binary" not in str(kind):
        raise ManifestError(f"{url}: the column '{image}' is {kind}, and pictures are binary, perhaps with a path.")
    has_path = _is_struct(table.schema, image) and kind.get_field_index("path") >= 0
    texts = [*found.captions, *([found.split] if found.split else [])]
    labels = _labels(table.schema)

    def values_of(batch: Any, name: str) -> list[Any]:
        values, names = batch[name].to_pylist(), labels.get(name)
        return [names[one] if one is not None and one >= 0 else None for one in values] if names else values

    nothing = dict.fromkeys(table.schema.names)
    for batch in table.batches([*texts, *([f"{image}.path"] if has_path else [])]):
        paths = batch[image].field("path").to_pylist() if has_path else [None] * len(batch)
        for path, *row in zip(paths, *(values_of(batch, name) for name in texts), strict=True):
            yield nothing | dict(zip(texts, row, strict=True)), path


def _labels(schema: Any) -> dict[str, list[str]]:
    """Return by column the names of classes that `datasets` has numbers for."""
    kept = json.loads((schema.metadata or {}).get(b"huggingface", b"{}"))
    features = {name: one for name, one in kept.get("info", {}).get("features", {}).items() if isinstance(one, dict)}
    return {name: one["names"] for name, one in features.items() if one.get("_type") == "ClassLabel"}


def _is_name(path: str) -> bool:
    try:
        return file_name(path, "") == path
    except ManifestError:
        return False
