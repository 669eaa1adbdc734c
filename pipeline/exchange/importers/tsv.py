"""TSV files with base64 columns: bottom-up attention's original (read_tsv.py), and LXMERT's.

No header, a row an image, tab between the columns; arrays are base64 of little-endian float32 or int64. Rows come in
any order and may repeat, because the files of several GPUs were put together. A first pass over each file notes where
the row of each image begins, a second jumps to it. Lines are cut at tabs: a CSV reader limits the length of a field.
In the original the boxes are the region proposals, not the boxes that the detector made of them.
"""

import base64
import binascii
import hashlib
from pathlib import Path

import numpy as np

from ...data.regions import Regions
from ...progress import Progress
from .source import RegionTable, SourceError, Unreadable, usual_shape

_ORIGINAL = ("image_id", "image_w", "image_h", "num_boxes", "boxes", "features")
_OF_LXMERT = (
    *("img_id", "img_h", "img_w", "objects_id", "objects_conf", "attrs_id", "attrs_conf"),
    *("num_boxes", "boxes", "features"),
)
_LONGEST = 1 << 26  # bytes of a line; a hundred boxes take a million


class TsvRegions(RegionTable):
    """A TSV file, or the files ``*.tsv*`` of a folder (``train.tsv.0``, ``train.tsv.1``) taken together.

    SourceError if there is none, or a line has another number of columns.
    """

    def __init__(self, path: Path) -> None:
        paths = sorted(path.glob("*.tsv*")) if path.is_dir() else [path]
        if not paths:
            raise SourceError(f"{path} holds no file *.tsv; give the file of the features as --source")
        self._columns: tuple[str, ...] = ()
        self.keys: list[str] = []
        self._places: list[tuple[Path, int]] = []
        shapes: list[tuple[int, int]] = []
        digests = {tsv.name: self._index(tsv, shapes) for tsv in paths}
        self.extras = ("boxes", "classes", "scores") if "objects_id" in self._columns else ("boxes",)
        self.rows, self.channels = usual_shape(shapes, path)
        self.identity = {"files": digests}

    def _index(self, path: Path, shapes: list[tuple[int, int]]) -> str:
        """Note key, place, boxes and channels of each line of a file; return the file's SHA-256."""
        digest, offset, number = hashlib.sha256(), 0, 0
        with path.open("rb") as file, Progress(f"read {path.name}", path.stat().st_size, "bytes") as progress:
            while line := file.readline(_LONGEST):
                number += 1
                if line.strip():
                    fields = self._fields(line, f"{path}: line {number}")
                    self.keys.append(fields[self._columns[0]].decode("utf-8", "replace").strip())
                    self._places.append((path, offset))
                    shapes.append(_shape(fields))
                digest.update(line)
                offset += len(line)
                progress.update(len(line))
        return digest.hexdigest()

    def _fields(self, line: bytes, where: str) -> dict[str, bytes]:
        """Return the fields of a line by column; the first line decides which columns there are."""
        values = line.rstrip(b"\r\n").split(b"\t")
        self._columns = self._columns or (_OF_LXMERT if len(values) == len(_OF_LXMERT) else _ORIGINAL)
        if len(values) != len(self._columns):
            columns = f"{len(self._columns)} columns {', '.join(self._columns)}"
            raise SourceError(f"{where} has {len(values)} columns, not the {columns}; download the file again")
        return dict(zip(self._columns, values, strict=True))

    def read(self, entry: int) -> Regions:
        """Return the features of one entry."""
        path, offset = self._places[entry]
        with path.open("rb") as file:
            file.seek(offset)
            fields = self._fields(file.readline(), str(path))
        try:
            count = int(fields["num_boxes"])
            width, height = (int(fields[next(name for name in fields if name.endswith(end))]) for end in ("_w", "_h"))
        except ValueError as error:
            raise Unreadable("its size or number of boxes is no whole number") from error

        def column(name: str, dtype: str, channels: int) -> np.ndarray:
            try:
                raw = base64.b64decode(fields[name], validate=True)
            except binascii.Error as error:
                raise Unreadable(f"the base64 of its '{name}' is damaged or cut off") from error
            if count < 1 or len(raw) != count * channels * np.dtype(dtype).itemsize:
                expected = f"{count} x {channels} values of {np.dtype(dtype)}"
                raise Unreadable(f"its '{name}' has {len(raw)} bytes, which is not {expected}")
            return np.frombuffer(raw, dtype).reshape(count, channels)

        local, boxes = column("features", "<f4", self.channels), column("boxes", "<f4", 4)
        if "classes" not in self.extras:
            return Regions(local, boxes, size=(width, height))
        classes, scores = column("objects_id", "<i8", 1)[:, 0], column("objects_conf", "<f4", 1)[:, 0]
        return Regions(local, boxes, classes, scores, (width, height))


def _shape(fields: dict[str, bytes]) -> tuple[int, int]:
    """Return boxes and channels as the lengths of the fields tell them; 0 channels where they do not fit."""
    boxes, features = fields["num_boxes"].strip(), fields["features"]
    count = int(boxes) if boxes.isdigit() and len(boxes) < 7 else 0
    size = len(features) * 3 // 4 - features[-2:].count(b"=")
    return count, size // (4 * count) if count and size % (4 * count) == 0 else 0
