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


@dataclass(frozen=True)
class Options:
    """What to extract, and how; CacheError if a value cannot be."""

    visual: EncoderSpec | None  # None: no images
    text: EncoderSpec | None  # None: no captions
    splits: tuple[str, ...] = DEFAULT_SPLITS  # which to compute now
    batch_size: int = 64  # samples encoded at once
    device: str = "auto"  # or ``cpu``, ``cuda`` or ``cuda:N``
    # Threads that read pictures, None: one a core, eight at most; or the address of a Dask scheduler, tcp://HOST:PORT.
    workers: int | str | None = None
    reuse: str | None = None  # a store with features of the same pictures and captions, which are copied
    on_error: str = "fail"  # or ``skip`` to record a sample that cannot be read, and go on
    repair: bool = False  # compute chunks again that are damaged or hold samples that failed
    layers: tuple[int, ...] = ()  # of each encoder but ``words``, a set each; empty: that of its spec

    def __post_init__(self) -> None:
        if self.visual is self.text is None or not self.splits:
            raise CacheError("nothing to extract: give an encoder of images or captions, and at least one split")
        for spec in (self.visual, self.text):
            require_dtype(spec.dtype if spec else "float16")
        if self.on_error not in ("fail", "skip"):
            raise CacheError(f"on_error is '{self.on_error}'; give fail or skip")
        for name in ("batch_size", "workers"):
            value = getattr(self, name)
            given = value if value is not None and not (name == "workers" and isinstance(value, str)) else 1
            if not isinstance(given, Integral) or int(given) < 1:
                raise CacheError(f"{name} is {value!r}; give a whole number of at least 1")

    def of_layers(self, spec: EncoderSpec | None) -> list[EncoderSpec]:
        """Return the spec of each set that an encoder gives, `visual` or `text`; none of None."""
        if spec is None or spec.name == "words" or not self.layers:
            return [] if spec is None else [spec]
        return [replace(spec, layer=layer) for layer in dict.fromkeys(self.layers)]

    @property
    def cluster(self) -> str | None:
        """The address of a Dask scheduler; None: this process."""
        return self.workers if isinstance(self.workers, str) else None


_OF_PICTURES = ("image_size", "whole", "pool", "views", "regions", "frames")  # options of the image encoder alone


def build_options(
    *,
    visual: str | None = "resnet152",
    text: str | None = "bert",
    encoder: str | None = None,
    visual_weights: str | None = None,
    text_weights: str | None = None,
    layers: Sequence[int] = (-1,),
    prompt: str | None = None,
    dtype: str = "float16",
    trust: bool = False,
    splits: str | Sequence[str] = DEFAULT_SPLITS,
    run: Mapping[str, EncoderSpec] | None = None,
    **how: Any,
) -> Options:
    """Return the options that the command line and Python take by their names.

    Args:
        visual, text: names of the encoders; None or ``none``: none.
        encoder: of images and captions, ``hf:ID|DIR`` or ``open_clip:ARCH/TAG``, in the place of both.
        layers: whose local features are cached, as a set each, of each encoder but ``words``.
        visual_weights, text_weights, prompt, dtype, trust: see `EncoderSpec`.
        splits: names, or one text with commas.
        run: the specs of a fine-tuned run's backbones by ``image`` and ``text``, in the place of all these.
        how: further fields of `EncoderSpec` for images, and of `Options`.

    Raises:
        CacheError, EncoderError: a value cannot be.
    """
    of_pictures = {key: how.pop(key) for key in _OF_PICTURES if key in how}
    how["splits"] = tuple(filter(None, splits.split(","))) if isinstance(splits, str) else tuple(splits)
    if isinstance(layers, int) or not layers or not all(isinstance(layer, int) for layer in layers):
        raise EncoderError(f"layers is {layers!r}; give whole numbers in a list, as [6, 9, 12]")
    both_by_default = (visual, text) == ("resnet152", "bert")
    if run is not None:
        others = (encoder, visual_weights, text_weights, prompt, dtype != "float16", *of_pictures.values())
        if not both_by_default or tuple(layers) != (-1,) or any(others):
            raise CacheError("the run given as --encoder decides the encoders and their options; leave the others out")
        return Options(run.get("image"), run.get("text"), **how)
    if encoder is not None:
        if not both_by_default:
            raise CacheError("--encoder is in the place of --visual and --text; leave one or the other out")
        if not encoder.startswith((HUB, "open_clip:")):
            raise EncoderError(
                f"--encoder {encoder}: give a model of pictures and texts as {HUB}ID, {HUB}DIR or open_clip:ARCH/TAG,"
                " the folder of a fine-tuned run, or --visual and --text"
            )
        visual = text = encoder
    common: dict[str, Any] = {"dtype": dtype, "trust": trust}
    visual, text = (None if name == "none" else name for name in (visual, text))
    texts = {"text_weights": text_weights, "prompt": prompt}
    for side, name, own in (
        ("visual", visual, {"visual_weights": visual_weights} | of_pictures),
        ("text", text, texts),
    ):
        if name is None and (idle := [key for key, value in own.items() if value]):
            raise EncoderError(f"--{side} is none, which takes no {idle[0]}; leave that out, or name an encoder")
    images = None if visual is None else EncoderSpec(str(visual), visual_weights, **of_pictures, **common)
    captions = None if text is None else EncoderSpec(str(text), text_weights, prompt=prompt, **common)
    return Options(images, captions, layers=tuple(layers), **how)


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
