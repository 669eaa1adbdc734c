"""What an encoder is made of: its name, its weights and its options, for the command line and Python alike."""

import re
from collections.abc import Collection
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

from ..errors import EncoderError

HUB = "hf:"


@dataclass(frozen=True)
class EncoderSpec:
    """An encoder and its options; an encoder that does not take one of them refuses it when it is loaded.

    Attributes:
        name: one that ``xret list encoders`` lists, any torchvision classification network, ``hf:ID|DIR``,
            ``timm:NAME[.TAG]``, ``open_clip:ARCH[/TAG]``, or the import path of a class, ``my_module:MyEncoder``. A hub
            id may end in ``@REVISION``.
        weights: a file or ``random:SEED``, of ``bert`` a folder or hub id; None: the published ones, which
            ``imagenet`` means, too.
        image_size: side of the square input, pixels; None: the model's own, of torchvision 224.
        layer: whose map or hidden states are the local features; -1: the last.
        whole: squeeze whole pictures into the square, where the model would cut out their middle.
        pool: height and width, in cells, of the windows in which a grid is averaged; None: it is not.
        views: ``dihedral:8`` or ``crop-flip:4``: augmentation and number of views of a picture, itself included;
            None: only the picture.
        regions: fewest and most boxes of a picture, or one number, for detectors; None: 36.
        frames: pictures are folders of video frames, of which at most so many are taken; None: they are files.
        prompt: what is encoded in the place of a caption, which stands in it for ``{}``.
        dtype: in which features are stored; of ``float16`` a GPU computes in bfloat16.
        trust: unpickle weights, run a program that a checkpoint comes with, or a user's own class.
    """

    name: str
    weights: str | None = None
    image_size: int | None = None
    layer: int = -1
    whole: bool = False
    pool: tuple[int, int] | None = None
    views: str | None = None
    regions: tuple[int, int] | None = None
    frames: int | None = None
    prompt: str | None = None
    dtype: str = "float16"
    trust: bool = False

    def __post_init__(self) -> None:
        if self.weights == "imagenet":
            object.__setattr__(self, "weights", None)
        for key in ("pool", "regions"):
            if (value := getattr(self, key)) is not None:
                value = [*value, *value] if key == "regions" and len(value) == 1 else value
                if not (len(value) == 2 and all(isinstance(one, int) for one in value)):
                    raise EncoderError(f"{key} must be two whole numbers, as (2, 2), not {value!r}")
                object.__setattr__(self, key, tuple(value))
        if self.prompt is not None and "{}" not in self.prompt:
            raise EncoderError(f"the prompt {self.prompt!r} must contain {{}}, where the caption stands")
        for key in ("image_size", "frames"):
            if (value := getattr(self, key)) is not None and value < 1:
                raise EncoderError(f"{key} must be at least 1, not {value}")

    @property
    def half(self) -> bool:
        """Whether a GPU computes in bfloat16."""
        return self.dtype == "float16"

    @property
    def model(self) -> str:
        """The name without the family that it begins with."""
        return self.name.partition(":")[2] or self.name

    @property
    def source(self) -> str | None:
        """What names the weights: a file, folder, hub id or ``random:SEED``; None: the published ones."""
        return self.model if self.name.startswith(HUB) else self.weights

    def with_source(self, source: str) -> "EncoderSpec":
        """Return the spec with other weights, however it names them."""
        if self.name.startswith(HUB):
            return replace(self, name=f"{HUB}{source.removeprefix(HUB)}")
        return replace(self, weights=source)

    def located(self, versions: dict[str, str]) -> "EncoderSpec":
        """Return the spec to be recorded: an absolute path, or the commit in `versions` of a hub id; not trusted."""
        spec, commit = replace(self, trust=False), versions.get("commit")
        if spec.source is None or spec.source.startswith("random:"):
            return spec
        if Path(spec.source).exists():
            return spec.with_source(str(_whole(Path(spec.source))))
        return spec.with_source(f"{spec.source.partition('@')[0]}@{commit}") if commit else spec

    def without_folders(self) -> "EncoderSpec":
        """Return the spec for another machine: of a path only the name stays."""
        source = self.source
        return self.with_source(f"./{Path(source).name}") if source and Path(source).is_absolute() else self

    @property
    def missing(self) -> bool:
        """Whether the weights are a path at which nothing lies."""
        source = self.source or ""
        return source.startswith(("/", "./")) and not Path(source).exists()

    def require(self, takes: Collection[str]) -> None:
        """Raise EncoderError if an option is set that is not in `takes`, nor ``dtype`` or ``trust``."""
        for field in fields(self)[1:]:
            if field.name not in {"dtype", "trust", *takes} and getattr(self, field.name) != field.default:
                known = ", ".join(sorted(takes)) or "no options"
                raise EncoderError(f"'{self.name}' does not take {field.name}; leave it out (it takes {known})")

    def to_json(self) -> dict[str, Any]:
        """Return the options that are not the defaults, pairs as lists."""
        given = {field.name: value for field in fields(self) if (value := getattr(self, field.name)) != field.default}
        return {name: [*value] if isinstance(value, tuple) else value for name, value in given.items()}

    @classmethod
    def from_json(cls, values: Any) -> "EncoderSpec":
        """Return what `to_json` gave; EncoderError for anything else."""
        known = {field.name for field in fields(cls)}
        if not (isinstance(values, dict) and isinstance(values.get("name"), str) and values.keys() <= known):
            raise EncoderError(f"{values!r} does not describe an encoder")
        return cls(**values)


def _whole(path: Path) -> Path:
    """Return an absolute path that keeps its own name, also where that is a link."""
    return path.resolve() if path.name in ("", "..") else path.parent.resolve() / path.name


def short_name(source: str) -> str:
    """Return the last part of a hub id or path, as a set's name begins; of a fine-tuned backbone its run and branch."""
    path = Path(source)
    last = _whole(path).name if path.is_dir() or path.is_absolute() else source.partition("@")[0].rpartition("/")[2]
    if last.endswith("_backbone"):
        last = f"{path.resolve().parent.name}-{last.removesuffix('_backbone')}"
    return re.sub(r"[^\w.-]+", "-", last, flags=re.ASCII).strip(".-") or "hf"
