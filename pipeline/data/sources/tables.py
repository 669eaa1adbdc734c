"""Tables with a picture in each row: Parquet files, and the Arrow files of a data set that `datasets` saved.

A row's name is the ``path`` that stands with its bytes, where all rows have a different one, else its number.
"""

import itertools
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from ...errors import ManifestError, require_pyarrow
from ..caption_files import Entry, Fault
from ..manifest import Columns, Manifest
from .files import File, is_url, look_at, open_file, require_same, url_of
from .handles import PackedReader, UnreadPicture, short

_ROWS = 4096  # of captions that are read together
_PICTURES = 16  # that are read together
IMAGE = "image"  # the column of the pictures, where the manifest does not say
_BUFFER = 1 << 20  # bytes of a column that are read together
_pyarrow = partial(require_pyarrow, ManifestError, "Parquet and saved data sets need")


@dataclass(slots=True)
class Row:
    """A row of a table, before it is known how rows are called."""

    path: str | None
    number: int  # in its file
    entry: Entry


class ParquetReader(PackedReader["_Cursor"]):
    """Pictures in Parquet files; a place is a row group and a row in it."""

    def begin(self, number: int) -> "_Cursor":
        """Open a file."""
        pa = _pyarrow()
        table = pa.parquet.ParquetFile(_open(self.folder, self.source.files[number]), buffer_size=_BUFFER)
        return _Cursor(table, self.source.column)

    def find(self, handle: "_Cursor", first: int, second: int) -> UnreadPicture:
        """Return the picture in a row of a row group."""
        return handle.find(first, second)

    def end(self, handle: "_Cursor") -> None:
        """Close a file."""
        handle.table.close()


class _Cursor:
    """Reads the pictures of a Parquet file some at a time; cheap where the next one lies further on."""

    def __init__(self, table: Any, column: str) -> None:
        self.table, self.column = table, column
        groups = [table.metadata.row_group(one).num_rows for one in range(table.num_row_groups)]
        self._begins = [0, *itertools.accumulate(groups)]  # the row of the file where each group begins
        self._group = -1
        self._first, self._values = 0, None  # the rows that were read last
        self._parts: Iterator[Any] = iter(())

    def find(self, group: int, row: int) -> UnreadPicture:
        if row >= self._begins[group + 1] - self._begins[group]:
            raise IndexError(row)
        if group != self._group or row < self._first:
            struct = is_struct(self.table.schema_arrow.field(self.column).type)
            columns = [f"{self.column}.bytes" if struct else self.column]
            self._parts = self.table.iter_batches(_PICTURES, [group], columns, use_threads=False)
            self._group, self._first, self._values = group, 0, None
        while self._values is None or row >= self._first + len(self._values):
            self._first += 0 if self._values is None else len(self._values)
            values = next(self._parts).column(0)
            self._values = values.field("bytes") if is_struct(values.type) else values
        return _found(self._values[row - self._first], f"row {self._begins[group] + row:,}")


class ArrowReader(PackedReader[Any]):
    """Pictures in Arrow's streams; a place is where a batch of rows begins, and a row in it."""

    def begin(self, number: int) -> tuple[Any, Any]:
        """Open a file."""
        opened = _open(self.folder, self.source.files[number], mapped=True)
        return opened, _pyarrow().ipc.open_stream(opened).schema

    def find(self, handle: tuple[Any, Any], first: int, second: int) -> UnreadPicture:
        """Return the picture in a row of the batch at an offset."""
        ipc, (opened, schema) = _pyarrow().ipc, handle
        opened.seek(first)
        picture = ipc.read_record_batch(ipc.read_message(opened), schema).column(self.source.column)[second]
        return _found(picture["bytes"] if is_struct(picture.type) and picture.is_valid else picture)

    def end(self, handle: tuple[Any, Any]) -> None:
        """Close a file."""
        handle[0].close()


def _found(picture: Any, called: str = "") -> UnreadPicture:
    """Return a picture, a binary value of pyarrow, whose bytes are not copied yet."""
    if not picture.is_valid:
        return UnreadPicture(None, bytes, called)
    data = picture.as_buffer()
    return UnreadPicture(data.size, data.to_pybytes, called)


def table_rows(manifest: Manifest, number: int, file: File, split: str | None, fault: Fault) -> tuple[list[Row], int]:
    """Return the rows of one file that have captions, in its order, and how many it has in all.

    The pictures themselves are not read.

    Args:
        manifest: names the columns, and where the file's name starts.
        number: of the file, which stands in the places.
        file: a Parquet file, or one of Arrow's streams.
        split: of all its rows; None: as the column says.
        fault: hears of a row without captions.

    Raises:
        ManifestError: the file is damaged, or a column is missing or of another type.
    """
    rows: list[Row] = []
    folder, streams = manifest.images, manifest.packed is not None and manifest.packed.kind == "dataset"
    columns = manifest.columns if split is None else replace(manifest.columns, split=None)
    url, row = url_of(folder, file.name), 0
    parts = _arrow_parts if streams else _parquet_parts
    try:
        for at, first, batch in parts(_open(folder, file, streams), url, columns):
            there = batch.schema.names
            names, image = columns.captions_in(there), columns.image or IMAGE
            texts = [batch[name].to_pylist() for name in names]
            splits = batch[columns.split].to_pylist() if columns.split else [split] * len(batch)
            paths = _paths(batch[image] if image in there else None, len(batch))
            for place, told in enumerate(splits):
                where = f"{url}: row {row:,}"
                row += 1
                if columns.split and not told:
                    raise ManifestError(f"{where}: {columns.split} is empty; name a split.")
                captions = _captions([values[place] for values in texts])
                if not captions:
                    fault(where, f"{', '.join(names)} has no caption; add one, or take the row out")
                    continue
                rows.append(Row(paths[place], row - 1, Entry("", told, captions, place=(number, at, first + place))))
    except ManifestError:
        raise
    except Exception as error:  # whatever a damaged file makes pyarrow raise
        raise ManifestError(f"{url}: this cannot be read ({short(error)}); restore it.") from error
    return rows, row


def is_struct(kind: Any) -> bool:
    """Return whether a column holds Hugging Face's struct of ``bytes`` and ``path``."""
    return bool(_pyarrow().types.is_struct(kind))


def _open(folder: str | Path, file: File, mapped: bool = False) -> Any:
    """Open a file as pyarrow reads it best; errors as of `open_file`."""
    pa = _pyarrow()
    if is_url(file.name) or is_url(str(folder)):
        return pa.PythonFile(open_file(folder, file), mode="r")
    require_same(folder, file, look_at(folder, file.name))
    path = url_of(folder, file.name)
    return pa.memory_map(path) if mapped else pa.OSFile(path)


def _parquet_parts(opened: Any, url: str, columns: Columns) -> Iterator[tuple[int, int, Any]]:
    """Yield each row group's number, the row where a part of it begins, and the part without the pictures."""
    with opened, _pyarrow().parquet.ParquetFile(opened, buffer_size=_BUFFER) as table:
        wanted = _required(table.schema_arrow, url, columns)
        for group in range(table.num_row_groups):
            first = 0
            for part in table.iter_batches(_ROWS, [group], wanted, use_threads=False):
                yield group, first, part
                first += len(part)


def _arrow_parts(opened: Any, url: str, columns: Columns) -> Iterator[tuple[int, int, Any]]:
    """Yield where each batch of a stream begins, 0, and the batch; of a file of the disk pictures stay there."""
    with opened:
        stream = _pyarrow().ipc.open_stream(opened)
        _required(stream.schema, url, columns)
        while True:
            at = opened.tell()
            try:
                part = stream.read_next_batch()
            except StopIteration:
                if opened.tell() < opened.size():
                    raise ManifestError(f"{url}: something stands after the end of the stream; restore it.") from None
                return
            yield at, 0, part


def _required(schema: Any, url: str, columns: Columns) -> list[str]:
    """Return the columns to read, but for the pictures; refuse a table that lacks one or has it of another type."""
    types, image = _pyarrow().types, columns.image or IMAGE
    texts = [*columns.captions_in(schema.names), *([columns.split] if columns.split else [])]
    for name in (image, *texts):
        if schema.names.count(name) != 1:
            raise ManifestError(
                f"{url}: there is no column '{name}'; it has {', '.join(schema.names) or 'none'}: name the right ones"
                " as image_column, caption_columns and split_column."
            )

    def is_binary(kind: Any) -> bool:
        return bool(types.is_binary(kind) or types.is_large_binary(kind))

    def is_text(kind: Any) -> bool:
        kind = kind.value_type if types.is_dictionary(kind) else kind
        return bool(types.is_string(kind) or types.is_large_string(kind))

    kind = schema.field(image).type
    struct = is_struct(kind)
    fields = {field.name: field.type for field in kind} if struct else {}
    if not (is_binary(kind) or ("bytes" in fields and is_binary(fields["bytes"]))):
        raise ManifestError(
            f"{url}: the column '{image}' is {kind}, and pictures are binary, or a struct with their bytes and path."
        )
    for name in texts:
        kind = schema.field(name).type
        inner = kind.value_type if types.is_list(kind) or types.is_large_list(kind) else kind
        if not is_text(inner):
            raise ManifestError(f"{url}: the column '{name}' is {kind}, and texts are string, or a list of string.")
    return [*texts, f"{image}.path"] if struct and "path" in fields else texts


def _paths(image: Any, rows: int) -> list[str | None]:
    """Return what stands with the bytes of each picture."""
    if image is None or not is_struct(image.type) or image.type.get_field_index("path") < 0:
        return [None] * rows
    return [path if isinstance(path, str) else None for path in image.field("path").to_pylist()]


def _captions(values: list[Any]) -> list[tuple[str, int | None]]:
    """Return the captions of a row: those of its columns, one after the other; of several an empty one is none."""
    texts: list[Any] = []
    for value in values:
        texts += value if isinstance(value, list) else [value]
    return [(text, None) for text in texts if text is not None and (len(values) == 1 or text.strip())]
