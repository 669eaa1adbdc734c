"""An HDF5 file whose arrays are named on the command line.

``local`` [S,N,C] (or [S,C], one vector an image) and ``id`` [S] are required; ``length`` [S] says how many of the N
regions count, ``boxes`` [S,N,4], ``classes`` and ``scores`` [S,N] and ``size`` [S,2] (width, height) may be there.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import h5py
import numpy as np

from ...data.regions import Regions
from ...errors import SampleError, nearest
from .source import UNREADABLE, SourceError, sha256, shown

_CACHE = 1 << 27  # bytes of decoded chunks kept, so that neighbours in a chunk are decoded once
_SHAPES = {  # S images, N regions
    "local": "S x N x C",
    "id": "S",
    "length": "S",
    "boxes": "S x N x 4",
    "classes": "S x N",
    "scores": "S x N",
    "size": "S x 2",
}


class Hdf5Source:
    """An HDF5 file; the attributes are those of `source.Source`.

    `arrays` has the name in the file of each role, such as ``{"local": "features", "id": "image_id"}``.

    Raises:
        SourceError: it is no HDF5 file, a role is unknown or missing, or an array is absent or has a wrong shape.
    """

    splits: list[str] | None = None

    def __init__(self, path: Path, arrays: Mapping[str, str]) -> None:
        try:
            self._file = h5py.File(path, "r", rdcc_nbytes=_CACHE)
            self._look_through(path, arrays)
        except SourceError:
            raise
        except Exception as error:  # h5py raises anything on damage
            raise SourceError(f"{path} is no HDF5 file, is damaged or was cut off; check --source") from error

    def _look_through(self, path: Path, arrays: Mapping[str, str]) -> None:
        for role in arrays:
            if role not in _SHAPES:
                hint = nearest(role, list(_SHAPES))
                raise SourceError(f"--arrays: '{role}' is unknown{hint}; known are {', '.join(_SHAPES)}")
        if missing := [role for role in ("local", "id") if role not in arrays]:
            there = _contents(self._file)
            raise SourceError(f"--arrays must say which array of {path} is '{missing[0]}'; it holds {there}")
        self._arrays = {role: self._array(role, name) for role, name in arrays.items()}
        local = self._arrays["local"]
        images, rows = local.shape[0] if local.ndim else 0, local.shape[1] if local.ndim == 3 else 1
        for role in _SHAPES:
            if role in arrays:
                self._check(role, {"S": images, "N": rows})
        self.channels: int = local.shape[-1]
        self.ids = _ids(self._arrays["id"])
        self.extras = tuple(role for role in ("boxes", "classes", "scores") if role in arrays)
        length = np.full(images, rows) if "length" not in arrays else self._arrays["length"][...].reshape(-1)
        self.counts = np.where((length >= 1) & (length <= rows), length, UNREADABLE).astype(np.int32)
        self.identity: dict[str, Any] = {"files": {path.name: sha256(path)}, "arrays": dict(sorted(arrays.items()))}

    def read(self, entry: int) -> Regions:
        """Return the features of one entry."""
        count = int(self.counts[entry])
        if count == UNREADABLE:
            raise SampleError(self.ids[entry], f"its length {self._arrays['length'][entry]} is not one of its regions")
        try:
            values = {role: array[entry] for role, array in self._arrays.items() if role not in ("id", "length")}
        except Exception as error:  # as above
            raise SampleError(self.ids[entry], "its part of the HDF5 file is damaged") from error
        size = tuple(int(side) for side in values.pop("size", (0, 0)))
        rows = {
            role: np.atleast_2d(array)[:count] if role == "local" else array[:count] for role, array in values.items()
        }
        return Regions(**rows, size=(size[0], size[1]))

    def _array(self, role: str, name: str) -> h5py.Dataset:
        array = self._file.get(name)
        if not isinstance(array, h5py.Dataset):
            where = self._file.filename
            raise SourceError(f"{where} has no array '{name}' for {role}; it holds {_contents(self._file)}")
        return array

    def _check(self, role: str, sizes: dict[str, int]) -> None:
        array, expected = self._arrays[role], _SHAPES[role]
        kinds = {"local": "f", "id": "iuSO", "length": "iu", "classes": "iu", "size": "iu"}.get(role, "fiu")
        shape = array.shape[:1] if role in ("id", "length") and array.shape[1:] == (1,) else array.shape
        if role == "local":
            good = array.ndim in (2, 3) and 0 not in shape
        else:
            good = shape == tuple(sizes[part] if part in sizes else int(part) for part in expected.split(" x "))
        if not good or array.dtype.kind not in kinds:
            raise SourceError(
                f"{self._file.filename}: '{array.name}' is {shown(array)}, which cannot be '{role}' ({expected}) of"
                f" {sizes['S']} images; correct --arrays"
            )


def _ids(array: h5py.Dataset) -> list[str]:
    values = array[...].reshape(-1).tolist()
    return [key.decode("utf-8", "replace").strip("\0 ") if isinstance(key, bytes) else str(key) for key in values]


def _contents(file: h5py.File) -> str:
    found: list[str] = []
    file.visititems(lambda name, item: found.append(f"{name} ({shown(item)})") if hasattr(item, "dtype") else None)
    return ", ".join(found[:20]) or "nothing"
