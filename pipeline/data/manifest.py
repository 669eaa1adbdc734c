"""The manifest: one YAML that says where a data set's images and captions lie."""

import re
import reprlib
from collections.abc import Callable
from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from typing import Any

import yaml

from ... import data_manifests
from ..errors import ManifestError, nearest

SPLITS = ("train", "val", "test", "other")
PROTOCOLS = ("full", "1k-folds", "eccv", "cxc", "pmrp", "rpc2")  # what `xret eval` knows
CAPTION_FORMATS = (".json", ".csv", ".jsonl")


@dataclass(frozen=True)
class Manifest:
    """A manifest that was read and checked; `images` and `captions` exist.

    Attributes:
        name: the data set's name, ``[a-z0-9_-]+``.
        images: folder of the images.
        captions: file of the captions, one of `CAPTION_FORMATS`.
        merge_splits: split name of the source to the split that its images join.
        captions_per_image: keep the first so many captions of each image; None keeps all.
        counts: images by split, after merging; None where nothing is promised.
        protocols: what ``--protocol auto`` evaluates.
        licence: under which terms the data may be used.
        homepage: where the data comes from.
        path: the YAML itself.
    """

    name: str
    images: Path
    captions: Path
    merge_splits: dict[str, str]
    captions_per_image: int | None
    counts: dict[str, int] | None
    protocols: tuple[str, ...]
    licence: str | None
    homepage: str | None
    path: Path


def bundled_manifests() -> dict[str, Path]:
    """Return the manifests that come with xret, by name."""
    folder = Path(str(resources.files(data_manifests)))
    return {path.stem: path for path in sorted(folder.glob("*.yaml"))}


def load_manifest(dataset: str | Path, data_root: Path | None = None) -> Manifest:
    """Read a manifest and check everything in it that can be checked without reading the captions.

    Args:
        dataset: the name of a bundled manifest (``coco``) or the path of a YAML.
        data_root: the folder to which a relative `images` and `captions` belong; else the YAML's own.

    Raises:
        ManifestError: the manifest is unknown or unreadable, or a key is unknown, missing or wrong, or the
            image folder or caption file is not there; all faults of the keys in one message.
    """
    path = _find(dataset)
    values = _read_yaml(path)
    faults = _faults(values)
    if faults:
        raise ManifestError(f"{path}: {'; '.join(faults)}.")
    folder = path.parent if data_root is None else Path(data_root)
    images, captions = folder / values["images"], folder / values["captions"]
    missing = []
    if not _holds(images.is_dir):
        missing.append(f"the image folder {images} is not there")
    if not _holds(captions.is_file):
        missing.append(f"the caption file {captions} is not there")
    if missing:
        advice = "correct the manifest, or give the folder that its relative paths start from as --data-root"
        raise ManifestError(f"{path}: {' and '.join(missing)}; {advice}.")
    return Manifest(
        name=values["name"],
        images=images,
        captions=captions,
        merge_splits=values.get("merge_splits", {}),
        captions_per_image=values.get("captions_per_image"),
        counts=values.get("counts"),
        protocols=tuple(values.get("protocols", ["full"])),
        licence=values.get("licence"),
        homepage=values.get("homepage"),
        path=path,
    )


def _find(dataset: str | Path) -> Path:
    """Return the path of the YAML that `dataset` names."""
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
    hint = nearest(str(dataset), list(bundled))
    known = ", ".join(bundled)
    raise ManifestError(f"Unknown data set '{dataset}'{hint}; known are {known}, or give the path of a manifest.")


def _holds(test: Callable[[], bool]) -> bool:
    """Ask the file system, where a path that cannot even be asked about is not there."""
    try:
        return test()
    except (OSError, ValueError):
        return False


def _read_yaml(path: Path) -> dict[Any, Any]:
    try:
        values = yaml.safe_load(path.read_text(encoding="utf-8-sig"))
    except OSError as error:
        raise ManifestError(f"{path}: the manifest cannot be read ({error.strerror}).") from error
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark
        where = f" at line {mark.line + 1}, column {mark.column + 1}" if mark else ""
        raise ManifestError(f"{path}: this is not valid YAML{where} ({error.problem}); correct it.") from error
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        reason = " ".join(str(error).split())
        raise ManifestError(f"{path}: this is not valid YAML ({reason}); correct it.") from error
    if not isinstance(values, dict):
        raise ManifestError(f"{path}: a manifest is a mapping with at least {', '.join(REQUIRED)}; write them.")
    return values


def _faults(values: dict[Any, Any]) -> list[str]:
    """Return what is wrong with the keys and values of a manifest, a phrase each."""
    faults = [f"unknown key '{key}'{nearest(str(key), list(KEYS))}" for key in values if key not in KEYS]
    faults += [f"'{key}' is missing" for key in REQUIRED if key not in values]
    for key, check in KEYS.items():
        if key in values and (expected := check(values[key])):
            faults.append(f"'{key}' must be {expected}, not {_shown(values[key])}")
    return faults


def _shown(value: Any) -> str:
    """Show a value in a line; aliases can make a small YAML hold a huge one."""
    text = reprlib.repr(value)
    return text if len(text) <= 60 else f"{text[:57]}..."


# One check a key: it returns None for a good value, else what the value must be.


def _name(value: Any) -> str | None:
    good = isinstance(value, str) and re.fullmatch(r"[a-z0-9_-]+", value)
    return None if good else "a text made of a-z, 0-9, _ and -"


def _text(value: Any) -> str | None:
    return None if isinstance(value, str) and value else "a text"


def _caption_file(value: Any) -> str | None:
    good = isinstance(value, str) and Path(value).suffix in CAPTION_FORMATS
    return None if good else f"a file that ends in {', '.join(CAPTION_FORMATS)}"


def _is_count(value: Any, least: int) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= least


def _positive(value: Any) -> str | None:
    return None if _is_count(value, 1) else "a whole number of at least 1"


def _merge_splits(value: Any) -> str | None:
    good = isinstance(value, dict) and all(isinstance(k, str) and v in SPLITS for k, v in value.items())
    return None if good else f"a mapping from the source's split names to {', '.join(SPLITS)}"


def _counts(value: Any) -> str | None:
    good = isinstance(value, dict) and all(k in SPLITS and _is_count(v, 0) for k, v in value.items())
    return None if good else f"a mapping from {', '.join(SPLITS)} to numbers of images"


def _protocols(value: Any) -> str | None:
    good = isinstance(value, list) and value and all(v in PROTOCOLS for v in value)
    return None if good else f"a list of {', '.join(PROTOCOLS)}"


REQUIRED = ("name", "images", "captions")
KEYS: dict[str, Callable[[Any], str | None]] = {
    "name": _name,
    "images": _text,
    "captions": _caption_file,
    "merge_splits": _merge_splits,
    "captions_per_image": _positive,
    "counts": _counts,
    "protocols": _protocols,
    "licence": _text,
    "homepage": _text,
}
