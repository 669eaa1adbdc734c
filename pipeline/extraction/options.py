"""What to extract, and how."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from importlib.metadata import version
from numbers import Integral
from pathlib import Path
from typing import Any

from ..data.samples import Samples
from ..encoders.spec import HUB, EncoderSpec
from ..errors import CacheError, EncoderError
from ..store.create import require_dtype

DEFAULT_SPLITS = ("train", "val", "test")


@dataclass(frozen=True, kw_only=True)
class Filling:
    """Which samples are put into a store now, and what becomes of those that cannot be read."""

    splits: tuple[str, ...] = DEFAULT_SPLITS  # or one text with commas
    on_error: str = "fail"  # or ``skip`` to record a sample that cannot be read, and go on
    repair: bool = False  # fill chunks again that are damaged or hold samples that failed

    def __post_init__(self) -> None:
        names = self.splits.split(",") if isinstance(self.splits, str) else self.splits
        object.__setattr__(self, "splits", tuple(filter(None, names)))
        if self.on_error not in ("fail", "skip"):
            raise CacheError(f"on_error is '{self.on_error}'; give fail or skip")


@dataclass(frozen=True)
class Options(Filling):
    """What to extract, and how; CacheError or EncoderError if a value cannot be."""

    visual: EncoderSpec | None  # None: no images
    text: EncoderSpec | None  # None: no captions
    batch_size: int = 64  # samples encoded at once
    device: str = "auto"  # or ``cpu``, ``cuda`` or ``cuda:N``
    # Threads that read pictures, None: one a core, eight at most; or the address of a Dask scheduler, tcp://HOST:PORT.
    workers: int | str | None = None
    reuse: str | None = None  # a store with features of the same pictures and captions, which are copied
    layers: Sequence[int] | None = None  # of each encoder but ``words``, a set each; None: that of its spec

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.sides or not self.splits:
            raise CacheError("nothing to extract: give an encoder of images or captions, and at least one split")
        if self.layers is not None:
            numbers = self.layers if isinstance(self.layers, Sequence) else ()
            if not numbers or not all(isinstance(layer, int) for layer in numbers):
                raise EncoderError(f"layers is {self.layers!r}; give whole numbers in a list, as [6, 9, 12]")
            object.__setattr__(self, "layers", tuple(numbers))
        for spec in self.sides.values():
            require_dtype(spec.dtype)
        counts: dict[str, Any] = {"batch_size": self.batch_size, "workers": self.workers}
        if self.workers is None or self.cluster:
            del counts["workers"]
        for name, count in counts.items():
            if not isinstance(count, Integral) or int(count) < 1:
                raise CacheError(f"{name} is {count!r}; give a whole number of at least 1")

    @property
    def sides(self) -> dict[str, EncoderSpec]:
        """The encoders by side, ``images`` and ``captions``, as the store names them."""
        sides = {"images": self.visual, "captions": self.text}
        return {side: spec for side, spec in sides.items() if spec is not None}

    def of_layers(self, side: str) -> list[EncoderSpec]:
        """Return the spec of each set that the encoder of a side gives."""
        spec = self.sides[side]
        if spec.name == "words" or not self.layers:
            return [spec]
        return [replace(spec, layer=layer) for layer in dict.fromkeys(self.layers)]

    @property
    def cluster(self) -> str | None:
        """The address of a Dask scheduler; None: this process."""
        return self.workers if isinstance(self.workers, str) else None


# By side its options, and the field of its spec that each is.
_FIELDS = {
    "visual": {"visual_weights": "weights"}
    | {name: name for name in ("image_size", "whole", "pool", "views", "regions", "frames", "dtype", "trust")},
    "text": {"text_weights": "weights"} | {name: name for name in ("prompt", "dtype", "trust")},
}
_DEFAULTS = {name: getattr(EncoderSpec, field) for side in _FIELDS.values() for name, field in side.items()}


def build_options(
    *,
    visual: str | None = "resnet152",
    text: str | None = "bert",
    encoder: str | Path | None = None,
    layers: Sequence[int] = (-1,),
    run: Mapping[Any, EncoderSpec] | None = None,
    **given: Any,
) -> Options:
    """Return the options that the command line and Python take by their names.

    Args:
        visual, text: names of the encoders; None or ``none``: none.
        encoder: of images and captions, ``hf:ID|DIR`` or ``open_clip:ARCH/TAG``, in the place of both.
        layers: whose local features are cached, as a set each, of each encoder but ``words``.
        run: the specs of a fine-tuned run's backbones by ``image`` and ``text``, in the place of all these.
        given: fields of `Options`, and those of `EncoderSpec` for each side, see `_FIELDS`.

    Raises:
        CacheError, EncoderError: a value cannot be.
    """
    names, by_default = {"visual": visual, "text": text}, (visual, text) == ("resnet152", "bert")
    how: dict[str, Any] = {name: value for name, value in given.items() if name not in _DEFAULTS}
    chosen = {name: value for name, value in given.items() if value != _DEFAULTS.get(name, value)}
    if run is not None:
        if not by_default or encoder or chosen.keys() - {"trust"} or layers not in ((-1,), [-1]):
            raise CacheError("the run given as --encoder decides the encoders and their options; leave the others out")
        return Options(run.get("image"), run.get("text"), **how)
    if encoder is not None:
        if not by_default:
            raise CacheError("--encoder is in the place of --visual and --text; leave one or the other out")
        encoder = str(encoder)
        if not encoder.startswith((HUB, "open_clip:")):
            raise EncoderError(
                f"--encoder {encoder}: give a model of pictures and texts as {HUB}ID, {HUB}DIR or open_clip:ARCH/TAG,"
                " the folder of a fine-tuned run, or --visual and --text"
            )
        names = dict.fromkeys(names, encoder)
    images, captions = (_spec(side, name, chosen) for side, name in names.items())
    return Options(images, captions, layers=layers, **how)


def _spec(side: str, name: str | None, chosen: Mapping[str, Any]) -> EncoderSpec | None:
    """Return the spec of a side's encoder, of the options that were chosen; None where it has no encoder."""
    own = {option: chosen[option] for option in _FIELDS[side] if option in chosen}
    if name not in (None, "none"):
        return EncoderSpec(str(name), **{_FIELDS[side][option]: value for option, value in own.items()})
    if idle := [option for option in own if option not in ("dtype", "trust")]:
        raise EncoderError(f"--{side} is none, which takes no {idle[0]}; leave that out, or name an encoder")
    return None


def recorded_options(spec: EncoderSpec) -> dict[str, Any]:
    """Return what a set keeps of a spec: a later extraction with the same has nothing to do, and loads no encoder."""
    kept: dict[str, Any] = {"spec": replace(spec, trust=False).to_json(), "xret": version("xret")}
    source = Path(spec.source) if spec.source else None
    if source is not None and source.exists():
        files = sorted(file for file in ([source] if source.is_file() else source.rglob("*")) if file.is_file())
        kept["weights"] = [[file.name, file.stat().st_size, file.stat().st_mtime_ns] for file in files]
    return kept


def choose_splits(samples: Samples, wanted: tuple[str, ...]) -> tuple[str, ...]:
    """Return those of `wanted` that the data set has, in row order.

    CacheError: the data set lacks one of them, or in case of the default all.
    """
    unknown = [split for split in wanted if split not in samples.splits]
    if unknown and (wanted != DEFAULT_SPLITS or len(unknown) == len(wanted)):
        there = ", ".join(samples.splits)
        mapped = ", or map their own names in the manifest with merge_splits" if "other" in samples.splits else ""
        raise CacheError(
            f"'{samples.dataset}' has no image in split {', '.join(unknown)}; it has {there}: choose with"
            f" --splits{mapped}"
        )
    return tuple(split for split in samples.splits if split in wanted)
