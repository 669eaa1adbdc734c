"""A folder of ``.npz`` files, one an image, as bottom-up-attention.pytorch (detectron2) writes them.

Arrays: ``x`` [n,C], ``bbox`` [n,4], ``num_bbox``, ``image_h``, ``image_w``. The array ``info``, in which classes and
scores lie, is a pickle: it is never opened. The key of an image is its file's path below the folder, without ``.npz``.
"""

import hashlib
from pathlib import Path

import numpy as np

from ...data.regions import Regions
from ...progress import Progress
from .source import RegionTable, SourceError, Unreadable, sha256, usual_shape


class NpzRegions(RegionTable):
    """A folder of ``.npz`` files, with those in folders below it; SourceError if there is none that can be read."""

    def __init__(self, folder: Path) -> None:
        self._paths = sorted(path for path in folder.rglob("*.npz") if path.is_file())
        if not self._paths:
            raise SourceError(f"{folder} is no folder that holds .npz files, one an image; check --source")
        names = [path.relative_to(folder).as_posix() for path in self._paths]
        self.keys = [name.removesuffix(".npz") for name in names]
        digest, shapes = hashlib.sha256(), []
        with Progress(f"read {folder.name}", len(names), "files") as progress:
            for name, path in zip(names, self._paths, strict=True):
                digest.update(f"{name} {sha256(path)}\n".encode(errors="surrogateescape"))
                try:
                    arrays = _arrays(path)
                    rows, width = arrays["x"].shape
                except Exception:  # `read` says what is wrong
                    rows, width = 0, 0
                else:
                    self.extras = ("boxes",) if "bbox" in arrays else self.extras
                shapes.append((rows, width))
                progress.update(1)
        self.rows, self.channels = usual_shape(shapes, folder)
        self.identity = {"files": {f"{len(names)} .npz": digest.hexdigest()}}

    def read(self, entry: int) -> Regions:
        """Return the features of one entry; its ``info`` is left alone."""
        try:
            values = _arrays(self._paths[entry])
            missing = [key for key in (("x", "bbox") if self.extras else ("x",)) if key not in values]
            width, height = (int(values[key].item()) if key in values else 0 for key in ("image_w", "image_h"))
            rows = len(values["x"]) if "x" in values else 0
            count = int(values["num_bbox"].item()) if "num_bbox" in values else rows
        except Exception as error:  # zipfile and NumPy raise anything on damage
            raise Unreadable("its .npz is damaged, cut off, or pickled") from error
        if missing:
            raise Unreadable(f"its .npz has no array '{missing[0]}'")
        if count != rows:
            raise Unreadable(f"'num_bbox' is {count}, but 'x' has {rows} rows")
        return Regions(values["x"], values.get("bbox"), size=(width, height))


def _arrays(path: Path) -> dict[str, np.ndarray]:
    with path.open("rb") as raw, np.load(raw, allow_pickle=False) as file:
        return {name: file[name] for name in ("x", "bbox", "num_bbox", "image_w", "image_h") if name in file}
