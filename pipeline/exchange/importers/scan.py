"""SCAN's folder of arrays, and VSE-infinity's tree around it.

``{train,dev,test,testall}_ims.npy``: float [R,N,C] (or [R,C], VSE++'s one vector an image), with ``_caps.txt``, one
caption a line, and ``_ids.txt``. The rows follow one of two rules (SCAN, data.py): as many rows as captions, the row
of an image repeated for each of its captions; or one row an image, and k times as many captions. Repeated rows are
compared before they are dropped. The ids come one an image or one a caption as well; they alone say which image a row
belongs to. The pickled vocabularies beside the arrays are never opened: xret makes its own from the training captions.
"""

from array import array
from itertools import chain, pairwise
from pathlib import Path
from typing import Any

import numpy as np

from ...data.regions import Regions
from ...documents import DocumentError, read_json
from .source import SourceError, sha256, shown

# Where an image is in two files, the first of them counts: 'test' is the beginning of 'testall' in COCO.
SPLIT_OF_FILE = {"train": "train", "dev": "val", "testall": "test", "test": "test"}
_TREE = {"flickr30k": "f30k"}  # what VSE-infinity calls a data set


class ScanSource:
    """A folder of SCAN's arrays; the attributes are those of `source.Source`.

    With `names`, VSE-infinity's ``id_mapping.json`` from id to file name, the file name serves as the id.

    Raises:
        SourceError: a file is missing or has a wrong shape, or the numbers of rows, captions and ids do not fit.
    """

    extras: tuple[str, ...] = ()

    def __init__(self, folder: Path, names: Path | None = None) -> None:
        self.ids: list[str] = []
        self.splits: list[str] | None = []
        self._paths: list[Path] = []
        self._at = {key: array("q") for key in ("file", "first", "repeat")}
        files, counts = [names] if names else [], array("q")
        shapes: dict[Path, tuple[int, ...]] = {}
        file_names = _read_names(names) if names else {}
        for name, split in SPLIT_OF_FILE.items():
            path = folder / f"{name}_ims.npy"
            if not path.exists():
                continue
            shapes[path] = _open(path).shape
            ids, first, repeat = _entries(path, shapes[path][0])
            self.ids += [file_names.get(key, key) for key in ids]
            self.splits += [split] * len(ids)
            counts.extend([shapes[path][1] if len(shapes[path]) == 3 else 1] * len(ids))
            for key, values in {"file": [len(self._paths)] * len(ids), "first": first, "repeat": repeat}.items():
                self._at[key].extend(values)
            self._paths.append(path)
            files += [path, _beside(path, "ids")]
        if not shapes:
            raise SourceError(
                f"{folder} holds none of train_ims.npy, dev_ims.npy, test_ims.npy and testall_ims.npy; check --source"
                " and --from"
            )
        self.channels = next(iter(shapes.values()))[-1]
        for path, shape in shapes.items():
            if shape[-1] != self.channels:
                other = f"{shape[-1]} channels where {self._paths[0].name} has {self.channels}"
                raise SourceError(f"{path} has {other}; keep files of one detector in a folder")
        self.counts = np.array(counts, dtype=np.int32)
        self.identity: dict[str, Any] = {"files": {path.name: sha256(path) for path in files}}

    def read(self, entry: int) -> Regions:
        """Return the features of one entry; they have neither boxes nor size."""
        number, first, repeat = (self._at[key][entry] for key in ("file", "first", "repeat"))
        rows = _open(self._paths[number])[first : first + repeat]
        if any(not np.array_equal(rows[0], row, equal_nan=True) for row in rows[1:]):
            raise SourceError(
                f"{self._paths[number]} has as many rows as captions, but rows {first} to {first + repeat - 1} of image"
                f" '{self.ids[entry]}' differ; the arrays do not belong to these ids and captions"
            )
        return Regions(np.array(rows[0] if rows.ndim == 3 else rows[:1]))


def vse_infty(root: Path, dataset: str) -> ScanSource:
    """Open VSE-infinity's tree: `root` is its data folder, or the folder of one data set in it.

    The arrays lie in ``precomp/``; ``id_mapping.json`` beside it, if it is there, turns ids into file names.

    Raises:
        SourceError: there is no such folder, or `ScanSource` refuses it.
    """
    folders = [root, root / _TREE.get(dataset, dataset)]
    for folder in folders:
        if (folder / "precomp").is_dir():
            names = folder / "id_mapping.json"
            return ScanSource(folder / "precomp", names if names.exists() else None)
    tried = " nor ".join(str(folder / "precomp") for folder in folders)
    raise SourceError(f"there is neither {tried}; give the folder that holds 'precomp', or use --from scan")


def _open(path: Path) -> np.ndarray:
    """Map an array of features into memory; a mapping that is let go frees what was read through it."""
    try:
        values = np.load(path, mmap_mode="r", allow_pickle=False)
    except Exception as error:  # a damaged header may make NumPy raise anything
        raise SourceError(f"{path} is no array of numbers or was cut off; get it anew") from error
    if values.ndim not in (2, 3) or 0 in values.shape or values.dtype.kind != "f":
        raise SourceError(
            f"{path} must hold floats, images x regions x channels, but holds {shown(values)}; check --source"
        )
    return np.asarray(values)


def _beside(path: Path, kind: str) -> Path:
    other = path.with_name(path.name.replace("_ims.npy", f"_{kind}.txt"))
    if not other.exists():
        raise SourceError(f"{other} is missing, and only it tells the rows of {path.name} apart; get it as well")
    return other


def _entries(path: Path, rows: int) -> tuple[list[str], list[int], list[int]]:
    """Return id, first row and number of equal rows of each image of one array."""
    with _beside(path, "caps").open("rb") as file:  # bytes: a caption may hold what text files take for a line's end
        captions = sum(1 for _ in file)
    ids = _beside(path, "ids").read_text(encoding="utf-8", errors="replace").split("\n")
    ids = [key.strip() for key in ids[: len(ids) - (not ids[-1].strip())]]
    where = f"{path}: {rows} rows, {captions} captions and {len(ids)} ids"
    if rows == captions == len(ids):
        starts = [0, *(row for row in range(1, rows) if ids[row] != ids[row - 1])]
        return [ids[row] for row in starts], starts, [b - a for a, b in pairwise(chain(starts, [rows]))]
    if ids and rows == captions and captions % len(ids) == 0:
        repeat = captions // len(ids)
        return ids, list(range(0, rows, repeat)), [repeat] * len(ids)
    if len(ids) == captions and captions % rows == 0:
        every = captions // rows
        if any(ids[row] != ids[row - row % every] for row in range(captions)):
            raise SourceError(f"{where} mean {every} captions an image, but the ids do not repeat so; get them anew")
        ids = ids[::every]
    if len(ids) != rows or captions % rows:
        raise SourceError(f"{where} do not fit; get files of one kind, with a row an image or a row a caption")
    return ids, list(range(rows)), [1] * rows


def _read_names(path: Path) -> dict[str, str]:
    try:
        names = read_json(path)
    except DocumentError as error:
        raise SourceError(f"{path} is no valid JSON ({error}); get it anew") from error
    if not isinstance(names, dict) or not all(isinstance(name, str) for name in names.values()):
        raise SourceError(f"{path} is no mapping from ids to file names; get it anew, or use --from scan")
    return names
