"""An array for each image or video, ``[n, C]`` or ``[1, n, C]``: a folder of ``.npy`` files, or an HDF5 file.

VATEX's I3D features are such a folder, and the frames of HGR (*Fine-grained Video-Text Retrieval with Hierarchical
Graph Reasoning*), of MSR-VTT for one, such a file. The key is the file's path below the folder without ``.npy``, or the
array's name.
"""

import hashlib
from pathlib import Path

import h5py
import numpy as np

from ...data.regions import Regions
from ...progress import Progress
from .hdf5 import open_hdf5, require_filters
from .source import RegionTable, SourceError, Unreadable, sha256, shown, usual_shape


class ArrayTable(RegionTable):
    """A folder of ``.npy`` files, with those in folders below it, or an HDF5 file; SourceError if there is no array."""

    def __init__(self, path: Path) -> None:
        damaged = f"{path} is no folder of .npy files and no HDF5 file; check --from and --source"
        self._file = None if path.is_dir() else open_hdf5(path, damaged)
        self._folder = path
        self.keys = _names(path, self._file)
        if not self.keys:
            raise SourceError(f"{path} holds no array, one an image or video; check --from and --source")
        if self._file is not None:
            require_filters(path, self._file[self.keys[0]])
        digest, shapes = hashlib.sha256(), []
        with Progress(f"read {path.name}", len(self.keys), "arrays") as progress:
            for entry, name in enumerate(self.keys):
                if self._file is None:
                    digest.update(f"{name} {sha256(self._path(name))}\n".encode(errors="surrogateescape"))
                try:
                    shapes.append(self._array(entry).shape[-2:])
                except Unreadable:  # `read` says what is wrong
                    shapes.append((0, 0))
                progress.update(1)
        self.rows, self.channels = usual_shape(shapes, path)
        files = {f"{len(self.keys)} .npy": digest.hexdigest()} if self._file is None else {path.name: sha256(path)}
        self.identity = {"files": files}

    def read(self, entry: int) -> Regions:
        """Return the features of one entry."""
        array = self._array(entry)
        try:
            return Regions(np.asarray(array[...]).reshape(array.shape[-2:]))
        except Exception as error:  # h5py raises anything on damage
            raise Unreadable("its part of the file is damaged") from error

    def _path(self, name: str) -> Path:
        return self._folder / f"{name}.npy"

    def _array(self, entry: int) -> np.ndarray | h5py.Dataset:
        """Return an array whose values are still on the disk, ``[n, C]`` or ``[1, n, C]``; Unreadable if it is none."""
        name = self.keys[entry]
        try:
            path = self._path(name)
            array = self._file[name] if self._file else np.load(path, mmap_mode="r", allow_pickle=False)
        except Exception as error:  # a damaged header may make NumPy raise anything
            raise Unreadable("its array is damaged, cut off, or pickled") from error
        if array.ndim not in (2, 3) or array.shape[:-2] not in ((), (1,)):
            raise Unreadable(f"its array is {shown(array)}, not rows x channels")
        return array


def _names(folder: Path, file: h5py.File | None) -> list[str]:
    found: list[str] = []
    if file is None:
        paths = sorted(path for path in folder.rglob("*.npy") if path.is_file())
        return [path.relative_to(folder).as_posix().removesuffix(".npy") for path in paths]
    file.visititems(lambda name, item: found.append(name) if isinstance(item, h5py.Dataset) else None)
    return found
