"""TSV files with base64 columns: bottom-up attention's original (read_tsv.py), and LXMERT's.

No header, a row an image, tab between the columns; arrays are base64 of little-endian numbers. Their type follows from
their lengths and, of the features, whose width is not known, from their values. Rows come in any order and may repeat,
because the files of several GPUs were put together. A first pass over each file notes where the row of each image
begins, a second jumps to it. Lines are cut at tabs: a CSV reader limits the length of a field. In the original the
boxes are the region proposals, not the boxes that the detector made of them.
"""

import base64
import binascii
import hashlib
from collections import Counter
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np

from ...progress import Progress
from ...store.regions import Regions
from .source import ImportOptions, RegionTable, SourceError, Unreadable

_ORIGINAL = ("image_id", "image_w", "image_h", "num_boxes", "boxes", "features")
_OF_LXMERT = (
    *("img_id", "img_h", "img_w", "objects_id", "objects_conf", "attrs_id", "attrs_conf"),
    *("num_boxes", "boxes", "features"),
)
_COLUMNS = {len(columns): columns for columns in (_ORIGINAL, _OF_LXMERT)}
_LONGEST = 1 << 26  # bytes of a line; a hundred boxes take a million
_LOOKED_AT, _SHOWN = 20, 4096  # images, and of each characters of base64, whose values show the features' type
_FLOATS = ("<f4", "<f8", "<f2")


class TsvRegions(RegionTable):
    """A TSV file, or the files ``*.tsv*`` of a folder (``train.tsv.0``, ``train.tsv.1``) taken together.

    SourceError if there is none, or no line of them has an image's features.
    """

    def __init__(self, path: Path, _options: ImportOptions) -> None:
        paths = sorted(path.glob("*.tsv*")) if path.is_dir() else [path]
        if not paths:
            raise SourceError(f"{path} holds no file *.tsv; give the file of the features as --source")
        self._columns: tuple[str, ...] = ()  # of the first line that can be one
        self.keys: list[str] = []
        self._places: list[tuple[Path, int]] = []
        shapes: list[tuple[int, int]] = []
        self.identity = {"files": {tsv.name: self._index(tsv, shapes) for tsv in paths}}
        known = Counter(size for _, size in shapes if size)
        if not known:
            raise SourceError(
                f"{path}: no line of it has the {len(_ORIGINAL)} columns {', '.join(_ORIGINAL)}, or LXMERT's"
                f" {len(_OF_LXMERT)}, with the features of an image; check --from and --source"
            )
        self.extras = ("boxes", "classes", "scores") if "objects_id" in self._columns else ("boxes",)
        usual = known.most_common(1)[0][0]
        alike = [entry for entry, (_, size) in enumerate(shapes) if size == usual]
        self.rows = max(shapes[entry][0] for entry in alike)
        shown = [self._fields(entry)["features"][:_SHOWN] for entry in alike[:_LOOKED_AT]]
        self._dtype = _float_type(shown, usual)
        self.channels = usual // self._dtype.itemsize

    def _index(self, path: Path, shapes: list[tuple[int, int]]) -> str:
        """Note key, place, boxes and bytes a box of each line of a file; return the file's SHA-256."""
        digest, offset = hashlib.sha256(), 0
        with path.open("rb") as file, Progress(f"read {path.name}", path.stat().st_size, "bytes") as progress:
            while line := file.readline(_LONGEST):
                if line.strip():
                    values = line.rstrip(b"\r\n").split(b"\t")
                    self._columns = self._columns or _COLUMNS.get(len(values), ())
                    self.keys.append(values[0].decode("utf-8", "replace").strip())
                    self._places.append((path, offset))
                    shapes.append(_shape(values) if len(values) == len(self._columns) else (0, 0))
                digest.update(line)
                offset += len(line)
                progress.update(len(line))
        return digest.hexdigest()

    def _fields(self, entry: int) -> dict[str, bytes]:
        path, offset = self._places[entry]
        with path.open("rb") as file:
            file.seek(offset)
            values = file.readline(_LONGEST).rstrip(b"\r\n").split(b"\t")
        if len(values) != len(self._columns):
            columns = f"{len(self._columns)} columns {', '.join(self._columns)}"
            raise Unreadable(f"its line has {len(values)} columns, not the {columns}")
        return dict(zip(self._columns, values, strict=True))

    def read(self, entry: int) -> Regions:
        """Return the features of one entry."""
        fields = self._fields(entry)
        try:
            count = int(fields["num_boxes"])
            width, height = (int(fields[next(name for name in fields if name.endswith(end))]) for end in ("_w", "_h"))
        except ValueError as error:
            raise Unreadable("its size or number of boxes is no whole number") from error

        def column(name: str, channels: int, *dtypes: str) -> np.ndarray:
            try:
                raw = base64.b64decode(fields[name], validate=True)
            except binascii.Error as error:
                raise Unreadable(f"the base64 of its '{name}' is damaged or cut off ({error})") from error
            for dtype in map(np.dtype, dtypes):
                if 0 < count <= self.rows and len(raw) == count * channels * dtype.itemsize:
                    return np.frombuffer(raw, dtype).reshape(count, channels)
            expected = f"{count} x {channels} values of {' or '.join(str(np.dtype(dtype)) for dtype in dtypes)}"
            raise Unreadable(f"its '{name}' has {len(raw)} bytes, which is not {expected}")

        local, boxes = column("features", self.channels, self._dtype.str), column("boxes", 4, *_FLOATS)
        if "classes" not in self.extras:
            return Regions(local, boxes, size=(width, height))
        classes, scores = column("objects_id", 1, "<i8", "<i4")[:, 0], column("objects_conf", 1, *_FLOATS)[:, 0]
        return Regions(local, boxes, classes, scores, (width, height))


def _shape(values: list[bytes]) -> tuple[int, int]:
    """Return boxes and bytes a box of a line's features, by the lengths of its fields; zeros where they do not fit."""
    *_, boxes, _, features = values
    count = int(boxes) if boxes.strip().isdigit() and len(boxes) < 7 else 0
    size = len(features) * 3 // 4 - features[-2:].count(b"=")
    return (count, size // count) if count and size % count == 0 else (0, 0)


def _float_type(features: list[bytes], row_bytes: int) -> "np.dtype[Any]":
    """Return the type of the features in base64 of some images: that which is the likeliest of most of them.

    In another type bits of the fraction become exponents, and magnitudes differ by many powers of two. Numbers of a
    wider type that use its upper half alone would be zero in every second place of a narrower one.
    """
    votes = Counter[str]()
    for field in features:
        with suppress(binascii.Error):
            raw = base64.b64decode(field, validate=True)
            votes[min(_FLOATS, key=lambda dtype: _unlikelihood(raw, dtype, row_bytes))] += 1
    return np.dtype(votes.most_common(1)[0][0] if votes else _FLOATS[0])


def _unlikelihood(raw: bytes, dtype: str, row_bytes: int) -> tuple[bool, float]:
    """Return whether an image's features are no numbers of a type, and by how many powers of two these differ."""
    with np.errstate(invalid="ignore"):
        values = np.abs(np.frombuffer(raw[: len(raw) // 8 * 8], dtype).astype(np.float64))
        known = np.isfinite(values) & (values > 0)
    if row_bytes % np.dtype(dtype).itemsize or not known[::2].any():
        return True, np.inf
    # In float16 a 32nd of random bits are NaN or infinity.
    return bool(np.isfinite(values).mean() < 0.998), float(np.log2(values[known]).std())
