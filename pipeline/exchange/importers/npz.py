"""A folder of ``.npz`` files, one an image, as bottom-up-attention.pytorch (detectron2) writes them.

Keys: ``x`` [n,C], ``bbox`` [n,4], ``num_bbox``, ``image_h``, ``image_w``. The key ``info``, in which classes and scores
lie, is a pickle: it is never opened. The id of an image is the path of its file below the folder, without ``.npz``.
"""

import hashlib
import io
import zipfile
from pathlib import Path
from typing import Any

import numpy as np

from ...data.regions import Regions
from ...errors import SampleError
from ...progress import Progress
from .source import UNREADABLE, SourceError, npy_header, usual_width

_LARGEST = 1 << 28  # bytes of an array of one image; a hundred boxes take less than a million


class NpzSource:
    """A folder of ``.npz`` files, with those in folders below it; the attributes are those of `source.Source`.

    Raises:
        SourceError: there are none, or none can be read.
    """

    splits: list[str] | None = None

    def __init__(self, folder: Path) -> None:
        names = sorted(path.relative_to(folder).as_posix() for path in folder.rglob("*.npz") if path.is_file())
        if not names:
            raise SourceError(f"{folder} is no folder that holds .npz files, one an image; check --source")
        self._folder, self._names = folder, names
        self.ids = [name.removesuffix(".npz") for name in names]
        digest, shapes, with_boxes = hashlib.sha256(), [], 0
        with Progress(f"read {folder.name}", len(names), "files") as progress:
            for name in names:
                raw = (folder / name).read_bytes()
                digest.update(f"{name} {hashlib.sha256(raw).hexdigest()}\n".encode(errors="surrogateescape"))
                shape, boxes = _look(raw)
                shapes.append(shape)
                with_boxes += boxes
                progress.update(1)
        self.extras: tuple[str, ...] = ("boxes",) if with_boxes else ()
        self.channels = usual_width((width for _, width in shapes), folder)
        self.counts = np.array([n if c == self.channels else UNREADABLE for n, c in shapes], dtype=np.int32)
        self.identity: dict[str, Any] = {"files": {f"{len(names)} .npz": digest.hexdigest()}}

    def read(self, entry: int) -> Regions:
        """Return the features of one entry; its ``info`` is left alone."""
        wanted = ("x", "bbox") if self.extras else ("x",)
        try:
            raw = (self._folder / self._names[entry]).read_bytes()
            values = _arrays(raw, (*wanted, "num_bbox", "image_w", "image_h"))
            missing = [key for key in wanted if key not in values]
            size = tuple(int(values[key].item()) if key in values else 0 for key in ("image_w", "image_h"))
            rows = len(values["x"]) if "x" in values else 0
            count = int(values["num_bbox"].item()) if "num_bbox" in values else rows
        except Exception as error:  # zipfile, its decoders and NumPy raise anything on damage
            raise SampleError(self.ids[entry], "its .npz is damaged, cut off, or pickled") from error
        if missing:
            raise SampleError(self.ids[entry], f"its .npz has no array '{missing[0]}'")
        if count != rows:
            raise SampleError(self.ids[entry], f"'num_bbox' is {count}, but 'x' has {rows} rows")
        return Regions(values["x"], values.get("bbox"), size=(size[0], size[1]))


def _look(raw: bytes) -> tuple[tuple[int, int], bool]:
    """Return rows and width of ``x``, `UNREADABLE` if that fails; and whether there are boxes."""
    try:
        arrays = _arrays(raw, ("x", "bbox"))
        rows, width = arrays["x"].shape
        return (rows, width), "bbox" in arrays
    except Exception:  # `read` says it
        return (UNREADABLE, UNREADABLE), False


def _arrays(raw: bytes, names: tuple[str, ...]) -> dict[str, np.ndarray]:
    """Return those arrays of an ``.npz`` that are there; no size that it tells is believed before it is checked."""
    arrays = {}
    with zipfile.ZipFile(io.BytesIO(raw)) as archive:
        for name in names:
            info = archive.NameToInfo.get(f"{name}.npy")
            if info is None:
                continue
            if info.compress_type not in (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED) or info.file_size > _LARGEST:
                raise ValueError("NumPy does not write this")
            with archive.open(info) as member:
                shape, fortran, dtype = npy_header(member, info.file_size)
                values = np.frombuffer(member.read(), dtype)
            arrays[name] = values.reshape(shape, order="F" if fortran else "C")
    return arrays
