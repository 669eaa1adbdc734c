"""The manifest: one YAML that says where a data set's images and captions lie."""

import re
import reprlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from importlib import resources
from pathlib import Path
from typing import Any

from ... import data_manifests
from ..documents import read_yaml, reading
from ..errors import ManifestError, nearest
from ..files import walk

SPLITS = ("train", "val", "test", "other")


@dataclass(frozen=True)
class Columns:
    """The names of a table's columns, or of the keys of JSON lines."""

    image: str | None = None  # by default ``file_name``, or ``image`` where it holds the pictures themselves
    captions: tuple[str, ...] = ()  # none: see `captions_in`
    split: str | None = None  # by default ``split`` in caption files if there is one
    separator: str | None = None  # between the columns of a CSV or TSV; None: by the suffix
    quoting: str | None = None  # of a CSV or TSV: ``none``, marks are plain text; ``csv``, also of what looks like rows


@dataclass(frozen=True)
class Manifest:
    """A manifest that was read and checked; `images` and `captions` exist."""

    name: str  # of the data set, ``[a-z0-9_-]+``
    images: Path  # the folder where names of pictures, or of the files that hold them, start
    captions: Path | None  # file with one of the suffixes in `BESIDE`; None unless `kind` is ``folder``
    path: Path  # of the YAML
    columns: Columns = field(default_factory=Columns)
    kind: str = "folder"  # or ``imagefolder``, ``tar``, ``parquet``, ``arrow``
    packed: dict[str | None, str] = field(default_factory=dict)  # pattern or folder by split; None: each sample has one
    protocols: tuple[str, ...] = ("full",)  # what ``--protocol auto`` evaluates
    merge_splits: dict[str, str] = field(default_factory=dict)  # split of the source → split that its images join
    captions_per_image: int | None = None  # how many of each image are kept; None: all
    counts: dict[str, int] | None = None  # images by split, after merging; None where nothing is promised

    @property
    def listing(self) -> Path:
        """The file that a message about the samples names."""
        return self.captions or self.path


def bundled_manifests() -> dict[str, Path]:
    """Return the manifests that come with xret, by name."""
    folder = Path(str(resources.files(data_manifests)))
    return {path.stem: path for path in sorted(folder.glob("*.yaml"))}


def load_manifest(dataset: str | Path, data_root: Path | None = None) -> Manifest:
    """Read a manifest, a bundled one by its name or a YAML; check all that can be checked without the captions.

    Relative paths start at `data_root`, or at the YAML's own folder. ManifestError: it is unknown or unreadable, keys
    are unknown, missing or wrong, or the image folder or caption file is missing.
    """
    path = _find(dataset)
    with reading(path):
        values = read_yaml(path)
    if not isinstance(values, dict):
        raise ManifestError(f"{path}: a manifest is a mapping with at least name, images, captions; write them.")
    if faults := _faults(values):
        raise ManifestError(f"{path}: {'; '.join(faults)}.")
    for key in ("licence", "homepage"):  # for readers of the YAML
        values.pop(key, None)
    texts = values.pop("caption_columns", ())
    names = values.pop("image_column", None), (texts,) if isinstance(texts, str) else tuple(texts)
    columns = Columns(*names, *(values.pop(key, None) for key in ("split_column", "separator", "quoting")))
    values["protocols"] = tuple(values.get("protocols", ["full"]))
    folder = path.parent if data_root is None else Path(data_root)
    kind = next((kind for kind in PACKED if kind in values), None)
    if kind is not None:
        where = values.pop(kind)
        values |= {"kind": kind, "packed": where if isinstance(where, dict) else {None: where}, "captions": None}
        values["images"] = folder.resolve()
        if kind == "dataset":
            values |= _dataset(folder / where)
        return Manifest(**values, columns=columns, path=path)
    values |= {"images": folder / values["images"], "captions": folder / values["captions"]}
    missing = [] if values["images"].is_dir() else [f"the image folder {values['images']} is missing"]
    missing += [] if values["captions"].is_file() else [f"the caption file {values['captions']} is missing"]
    if missing:
        raise ManifestError(f"{path}: {' and '.join(missing)}; {_CORRECT}.")
    return Manifest(**values, columns=columns, path=path)


_CORRECT = "correct the manifest, or give the folder that its relative paths start from as --data-root"


def _dataset(place: Path) -> dict[str, Any]:
    """Return the values of a manifest that follow from whether a data set was saved or is an imagefolder."""
    if any((place / name).is_file() for name in ("state.json", "dataset_dict.json")):
        return {"kind": "arrow"}
    if any({"metadata.jsonl", "metadata.csv"}.intersection(names) for *_, names in walk(place)):
        return {"kind": "imagefolder", "images": place.resolve(), "packed": {}}
    raise ManifestError(
        f"{place}: there is neither a data set that `save_to_disk` wrote nor an imagefolder with metadata.jsonl or"
        f" metadata.csv; {_CORRECT}."
    )


def _find(dataset: str | Path) -> Path:
    bundled = bundled_manifests()
    if isinstance(dataset, str) and dataset in bundled:
        return bundled[dataset]
    path = Path(dataset)
    if path.is_file():
        return path
    hint, known = nearest(str(dataset), list(bundled)), ", ".join(bundled)
    raise ManifestError(f"There is no data set or manifest '{dataset}'{hint}; name a YAML file or one of {known}.")


def _faults(values: dict[Any, Any]) -> list[str]:
    faults = [f"unknown key '{key}'{nearest(str(key), list(KEYS))}" for key in values if key not in KEYS]
    faults += [
        f"'{key}' must be {expected}, not {reprlib.repr(values[key])[:60]}"
        for key, (expected, fits) in KEYS.items()
        if key in values and not fits(values[key])
    ]
    packed = [key for key in PACKED if key in values]
    required = ["name"] if packed else ["name", "images", "captions"]
    faults += [f"'{key}' is missing" for key in required if key not in values]
    return faults or [f"'{key}' cannot be combined with '{form}'" for form, key in _misplaced(values, packed)]


def _misplaced(values: dict[str, Any], packed: list[str]) -> Iterator[tuple[str, str]]:
    """Yield the form of pictures and captions with each key that cannot stand beside it."""
    form = packed[0] if packed else Path(values["captions"]).suffix
    for key in (*packed[1:], *(key for key in ("images", "captions", *COLUMNS) if key in values)):
        if key not in BESIDE[form] or (key == "split_column" and packed and isinstance(values[form], dict)):
            yield form, key


def _is_text(value: Any) -> bool:
    return isinstance(value, str) and value != ""


def _is_count(value: Any, least: int) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= least


def _is_mapping(value: Any, key: Callable[[Any], bool], inside: Callable[[Any], bool]) -> bool:
    return isinstance(value, dict) and all(key(k) and inside(v) for k, v in value.items())


def _is_list(value: Any, fits: Callable[[Any], bool]) -> bool:
    return isinstance(value, list) and value != [] and all(map(fits, value)) and len({*value}) == len(value)


PACKED = ("tar", "parquet", "dataset")  # keys of what holds pictures and captions together
COLUMNS = ("image_column", "caption_columns", "split_column", "quoting", "separator")
# Keys that may stand beside a form of pictures and captions: what holds both, or the suffix of a caption file.
BESIDE: dict[str, tuple[str, ...]] = {
    "tar": COLUMNS[1:3],
    "parquet": COLUMNS[:3],
    "dataset": COLUMNS[:4],
    ".json": ("images", "captions", "split_column"),
    ".jsonl": ("images", "captions", *COLUMNS[:3]),
    ".csv": ("images", "captions", *COLUMNS),
    ".tsv": ("images", "captions", *COLUMNS),
}
SUFFIXES = tuple(form for form in BESIDE if form.startswith("."))
_FILES = "a text such as shards/{000..127}.tar, or a mapping from splits to such texts"
# What the value of each key must be, and the test of that.
KEYS: dict[str, tuple[str, Callable[[Any], bool]]] = {
    "name": (
        "a text made of a-z, 0-9, _ and -",
        lambda value: isinstance(value, str) and re.fullmatch(r"[a-z0-9_-]+", value) is not None,
    ),
    "captions": (
        f"a file that ends in {', '.join(SUFFIXES)}",
        lambda value: isinstance(value, str) and Path(value).suffix in SUFFIXES,
    ),
    **dict.fromkeys(
        ("tar", "parquet"),
        (_FILES, lambda value: _is_text(value) or (value != {} and _is_mapping(value, _is_text, _is_text))),
    ),
    **dict.fromkeys(("images", "dataset", "image_column", "split_column", "licence", "homepage"), ("a text", _is_text)),
    "caption_columns": (
        "a text or a list of different texts",
        lambda value: _is_text(value) or _is_list(value, _is_text),
    ),
    "separator": (
        'one character, as ";" or "\\t"',
        lambda value: isinstance(value, str) and len(value) == 1 and not value.isalnum() and value not in '"\r\n ',
    ),
    "quoting": ("none or csv", lambda value: value in ("none", "csv")),
    "merge_splits": (
        f"a mapping from the source's split names to {', '.join(SPLITS)}",
        lambda value: _is_mapping(value, lambda name: isinstance(name, str), lambda split: split in SPLITS),
    ),
    "captions_per_image": ("a whole number of at least 1", lambda value: _is_count(value, 1)),
    "counts": (
        f"a mapping from {', '.join(SPLITS)} to numbers of images",
        lambda value: _is_mapping(value, lambda split: split in SPLITS, lambda count: _is_count(count, 0)),
    ),
    "protocols": ("a list of different texts, such as [1k-folds, full]", lambda value: _is_list(value, _is_text)),
}
