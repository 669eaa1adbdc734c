"""A folder of ``.npz`` files, one an image, as bottom-up-attention.pytorch (detectron2) writes them.

Keys: ``x`` [n,C], ``bbox`` [n,4], ``num_bbox``, ``image_h``, ``image_w``. The key ``info``, in which classes and scores
lie, is a pickle: it is never opened. The id of an image is the path of its file below the folder, without ``.npz``.
"""

import hashlib
from pathlib import Path
from typing import Any

import numpy as np

from ...data.regions import Regions
from ...errors import SampleError
from ...progress import Progress
from .source import UNREADABLE, SourceError, sha256, usual_width


class NpzSource:
    """A folder of ``.npz`` files, with those in folders below it; the attributes are those of `source.Source`.

    Raises:
        SourceError: there are none, or none can be read.
    """

    splits: list[str] | None = None

    def __init__(self, folder: Path) -> None:
        self._paths = sorted(path for path in folder.rglob("*.npz") if path.is_file())
        names = [path.relative_to(folder).as_posix() for path in self._paths]
        if not names:
            raise SourceError(f"{folder} is no folder that holds .npz files, one an image; check --source")
        self.ids = [name.removesuffix(".npz") for name in names]
        digest, shapes, self.extras = hashlib.sha256(), [], ()
        with Progress(f"read {folder.name}", len(names), "files") as progress:
            for name, path in zip(names, self._paths, strict=True):
                digest.update(f"{name} {sha256(path)}\n".encode(errors="surrogateescape"))
                shapes.append((UNREADABLE, UNREADABLE))
                try:
                    arrays = _arrays(path)
                    rows, width = arrays["x"].shape
                    shapes[-1] = rows, width
                    self.extras = ("boxes",) if "bbox" in arrays else self.extras
                except Exception:
                    pass
                progress.update(1)
        self.channels = usual_width((width for _, width in shapes), folder)
        self.counts = np.array([n if c == self.channels else UNREADABLE for n, c in shapes], dtype=np.int32)
        self.identity: dict[str, Any] = {"files": {f"{len(names)} .npz": digest.hexdigest()}}

    extras: tuple[str, ...]

    def read(self, entry: int) -> Regions:
        """Return the features of one entry; its ``info`` is left alone."""
        try:
            values = _arrays(self._paths[entry])
            missing = [key for key in (("x", "bbox") if self.extras else ("x",)) if key not in values]
            width, height = (int(values[key].item()) if key in values else 0 for key in ("image_w", "image_h"))
            rows = len(values["x"]) if "x" in values else 0
            count = int(values["num_bbox"].item()) if "num_bbox" in values else rows
        except Exception as error:  # zipfile and NumPy raise anything on damage
            raise SampleError(self.ids[entry], "its .npz is damaged, cut off, or pickled") from error
        if missing:
            raise SampleError(self.ids[entry], f"its .npz has no array '{missing[0]}'")
        if count != rows:
            raise SampleError(self.ids[entry], f"'num_bbox' is {count}, but 'x' has {rows} rows")
        return Regions(values["x"], values.get("bbox"), size=(width, height))


def _arrays(path: Path) -> dict[str, np.ndarray]:
    """Return the arrays of a file that are there, without ``info``."""
    with path.open("rb") as raw, np.load(raw, allow_pickle=False) as file:
        return {name: file[name] for name in ("x", "bbox", "num_bbox", "image_w", "image_h") if name in file}
