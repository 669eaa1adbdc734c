"""SCAN's folder of arrays, and VSE-infinity's tree around it.

``{train,dev,test,testall}_ims.npy``: float [R,N,C] (or [R,C], VSE++'s one vector an image), with ``_caps.txt``, one
caption a line, and ``_ids.txt``. Rows come one an image, or one a caption, the row of an image repeated for each of its
captions (SCAN, data.py); so do ids. Repeated rows are compared before they are dropped. The ids alone say which image
a row belongs to; VSE-infinity's ``id_mapping.json`` beside the folder, ``precomp``, turns them into file names. The
pickled vocabularies beside the arrays are never opened.
"""

from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path

import numpy as np

from ...documents import DocumentError, read_json
from ...store.regions import Regions
from .source import ImportOptions, RegionTable, SourceError, map_floats, sha256

# Where an image is in two files, the first of them counts: 'test' is the beginning of 'testall' in COCO.
_SPLITS = {"train": "train", "dev": "val", "testall": "test", "test": "test"}


class ScanRegions(RegionTable):
    """A folder of SCAN's arrays, or the folder above ``precomp``; there are neither boxes nor sizes.

    SourceError if a file is missing or has a wrong shape, or the numbers of rows, captions and ids do not fit.
    """

    def __init__(self, folder: Path, _options: ImportOptions) -> None:
        folder = folder / "precomp" if (folder / "precomp").is_dir() else folder
        paths = [path for name in _SPLITS if (path := folder / f"{name}_ims.npy").exists()]
        if not paths:
            names = ", ".join(f"{name}_ims.npy" for name in _SPLITS)
            raise SourceError(f"{folder} holds none of {names}; check --source and --from")
        mapping = folder.with_name("id_mapping.json")
        file_names = _read_names(mapping) if mapping.exists() else {}
        self._places: list[tuple[Path, int, int]] = []  # file, first row and number of equal rows of each image
        self.keys: list[str] = []
        self.splits: list[str] = []
        self._captions: list[tuple[str, list[str]]] = []
        files = [mapping] if file_names else []
        for path in paths:
            shape = map_floats(path, 2, 3).shape
            self.channels = shape[-1] if path == paths[0] else self.channels
            if shape[-1] != self.channels:
                other = f"{shape[-1]} channels where {paths[0].name} has {self.channels}"
                raise SourceError(f"{path} has {other}; keep files of one detector in a folder")
            ids, firsts, captions = _entries(path, shape[0])
            self._captions += captions
            self.keys += [file_names.get(key, key) for key in ids]
            self.splits += [_SPLITS[path.name.removesuffix("_ims.npy")]] * len(ids)
            self.rows = max(self.rows, shape[1] if len(shape) == 3 else 1)
            self._places += [(path, first, end - first) for first, end in pairwise([*firsts, shape[0]])]
            files += [path, _beside(path, "ids")]
        self.identity = {"files": {path.name: sha256(path) for path in files}}

    def captions(self) -> list[tuple[str, list[str]]]:
        """Return where the captions of each image stand, and these."""
        return self._captions

    def read(self, entry: int) -> Regions:
        """Return the features of one entry."""
        path, first, repeat = self._places[entry]
        rows = map_floats(path, 2, 3)[first : first + repeat]
        if any(not np.array_equal(rows[0], row, equal_nan=True) for row in rows[1:]):
            raise SourceError(
                f"{path} has as many rows as captions, but rows {first} to {first + repeat - 1} of image"
                f" '{self.keys[entry]}' differ; the arrays do not belong to these ids and captions"
            )
        return Regions(np.array(rows[0] if rows.ndim == 3 else rows[:1]))


def _beside(path: Path, kind: str) -> Path:
    other = path.with_name(path.name.replace("_ims.npy", f"_{kind}.txt"))
    if not other.exists():
        raise SourceError(f"{other} is missing, and only it tells the rows of {path.name} apart; download it as well")
    return other


def _entries(path: Path, rows: int) -> tuple[list[str], list[int], list[tuple[str, list[str]]]]:
    """Return id, first row, and captions with their place, of each image of one array."""
    beside = _beside(path, "caps")
    with beside.open("rb") as file:  # bytes: a caption may hold what text files take for a line's end
        texts = [line.decode("utf-8", "replace").strip() for line in file]
    captions = len(texts)
    ids = [key.strip() for key in _beside(path, "ids").read_text(encoding="utf-8", errors="replace").split("\n")]
    ids = ids if ids[-1] else ids[:-1]
    if rows == captions == len(ids):
        firsts = [row for row in range(rows) if row == 0 or ids[row] != ids[row - 1]]
        return [ids[row] for row in firsts], firsts, _captions(beside, texts, firsts)
    images = min(rows, len(ids))
    every = captions // images if images else 0
    if captions != every * images or {rows, len(ids)} - {images, captions}:
        found = f"{rows} rows, {captions} captions and {len(ids)} ids do not fit"
        raise SourceError(f"{path}: {found}; get files of one kind, with a row an image or a row a caption")
    if len(ids) == captions and any(ids[row] != ids[row - row % every] for row in range(captions)):
        raise SourceError(f"{path}: its ids do not repeat {every} times, as its captions do; download them again")
    starts = range(0, captions, every)
    return ids[:: len(ids) // images], list(range(0, rows, rows // images)), _captions(beside, texts, starts)


def _captions(path: Path, texts: list[str], starts: Sequence[int]) -> list[tuple[str, list[str]]]:
    return [(f"{path}: line {at + 1}", texts[at:end]) for at, end in pairwise([*starts, len(texts)])]


def _read_names(path: Path) -> dict[str, str]:
    try:
        return {str(key): str(name) for key, name in read_json(path).items()}
    except (DocumentError, AttributeError) as error:
        raise SourceError(f"{path} is no JSON mapping from ids to file names; download it again") from error
