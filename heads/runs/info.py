"""What `run.json` says of a run: what was trained on what, and how far it is."""

import hashlib
import json
import platform
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from types import UnionType
from typing import Any, Literal, get_args, get_origin, get_type_hints

import torch

from ...pipeline.reading.split import AS_A_WHOLE

FORMAT, VERSION = "xret-run", 1
BranchName = Literal["image", "text"]
_NULL = ("also", "best_epoch", "best_rsum")  # written down where they are None too


@dataclass(frozen=True)
class RunInfo:
    """What `run.json` says; the fields are its keys.

    Attributes:
        store: the feature cache, named so that it can be opened from any folder.
        also_stores: the addresses of other stores that are learnt from, each of a generation; earlier versions named
            the stores alone.
        manifest_sha256: of the samples in `store`.
        generation: of `store`; earlier versions wrote none.
        image_set, text_set: the feature set of each side; of several a list.
        fingerprints: of both, by ``image`` and ``text``, likewise.
        seed: of the first weights and the order of samples.
        also: names of the other data sets that do not change when a store is moved; None: there are none.
        finetuned: of the head that was fine-tuned: epoch, image_set, text_set, fingerprints; and what was put back, as
            reattach.
        head: the folder of that head.
        backbones: what ``xret extract --from-run`` must know of the run's own backbones.
        device: where it began.
        versions: of xret, torch and Python, with which it began.
        shuffled: how an epoch mixes its samples, in words.
        init_from: the run whose best weights it began with: its folder as run, and the sha256 of its weights.
        best_epoch: counted from 1; None before the first.
        best_rsum: its validation RSUM, of 600.
        files: the SHA-256 of the run's files by their names, see `files`; earlier versions wrote none.
        more: what a later version wrote; it is kept.
    """

    store: str
    image_set: str | list[str]
    text_set: str | list[str]
    fingerprints: Mapping[str, str | list[str]]
    also_stores: list[str] | None = None
    manifest_sha256: str | None = None
    generation: int | None = None
    seed: int = 0
    also: list[str] | None = None
    finetuned: dict[str, Any] | None = None
    head: str | None = None
    backbones: dict[str, Any] | None = None
    device: str | None = None
    versions: dict[str, str] | None = None
    shuffled: str = AS_A_WHOLE
    init_from: dict[str, str] | None = None
    best_epoch: int | None = None
    best_rsum: float | None = None
    files: dict[str, str] | None = None
    more: dict[str, Any] = field(default_factory=dict)

    @classmethod
    def from_json(cls, values: dict[str, Any]) -> "RunInfo":
        """Return what `to_json` gave.

        Raises:
            TypeError: what every run has is missing, or a value is of another type than its field.
        """
        known = get_type_hints(cls)
        info = cls(
            **{key: value for key, value in values.items() if key in known and key != "more"},
            more={key: value for key, value in values.items() if key not in {*known, "format", "version"}},
        )
        if wrong := [key for key, kind in known.items() if not _fits(getattr(info, key), kind)]:
            raise TypeError(f"{wrong[0]} is of another type")
        for side, names in info.sides.items():
            if not len(names) == len(several(info.fingerprints.get(side))) > 0:
                raise TypeError(f"{side} has another number of names than of fingerprints")
        return info

    def names(self, branch: BranchName) -> tuple[str, ...]:
        """Return the names of the feature sets of ``image`` or ``text``."""
        return several(self.image_set if branch == "image" else self.text_set)

    @property
    def sides(self) -> dict[str, tuple[str, ...]]:
        """The names of both sides' feature sets."""
        return {"image": self.names("image"), "text": self.names("text")}

    def prints(self, branch: BranchName) -> tuple[str, ...]:
        """Return their fingerprints."""
        return several(self.fingerprints[branch])

    def to_json(self) -> dict[str, Any]:
        """Return the content of `run.json`."""
        values = {one.name: getattr(self, one.name) for one in fields(self) if one.name != "more"}
        null = _NULL if self.finetuned is None else _NULL[1:]  # a fine-tuning reads one store
        told = {key: value for key, value in values.items() if value is not None or key in null}
        return {"format": FORMAT, "version": VERSION, **told, **self.more}

    def tuned(self, branch: BranchName) -> bool:
        """Return whether the run has a backbone of its own for ``image`` or ``text``."""
        return (self.backbones or {}).get(branch) is not None

    @property
    def facts(self) -> dict[str, Any]:
        """What the same training has whenever it goes on; a fine-tuning names other sets with each best epoch."""
        sets = ("image_set", "text_set", "fingerprints", "also")
        keys = ("manifest_sha256", "seed", *(sets if self.finetuned is None else ("finetuned",)))
        return {key: getattr(self, key) for key in keys}


def sealed(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return the content of `run.json` with its own SHA-256, by which it is known to be undamaged."""
    return {**values, "sha256": hashlib.sha256(json.dumps(values).encode()).hexdigest()}


def unsealed(values: dict[str, Any]) -> dict[str, Any]:
    """Return what was `sealed`; earlier versions did not.

    Raises:
        ValueError: it is damaged.
    """
    inner = {key: value for key, value in values.items() if key != "sha256"}
    if "sha256" in values and sealed(inner)["sha256"] != values["sha256"]:
        raise ValueError("it has another SHA-256")
    return inner


def _fits(value: Any, kind: Any) -> bool:
    """Return whether a value that was read from JSON is of an annotation's type."""
    origin, inner = get_origin(kind) or kind, get_args(kind)
    if kind is Any:
        return True
    if origin is UnionType:
        return any(_fits(value, one) for one in inner)
    if origin is list:
        return isinstance(value, list) and all(_fits(one, inner[0]) for one in value)
    if origin in (dict, Mapping):
        return isinstance(value, dict) and all(isinstance(k, str) and _fits(v, inner[1]) for k, v in value.items())
    if origin in (int, float):
        return isinstance(value, (int, origin)) and not isinstance(value, bool)
    return isinstance(value, origin)


def several(told: Any) -> tuple[Any, ...]:
    """Return what a file tells of one feature set, or of several in a list, as one of each."""
    return tuple(told) if isinstance(told, list) else (told,)


def as_told(values: Sequence[str]) -> str | list[str]:
    """Return what is known of one feature set, or of several, as files tell it."""
    return values[0] if len(values) == 1 else list(values)


def versions() -> dict[str, str]:
    """Return the versions that numbers may depend on."""
    try:
        own = version("xret")
    except PackageNotFoundError:
        own = "unknown"
    return {"xret": own, "torch": torch.__version__, "python": platform.python_version()}


def absolute(url: str) -> str:
    """Return a store's URL so that it can be opened from any folder."""
    return url if "://" in url else str(Path(url).resolve())
