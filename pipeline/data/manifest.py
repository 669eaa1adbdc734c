"""The manifest: one YAML that says where a data set's images and captions lie."""

import re
import reprlib
from collections.abc import Callable, Collection
from dataclasses import dataclass, field
from importlib import resources
from pathlib import Path
from typing import Any

from ... import data_manifests
from ..documents import DocumentError, read_yaml
from ..errors import ManifestError, nearest

SPLITS = ("train", "val", "test", "other")
PROTOCOLS = ("full", "1k-folds", "eccv", "cxc", "pmrp", "rpc2")  # what `xret eval` knows
CAPTION_FORMATS = (".json", ".csv", ".tsv", ".jsonl")
SEPARATORS = {".csv": ",", ".tsv": "\t"}
CAPTIONS = ("caption", "text")  # columns of captions where the manifest names none: the first that is there


@dataclass(frozen=True)
class Packed:
    """Where pictures and captions lie together, as a manifest names it."""

    kind: str  # ``tar``, ``parquet`` or ``dataset``
    files: dict[str | None, str]  # pattern or folder by split; None: each sample says its own


@dataclass(frozen=True)
class Columns:
    """What the columns of tables and the keys of JSON lines are called, as a manifest names them."""

    image: str | None = None  # None: ``file_name``, and of those that hold the pictures themselves ``image``
    captions: tuple[str, ...] = ()  # none: see `captions_in`
    split: str | None = None  # None: of caption files ``split`` if there is one
    separator: str | None = None  # between the columns of a CSV or TSV; None: as its suffix says

    def captions_in(self, there: Collection[str]) -> tuple[str, ...]:
        """Return the columns of captions among those that are there."""
        return self.captions or (next((name for name in CAPTIONS if name in there), CAPTIONS[0]),)


@dataclass(frozen=True)
class Manifest:
    """A manifest that was read and checked; `images` and `captions` exist."""

    name: str  # of the data set, ``[a-z0-9_-]+``
    images: Path  # folder; of what is packed, that where relative names start
    captions: Path | None  # file, one of `CAPTION_FORMATS`; None of what is packed
    path: Path  # of the YAML
    columns: Columns = field(default_factory=Columns)
    packed: Packed | None = None  # pictures and captions that lie together; None of a folder
    is_imagefolder: bool = False  # of what is packed: pictures lie in a folder with metadata after all
    protocols: tuple[str, ...] = ("full",)  # what ``--protocol auto`` evaluates
    merge_splits: dict[str, str] = field(default_factory=dict)  # split of the source → split that its images join
    captions_per_image: int | None = None  # how many of each image are kept; None: all
    counts: dict[str, int] | None = None  # images by split, after merging; None where nothing is promised
    licence: str | None = None  # terms under which the data may be used
    homepage: str | None = None  # where the data comes from
    data_root: Path | None = None  # the folder at which relative paths start; None: the YAML's own

    @property
    def listing(self) -> Path:
        """The file that a message about the samples names."""
        return self.captions or self.path


def bundled_manifests() -> dict[str, Path]:
    """Return the manifests that come with xret, by name."""
    folder = Path(str(resources.files(data_manifests)))
    return {path.stem: path for path in sorted(folder.glob("*.yaml"))}


def load_manifest(dataset: str | Path, data_root: Path | None = None) -> Manifest:
    """Read a manifest and check everything in it that can be checked without reading the captions.

    Args:
        dataset: the name of a bundled manifest (``coco``) or the path of a YAML.
        data_root: the folder at which relative paths start; None: the YAML's own.

    Raises:
        ManifestError: the manifest is unknown or unreadable, keys are unknown, missing or wrong, or the image folder
            or caption file is missing.
    """
    path = _find(dataset)
    values = _read_yaml(path)
    faults = _faults(values)
    if faults:
        raise ManifestError(f"{path}: {'; '.join(faults)}.")
    root = None if data_root is None else Path(data_root)
    folder = root or path.parent
    values["protocols"] = tuple(values.get("protocols", ["full"]))
    packed, columns = _packed(values), _columns(values)
    kept = {key: value for key, value in values.items() if key not in (*PACKED, *COLUMNS)}
    if packed is not None:
        within = _imagefolder(folder, packed)
        start = folder.resolve() if within is None else within
        kept |= {"images": start, "captions": None, "packed": packed, "is_imagefolder": within is not None}
        return Manifest(**kept, columns=columns, path=path, data_root=root)
    images, captions = folder / values["images"], folder / values["captions"]
    missing = [] if _holds(images.is_dir) else [f"the image folder {images} is missing"]
    missing += [] if _holds(captions.is_file) else [f"the caption file {captions} is missing"]
    if missing:
        advice = "correct the manifest, or give the folder that its relative paths start from as --data-root"
        raise ManifestError(f"{path}: {' and '.join(missing)}; {advice}.")
    found = {**kept, "images": images, "captions": captions}
    return Manifest(**found, columns=columns, path=path, data_root=root)


def _packed(values: dict[Any, Any]) -> Packed | None:
    """Return where pictures and captions lie together; None where they lie apart."""
    for kind in PACKED:
        if kind in values:
            files = values[kind] if isinstance(values[kind], dict) else {None: values[kind]}
            return Packed(kind, files)
    return None


def _columns(values: dict[Any, Any]) -> Columns:
    texts = values.get("caption_columns", ())
    captions = (texts,) if isinstance(texts, str) else tuple(texts)
    return Columns(values.get("image_column"), captions, values.get("split_column"), values.get("separator"))


def _imagefolder(folder: Path, packed: Packed) -> Path | None:
    """Return the folder of a ``dataset`` that is an `imagefolder`; None where it was saved, or is a URL.

    Raises:
        ManifestError: there is no data set.
    """
    name = next(iter(packed.files.values()))
    if packed.kind != "dataset" or "://" in name:
        return None
    place = folder / name
    if any(_holds((place / one).is_file) for one in ("state.json", "dataset_dict.json")):
        return None
    if _holds(place.is_dir) and any(next(place.rglob(f"metadata.{kind}"), None) for kind in ("jsonl", "csv")):
        return place.resolve()
    raise ManifestError(
        f"{place}: there is neither a data set that `save_to_disk` wrote nor an imagefolder with metadata.jsonl or"
        " metadata.csv; correct the manifest, or give the folder that its relative paths start from as --data-root."
    )


def _find(dataset: str | Path) -> Path:
    bundled = bundled_manifests()
    if isinstance(dataset, str) and dataset in bundled:
        return bundled[dataset]
    path = Path(dataset)
    if _holds(path.is_file):
        return path
    if _holds(path.is_dir):
        raise ManifestError(f"{path} is a folder; name the manifest (a YAML file) in it.")
    if path.suffix in (".yaml", ".yml") or len(path.parts) > 1:
        raise ManifestError(f"There is no manifest {path}; name a YAML file or one of {', '.join(bundled)}.")
    hint, known = nearest(str(dataset), list(bundled)), ", ".join(bundled)
    raise ManifestError(f"Unknown data set '{dataset}'{hint}; known are {known}, or give the path of a manifest.")


def _holds(test: Callable[[], bool]) -> bool:
    """Return what the file system says; a path that cannot be looked up counts as absent."""
    try:
        return test()
    except (OSError, ValueError):
        return False


def _read_yaml(path: Path) -> dict[Any, Any]:
    try:
        values = read_yaml(path)
    except OSError as error:
        raise ManifestError(f"{path}: the manifest cannot be read ({error.strerror}).") from error
    except DocumentError as error:
        raise ManifestError(f"{path}: this is not valid YAML ({error}); correct it.") from error
    if not isinstance(values, dict):
        raise ManifestError(f"{path}: a manifest is a mapping with at least {', '.join(REQUIRED)}; write them.")
    return values


def _faults(values: dict[Any, Any]) -> list[str]:
    """Return what is wrong with the keys and values, a phrase each."""
    faults = [f"unknown key '{key}'{nearest(str(key), list(KEYS))}" for key in values if key not in KEYS]
    faults += [f"'{key}' is missing" for key in _required(values) if key not in values]
    if len(named := [key for key in ("images", *PACKED) if key in values]) > 1:
        faults.append(f"{' and '.join(named)} are named, and pictures lie in one of them")
    elif named and named != ["images"]:
        beside = ["captions", *(COLUMNS if named == ["tar"] else ["separator"])]
        faults += [f"'{key}' goes not with '{named[0]}'" for key in beside if key in values]
        if isinstance(values[named[0]], dict) and "split_column" in values:
            faults.append(f"'{named[0]}' and 'split_column' both say the split; leave one out")
    elif _is_text(values.get("captions")):
        suffix = Path(values["captions"]).suffix
        beside = [*(COLUMNS if suffix == ".json" else ["separator"] if suffix == ".jsonl" else ())]
        faults += [f"'{key}' goes not with a {suffix} file" for key in beside if key in values]
    wrong = [(key, expected) for key, (expected, fits) in KEYS.items() if key in values and not fits(values[key])]
    return faults + [f"'{key}' must be {expected}, not {_shown(values[key])}" for key, expected in wrong]


def _required(values: dict[Any, Any]) -> tuple[str, ...]:
    return ("name",) if any(kind in values for kind in PACKED) else REQUIRED


def _is_packed(value: Any) -> bool:
    return _is_text(value) or (value != {} and _is_mapping(value, _is_text, _is_text))


def _shown(value: Any) -> str:
    """Show a value in a line; aliases can make the value of a small YAML huge."""
    text = reprlib.repr(value)
    return text if len(text) <= 60 else f"{text[:57]}..."


def _is_text(value: Any) -> bool:
    return isinstance(value, str) and value != ""


def _is_count(value: Any, least: int) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= least


def _is_mapping(value: Any, key: Callable[[Any], bool], inside: Callable[[Any], bool]) -> bool:
    return isinstance(value, dict) and all(key(k) and inside(v) for k, v in value.items())


REQUIRED = ("name", "images", "captions")
PACKED = ("tar", "parquet", "dataset")  # keys of what holds pictures and captions together
COLUMNS = ("image_column", "caption_columns", "split_column", "separator")
_FILES = "a text such as shards/{000..127}.tar, or a mapping from splits to such texts"
# Of each key what its value must be, and the test of that.
KEYS: dict[str, tuple[str, Callable[[Any], bool]]] = {
    "name": (
        "a text made of a-z, 0-9, _ and -",
        lambda value: isinstance(value, str) and re.fullmatch(r"[a-z0-9_-]+", value) is not None,
    ),
    "images": ("a text", _is_text),
    "captions": (
        f"a file that ends in {', '.join(CAPTION_FORMATS)}",
        lambda value: isinstance(value, str) and Path(value).suffix in CAPTION_FORMATS,
    ),
    "tar": (_FILES, _is_packed),
    "parquet": (_FILES, _is_packed),
    "dataset": ("a folder", _is_text),
    "image_column": ("a text", _is_text),
    "caption_columns": (
        "a text or a list of different texts",
        lambda value: (
            _is_text(value)
            or (isinstance(value, list) and value != [] and all(map(_is_text, value)) and len({*value}) == len(value))
        ),
    ),
    "split_column": ("a text", _is_text),
    "separator": (
        'one character, as ";" or "\\t"',
        lambda value: isinstance(value, str) and len(value) == 1 and not value.isalnum() and value not in '"\r\n ',
    ),
    "merge_splits": (
        f"a mapping from the source's split names to {', '.join(SPLITS)}",
        lambda value: _is_mapping(value, lambda name: isinstance(name, str), lambda split: split in SPLITS),
    ),
    "captions_per_image": ("a whole number of at least 1", lambda value: _is_count(value, 1)),
    "counts": (
        f"a mapping from {', '.join(SPLITS)} to numbers of images",
        lambda value: _is_mapping(value, lambda split: split in SPLITS, lambda count: _is_count(count, 0)),
    ),
    "protocols": (
        f"a list of {', '.join(PROTOCOLS)}",
        lambda value: isinstance(value, list) and value != [] and all(name in PROTOCOLS for name in value),
    ),
    "licence": ("a text", _is_text),
    "homepage": ("a text", _is_text),
}
