"""An HDF5 file whose arrays are named on the command line, or have the names of their roles.

``local`` [S,N,C] (or [S,C], one vector an image) and ``id`` [S] are required; ``length`` [S] says how many of the N
regions count, ``boxes`` [S,N,4], ``classes`` and ``scores`` [S,N] and ``size`` [S,2] (width, height) may be there.
"""

from collections.abc import Mapping
from pathlib import Path

import h5py
import numpy as np

from ...errors import nearest
from ...store.regions import Regions
from ...wording import reason
from .source import ImportOptions, RegionTable, SourceError, Unreadable, sha256, shown

_CACHE = 1 << 27  # bytes of decoded chunks kept, so that neighbours in a chunk are decoded once
# Of each role the kinds of NumPy's dtypes that fit, and its shape after that of the images; None: as many as regions.
_ROLES: dict[str, tuple[str, tuple[int | None, ...]]] = {
    "local": ("f", ()),
    "id": ("iuSO", ()),
    "length": ("iu", ()),
    "boxes": ("fiu", (None, 4)),
    "classes": ("iu", (None,)),
    "scores": ("fiu", (None,)),
    "size": ("iu", (2,)),
}


class Hdf5Regions(RegionTable):
    """An HDF5 file; `options.arrays` has the array of each role, such as ``{"local": "features", "id": "image_id"}``.

    SourceError if it is none, a role is unknown or missing, or an array is absent or has a wrong shape.
    """

    def __init__(self, path: Path, options: ImportOptions) -> None:
        arrays = options.arrays
        if unknown := [role for role in arrays if role not in _ROLES]:
            hint = nearest(unknown[0], list(_ROLES))
            raise SourceError(f"--arrays: '{unknown[0]}' is unknown{hint}; known are {', '.join(_ROLES)}")
        try:
            self._file = h5py.File(path, "r", locking="best-effort", rdcc_nbytes=_CACHE)
            self._look_through(path, arrays or {role: role for role in _ROLES if role in self._file})
        except SourceError:
            raise
        except Exception as error:  # h5py raises anything on damage
            raise SourceError(f"{path} cannot be read as HDF5 ({reason(error)}); check --source") from error

    def _look_through(self, path: Path, arrays: Mapping[str, str]) -> None:
        for role in ("local", "id", *arrays):
            if not isinstance(self._file.get(arrays.get(role, "")), h5py.Dataset):
                name = f" '{arrays[role]}'" if role in arrays else ""
                raise SourceError(
                    f"{path} has no array{name} for {role}; name it with --arrays: {_contents(self._file)}"
                )
        self._arrays: dict[str, h5py.Dataset] = {role: self._file[name] for role, name in arrays.items()}
        local = self._arrays["local"]
        self.rows, self.channels = local.shape[1] if local.ndim == 3 else 1, local.shape[-1]
        for role, array in self._arrays.items():
            kinds, after = _ROLES[role]
            shape = (*local.shape[:1], *(self.rows if side is None else side for side in after))
            good = array.shape == shape or (role in ("id", "length") and array.shape == (*shape, 1))
            if role == "local":
                good = array.ndim in (2, 3) and 0 not in array.shape
            if not good or array.dtype.kind not in kinds:
                raise SourceError(
                    f"{path}: '{array.name}' is {shown(array)}, which cannot be '{role}' where '{local.name}' is"
                    f" {shown(local)}; correct --arrays"
                )
            _require_filters(path, array)
        keys = self._arrays.pop("id")[...].reshape(-1).tolist()
        self.keys = [
            key.decode("utf-8", "replace").strip("\0 ") if isinstance(key, bytes) else str(key) for key in keys
        ]
        self.extras = tuple(role for role in ("boxes", "classes", "scores") if role in arrays)
        self._length = self._arrays.pop("length")[...].reshape(-1).tolist() if "length" in arrays else None
        self.identity = {"files": {path.name: sha256(path)}, "arrays": dict(sorted(arrays.items()))}

    def read(self, entry: int) -> Regions:
        """Return the features of one entry."""
        count = self.rows if self._length is None else self._length[entry]
        if not 1 <= count <= self.rows:
            raise Unreadable(f"its length {count} is not one of its regions")
        try:
            values = {role: array[entry] for role, array in self._arrays.items()}
        except Exception as error:  # as above
            raise Unreadable(f"its part of the HDF5 file cannot be read ({reason(error)})") from error
        width, height = values.pop("size", (0, 0))
        values["local"] = np.atleast_2d(values["local"])
        return Regions(**{role: array[:count] for role, array in values.items()}, size=(int(width), int(height)))


def _require_filters(path: Path, array: h5py.Dataset) -> None:
    """Refuse an array that was compressed by what is not installed here; HDF5 would name the folder of its plugins."""
    made = array.id.get_create_plist()
    for code, _, _, name in map(made.get_filter, range(made.get_nfilters())):
        if not h5py.h5z.filter_avail(code):
            raise SourceError(
                f"{path}: '{array.name}' needs the HDF5 filter {code} ({name.decode('utf-8', 'replace')}), which is"
                " not installed; write it with gzip (h5repack -f GZIP=4), or install the filter"
            )


def _contents(file: h5py.File) -> str:
    found: list[str] = []
    file.visititems(lambda name, item: found.append(f"{name} ({shown(item)})") if hasattr(item, "dtype") else None)
    return f"it holds {', '.join(found[:20]) or 'nothing'}"
