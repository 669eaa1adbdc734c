"""A folder of ``.npz`` files, one an image, as bottom-up-attention.pytorch (detectron2) writes them.

Keys: ``x`` [n,C], ``bbox`` [n,4], ``num_bbox``, ``image_h``, ``image_w``. The key ``info``, in which classes and scores
lie, is a pickle: it is never opened. The id of an image is the path of its file below the folder, without ``.npz``.
"""

import hashlib
import io
import zipfile
import zlib
from pathlib import Path
from typing import Any

import numpy as np

from ...data.regions import Regions
from ...errors import SampleError
from ...progress import Progress
from .source import UNREADABLE, SourceError, usual_width

_DAMAGE = (OSError, ValueError, TypeError, EOFError, zipfile.BadZipFile, zlib.error, RuntimeError)


class NpzSource:
    """A folder of ``.npz`` files, with those in folders below it; the attributes are those of `source.Source`.

    Raises:
        SourceError: there are none, or none can be read.
    """

    splits: list[str] | None = None

    def __init__(self, folder: Path) -> None:
        names = sorted(path.relative_to(folder).as_posix() for path in folder.rglob("*.npz"))
        if not names:
            raise SourceError(f"{folder} is no folder that holds .npz files, one an image; check --source")
        self._folder, self._names = folder, names
        self.ids = [name.removesuffix(".npz") for name in names]
        digest, shapes, with_boxes = hashlib.sha256(), [], 0
        with Progress(f"read {folder.name}", len(names), "files") as progress:
            for name in names:
                raw = (folder / name).read_bytes()
                digest.update(f"{name} {hashlib.sha256(raw).hexdigest()}\n".encode())
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
            with np.load(io.BytesIO(raw), allow_pickle=False) as file:
                missing = [key for key in wanted if key not in file]
                values = {key: file[key] for key in (*wanted, "num_bbox", "image_w", "image_h") if key in file}
            size = tuple(int(values[key].item()) if key in values else 0 for key in ("image_w", "image_h"))
            count = int(values["num_bbox"].item()) if "num_bbox" in values else None
        except _DAMAGE as error:
            raise SampleError(self.ids[entry], "its .npz is damaged, cut off, or pickled") from error
        if missing:
            raise SampleError(self.ids[entry], f"its .npz has no array '{missing[0]}'")
        if count not in (None, len(values["x"])):
            raise SampleError(self.ids[entry], f"'num_bbox' is {count}, but 'x' has {len(values['x'])} rows")
        return Regions(values["x"], values.get("bbox"), size=(size[0], size[1]))


def _look(raw: bytes) -> tuple[tuple[int, int], bool]:
    """Return rows and width of ``x`` from its header alone, `UNREADABLE` if that fails; and whether it has boxes."""
    try:
        with zipfile.ZipFile(io.BytesIO(raw)) as archive, archive.open("x.npy") as member:
            version = np.lib.format.read_magic(member)
            header = np.lib.format.read_array_header_1_0 if version == (1, 0) else np.lib.format.read_array_header_2_0
            rows, width = header(member)[0]
            return (rows, width), "bbox.npy" in archive.namelist()
    except (*_DAMAGE, KeyError):
        return (UNREADABLE, UNREADABLE), False
