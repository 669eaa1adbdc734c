"""`run.json` of a run: what was trained on what, and how far it is."""

import platform
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, Literal

import torch

from ...pipeline.reading.split import AS_A_WHOLE

FORMAT, VERSION = "xret-run", 2
BranchName = Literal["image", "text"]


@dataclass(frozen=True)
class RunInfo:
    """The content of `run.json`; the fields are its keys.

    Attributes:
        store: the feature cache, named so that it can be opened from any folder.
        manifest_sha256: of the samples in `store`.
        image_set, text_set: the feature set of each side; of several a list.
        fingerprints: of both, by ``image`` and ``text``, likewise.
        seed: of the first weights and the order of samples.
        also: data sets that are learnt from beside that of `store`, as names that do not change when stores are moved.
        also_stores: where they are.
        finetuned: of the head that was fine-tuned: epoch, image_set, text_set, fingerprints; and reattach, which
            backbones were put back.
        head: the folder of that head.
        backbones: the options of an extraction by the run's own backbones.
        device, versions: where it began, and with which xret, torch and Python.
        shuffled: how an epoch mixes its samples, in words.
        init_from: the run whose best weights it began with.
        epochs: complete ones.
        best_epoch: counted from 1; None before the first.
        best_rsum: its validation RSUM, of 600.
    """

    store: str
    image_set: str | list[str]
    text_set: str | list[str]
    fingerprints: Mapping[str, str | list[str]]
    manifest_sha256: str | None = None
    seed: int = 0
    also: list[str] | None = None
    also_stores: list[str] | None = None
    finetuned: dict[str, Any] | None = None
    head: str | None = None
    backbones: dict[str, Any] | None = None
    device: str | None = None
    versions: dict[str, str] | None = None
    shuffled: str = AS_A_WHOLE
    init_from: str | None = None
    epochs: int = 0
    best_epoch: int | None = None
    best_rsum: float | None = None

    @classmethod
    def from_json(cls, values: Any) -> "RunInfo":
        """Return what `to_json` gave; TypeError or KeyError where it is something else."""
        info = cls(**{one.name: values[one.name] for one in fields(cls) if one.name in values})
        for side in info.sides:
            if len(info.sides[side]) != len(as_tuple(info.fingerprints[side])):
                raise TypeError("there are not as many fingerprints as feature sets")
        return info

    def to_json(self) -> dict[str, Any]:
        """Return the content of `run.json`."""
        told = {key: value for key, value in asdict(self).items() if value is not None or key.startswith("best_")}
        return {"format": FORMAT, "version": VERSION, **told}

    def names(self, branch: BranchName) -> tuple[str, ...]:
        """Return the names of the feature sets of ``image`` or ``text``."""
        return as_tuple(self.image_set if branch == "image" else self.text_set)

    @property
    def sides(self) -> dict[str, tuple[str, ...]]:
        """The names of both sides' feature sets."""
        return {"image": self.names("image"), "text": self.names("text")}

    def prints(self, branch: BranchName) -> tuple[str, ...]:
        """Return the fingerprints of the feature sets of ``image`` or ``text``."""
        return as_tuple(self.fingerprints[branch])

    def tuned(self, branch: BranchName) -> bool:
        """Return whether the run has a backbone of its own for ``image`` or ``text``."""
        return (self.backbones or {}).get(branch) is not None

    @property
    def facts(self) -> dict[str, Any]:
        """What stays the same when a training is resumed; a fine-tuning names other sets with each best epoch."""
        sets = ("image_set", "text_set", "fingerprints", "also")
        keys = ("manifest_sha256", "seed", *(sets if self.finetuned is None else ("finetuned",)))
        return {key: getattr(self, key) for key in keys}


def as_tuple(value: Any) -> tuple[Any, ...]:
    """Return a JSON value as a tuple: a list's items, or the value alone."""
    return tuple(value) if isinstance(value, list) else (value,)


def as_told(values: Sequence[str]) -> str | list[str]:
    """Return one value itself, or several as a list: the inverse of `as_tuple`."""
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
