"""TSV files with base64 columns: bottom-up attention's original (read_tsv.py), and LXMERT's.

No header, a row an image, tab between the columns; arrays are base64 of little-endian float32 or int64. Rows come in
any order and may repeat, because the files of several GPUs were put together. A first pass over each file notes where
the row of each image begins, a second jumps to it. Lines are cut at tabs, never given to a CSV reader, which limits the
length of a field. In the original the boxes are the region proposals, not the boxes that the detector made of them.
"""

import base64
import binascii
import hashlib
from array import array
from pathlib import Path
from typing import Any

import numpy as np

from ...data.regions import Regions
from ...errors import SampleError
from ...progress import Progress
from .source import UNREADABLE, SourceError, usual_width

COLUMNS = {
    "butd-tsv": ("image_id", "image_w", "image_h", "num_boxes", "boxes", "features"),
    # LXMERT's height comes before its width.
    "lxmert-tsv": (
        *("img_id", "img_h", "img_w", "objects_id", "objects_conf", "attrs_id", "attrs_conf"),
        *("num_boxes", "boxes", "features"),
    ),
}
_LONGEST = 1 << 26  # bytes of a line; a hundred boxes take a million


class TsvSource:
    """A TSV file or a folder of them; the attributes are those of `source.Source`.

    The files ``*.tsv*`` of a folder (``train.tsv.0``, ``train.tsv.1``) are taken together.

    Raises:
        SourceError: there is no such file, or a line has another number of columns.
    """

    splits: list[str] | None = None

    def __init__(self, path: Path, format_: str) -> None:
        self._format, self._columns = format_, COLUMNS[format_]
        lxmert = format_ == "lxmert-tsv"
        self.extras: tuple[str, ...] = ("boxes", "classes", "scores") if lxmert else ("boxes",)
        self._paths = sorted(path.glob("*.tsv*")) if path.is_dir() else [path]
        if not self._paths:
            raise SourceError(f"{path} holds no file *.tsv; give the file of the features as --source")
        self.ids: list[str] = []
        self._number, self._offset = array("i"), array("q")
        counts, widths = array("q"), array("q")
        digests = {tsv.name: self._index(number, counts, widths) for number, tsv in enumerate(self._paths)}
        self.channels = usual_width(widths, path)
        usual = np.array(widths) == self.channels
        self.counts = np.where(usual, np.array(counts), UNREADABLE).astype(np.int32)
        self.identity: dict[str, Any] = {"files": digests}

    def _index(self, number: int, counts: "array[int]", widths: "array[int]") -> str:
        """Note id, place, boxes and channels of each line of a file; return the file's SHA-256."""
        path, digest, offset, line_number = self._paths[number], hashlib.sha256(), 0, 0
        with path.open("rb") as file, Progress(f"read {path.name}", path.stat().st_size, "bytes") as progress:
            while line := file.readline(_LONGEST):
                line_number += 1
                if fields := self._fields(line, path, line_number):
                    self.ids.append(fields[self._columns[0]].decode("utf-8", "replace").strip())
                    self._number.append(number)
                    self._offset.append(offset)
                    count, width = _shape(fields)
                    counts.append(count)
                    widths.append(width)
                digest.update(line)
                offset += len(line)
                progress.update(len(line))
        return digest.hexdigest()

    def _fields(self, line: bytes, path: Path, number: int) -> dict[str, bytes]:
        """Return a line's fields by column, none of an empty line."""
        values = line.rstrip(b"\r\n").split(b"\t")
        if len(values) == len(self._columns):
            return dict(zip(self._columns, values, strict=True))
        if not line.strip():
            return {}
        fitting = [name for name, columns in COLUMNS.items() if len(columns) == len(values)]
        advice = f"try --from {fitting[0]}" if fitting else "get the file anew if it was cut off"
        columns = f"{len(self._columns)} of {self._format} ({', '.join(self._columns)})"
        raise SourceError(f"{path}: line {number} has {len(values)} columns, not the {columns}; {advice}")

    def read(self, entry: int) -> Regions:
        """Return the features of one entry."""
        path = self._paths[self._number[entry]]
        with path.open("rb") as file:
            file.seek(self._offset[entry])
            fields = self._fields(file.readline(), path, entry + 1)
        try:
            count = int(fields["num_boxes"])
            width, height = (int(fields[name]) for name in fields if name.endswith(("_w", "_h")))
        except ValueError as error:
            raise SampleError(self.ids[entry], "its size or number of boxes is no whole number") from error
        if self._format == "lxmert-tsv":
            width, height = height, width

        def column(name: str, dtype: str, channels: int) -> np.ndarray:
            try:
                raw = base64.b64decode(fields[name], validate=True)
            except binascii.Error as error:
                raise SampleError(self.ids[entry], f"the base64 of its '{name}' is damaged or cut off") from error
            values = np.frombuffer(raw[: len(raw) - len(raw) % np.dtype(dtype).itemsize], dtype)
            if count < 1 or len(raw) != count * channels * values.itemsize:
                fault = f"its '{name}' has {len(raw)} bytes, which is not {count} x {channels} values of {values.dtype}"
                raise SampleError(self.ids[entry], fault)
            return values.reshape(count, channels)

        local, boxes = column("features", "<f4", self.channels), column("boxes", "<f4", 4)
        if self._format == "butd-tsv":
            return Regions(local, boxes, size=(width, height))
        classes, scores = column("objects_id", "<i8", 1)[:, 0], column("objects_conf", "<f4", 1)[:, 0]
        return Regions(local, boxes, classes, scores, (width, height))


def _shape(fields: dict[str, bytes]) -> tuple[int, int]:
    """Return boxes and channels as the lengths of the fields tell them; -1 for channels where they do not fit."""
    boxes, features = fields["num_boxes"].strip(), fields["features"]
    count = int(boxes) if boxes.isdigit() and len(boxes) < 7 else 0
    size = len(features) * 3 // 4 - features[-2:].count(b"=")
    return count, size // (4 * count) if count and size % (4 * count) == 0 else -1
