"""How to extract: the command line's options, and which of them decide the features.

A set remembers the latter, so that an extraction with nothing left to do ends without loading an encoder.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from importlib.metadata import PackageNotFoundError, version
from numbers import Integral
from pathlib import Path
from typing import Any

from ..cache.facts import require_dtype, require_on_error
from ..cache.layout import DEFAULT_SPLITS
from ..encoders import (
    HUB,
    IMAGE_SIZE,
    LIBRARIES,
    OPEN_CLIP,
    REGION_ENCODERS,
    TextEncoder,
    VisualEncoder,
    is_own,
    load_text,
    load_visual,
)
from ..encoders.weights_source import WeightsSource, sha256_of
from ..encoders.words import TOKENIZER
from ..errors import CacheError, EncoderError, nearest

_MOST_IN_SHARD = 1 << 16  # images, which are written together


@dataclass(frozen=True)
class Options:
    """How to extract; the command line's options, with its defaults."""

    # A torchvision network, ``butd``, ``butd-grid``, a detector, ``hf:`` and a hub id or folder, ``timm:NAME[.TAG]``,
    # ``open_clip:ARCH[/TAG]``; None: no images.
    visual: str | None = "resnet152"
    visual_weights: str = "imagenet"  # or a file, or ``random:SEED``
    visual_layer: int = -1  # which gives the local features; -1: the last
    image_size: int | None = None  # side of the square input of grids, pixels; None: the model's own, else 224
    whole: bool = False  # make the square input of whole pictures, where the network takes their middle
    regions: tuple[int, int] | None = None  # fewest and most boxes of an image, for region encoders; None: 36
    frames: int | None = None  # an image is a folder of frames, of which at most so many are taken; None: a picture
    views: int = 1  # of each picture; the first is the picture as it is
    augment: str | None = None  # what makes the others: ``crop-flip`` or ``dihedral``
    pool: tuple[int, int] | None = None  # height and width of windows in which a grid is averaged; None: it is not
    # Apply EXIF orientations; sets that an earlier version began do not. The command line has no such option.
    upright: bool = True
    trust: bool = False  # let a file of weights run code while it is read
    # Or ``words``, or ``hf:`` and a hub id or folder, or ``open_clip:ARCH[/TAG]``; None: no captions.
    text: str | None = "bert"
    # Hub id or folder of a BERT-family model; of ``open_clip:`` a file or ``random:SEED``, by default those of the tag.
    text_weights: str = "bert-base-uncased"
    min_count: int | None = None  # of a word of ``words`` in the training captions; None: see `min_count_for`
    text_layer: int = -1  # whose hidden states are the features: 0 the embeddings, -1 the last
    special_tokens: bool = True  # keep the states of the special tokens
    max_tokens: int | None = None  # tokens of a caption that are encoded; None: what the model takes
    prompt: str | None = None  # what is encoded in the place of a caption, which stands in it for ``{}``
    splits: tuple[str, ...] = DEFAULT_SPLITS  # to compute now
    batch_size: int = 64  # samples encoded at once
    dtype: str = "float16"  # or ``float32``
    shard_images: int | None = None  # images in a shard; None: `Blocks.choose`
    device: str = "auto"  # or ``cpu`` or ``cuda``
    workers: int | None = None  # threads that read and write beside the encoder; None: one a core, at least two
    on_error: str = "fail"  # or ``skip``: record a sample that cannot be read, and go on
    scheduler: str | None = None  # address of a Dask scheduler; None: this process
    repair: bool = False  # compute shards again that are damaged or hold samples that failed
    update: bool = False  # go on where the data set has changed, in a new generation of the store

    def __post_init__(self) -> None:
        require_dtype(self.dtype)
        require_on_error(self.on_error)
        for name in ("batch_size", "workers", "views"):
            if (count := getattr(self, name)) is not None and not (isinstance(count, Integral) and int(count) >= 1):
                raise CacheError(f"{name} must be a whole number of at least 1, not {count!r}")
        if self.pool is not None and not (isinstance(self.pool, tuple) and len(self.pool) == 2):
            raise CacheError(f"pool must be height and width of a window, as (2, 2), not {self.pool!r}")
        if not (self.text in (None, "bert", "words") or str(self.text).startswith((HUB, OPEN_CLIP))):
            there = "bert, words, hf:ID, hf:DIR and open_clip:ARCH/TAG"
            raise EncoderError(
                f"there is no text encoder '{self.text}'{nearest(str(self.text), ['bert', 'words'])}; there are {there}"
            )
        if self.shard_images is not None and not 1 <= self.shard_images <= _MOST_IN_SHARD:
            raise CacheError(
                f"a shard holds from 1 to {_MOST_IN_SHARD} images, not {self.shard_images}; give another --shard-images"
            )
        if self.min_count is not None and self.min_count < 1:
            raise CacheError(f"a word occurs at least once, not {self.min_count} times; give another --min-count")

    def load_visual(self, device: str) -> VisualEncoder:
        """Return the image encoder; errors as for `encoders.load_visual`."""
        return load_visual(
            self.visual or "",
            self.visual_weights,
            self.image_size,
            device,
            layer=self.visual_layer,
            half=self.dtype == "float16",
            whole=self.whole,
            regions=self.regions,
            frames=self.frames,
            views=self.views,
            augment=self.augment,
            pool=self.pool,
            upright=self.upright,
            trust=self.trust,
        )

    def load_text(self, device: str) -> TextEncoder:
        """Return the caption encoder that has weights; errors as for `encoders.load_text`."""
        how: dict[str, Any] = {**self._text_settings, "half": self.dtype == "float16", "trust": self.trust}
        text = self.text or ""
        if text.startswith(OPEN_CLIP):
            return load_text(text, device, **how, file=self.text_file)
        return load_text(text if text.startswith(HUB) else self.text_weights, device, **how)

    @property
    def text_file(self) -> str:
        """The weights of a text encoder; of a tower of open_clip in the words of `visual_weights`."""
        own = (self.text or "").startswith(OPEN_CLIP) and self.text_weights == Options.text_weights
        return "imagenet" if own else self.text_weights

    @property
    def _text_settings(self) -> dict[str, Any]:
        settings = {"layer": self.text_layer, "special_tokens": self.special_tokens, "max_tokens": self.max_tokens}
        return settings if self.prompt is None else {**settings, "prompt": self.prompt}

    def asked(self, modality: str) -> dict[str, Any] | None:
        """Return the options that decide the features of ``images`` or ``captions``, with all files in them hashed.

        None where they do not decide them: the hub may hold anything under a name that is not in its local cache.
        """
        if modality == "images":
            settings: dict[str, Any] = {"regions": self.regions, "frames": self.frames}
            if self.visual not in REGION_ENCODERS:
                own = (self.visual or "").startswith((HUB, *LIBRARIES))
                settings["image_size"] = self.image_size or (None if own else IMAGE_SIZE)
            if is_own(self.visual or ""):
                return None  # nobody knows what its program has become
            if self.whole:
                settings["whole"] = True
            if self.pool is not None:
                settings["pool"] = self.pool
            if self.visual_layer != -1:
                settings["visual_layer"] = self.visual_layer
            if not self.upright:
                settings["upright"] = False
            if (self.views, self.augment) != (1, None):
                settings |= {"views": self.views, "augment": self.augment}
            return _words(self.visual or "", self.visual_weights, self.dtype, settings)
        if self.text == "words":
            return _words("words", "", "int32", {"tokenizer": TOKENIZER, "min_count": self.min_count})
        return _words(self.text or "", self.text_file, self.dtype, self._text_settings)


def at_commits(options: Options, images: VisualEncoder | None, captions: TextEncoder | None) -> Options:
    """Return the options with the commits of the hub that were loaded: tomorrow its branches may be others."""
    visual, text = ({} if encoder is None else encoder.versions for encoder in (images, captions))
    by_weights = options.text == "bert"
    return replace(
        options,
        visual=options.visual and _at_commit(options.visual, visual),
        text=options.text if by_weights else options.text and _at_commit(options.text, text),
        text_weights=_at_commit(options.text_weights, text) if by_weights else options.text_weights,
    )


def _at_commit(name: str, versions: Mapping[str, str]) -> str:
    return f"{name.partition('@')[0]}@{versions['commit']}" if "commit" in versions else name


def source_of(options: Options, modality: str, resolved: str | None) -> WeightsSource | None:
    """Return where the weights of the encoder of ``images`` or ``captions`` come from.

    None where their name says it everywhere: ``imagenet``, ``random:SEED``, or words.

    Args:
        options: how to extract.
        modality: which.
        resolved: the weights as `Options.asked` has them, where it has.
    """
    encoder = (options.visual if modality == "images" else options.text) or ""
    weights = options.visual_weights if modality == "images" else options.text_file
    if encoder.startswith(HUB):
        return WeightsSource.of(encoder.removeprefix(HUB), resolved)
    if encoder == "bert" or (encoder != "words" and weights not in ("imagenet", "") and Path(weights).exists()):
        return WeightsSource.of(weights, resolved)
    return None


def moved_to(options: Options, modality: str, resolved: str, attributes: Mapping[str, Any]) -> dict[str, Any] | None:
    """Return the attributes `source` and `command` of a set whose weights are not where it says; None: they are.

    Arguments as of `source_of`, and the attributes that the set has.
    """
    before, now = WeightsSource.from_json(attributes.get("source")), source_of(options, modality, resolved)
    if now is None or now.path is None or (before is not None and (before.path is None or Path(before.path).exists())):
        return None
    told: dict[str, Any] = {"source": now.to_json()}
    if before is not None and "command" in attributes:
        names = {f"{prefix}{before.path}": f"{prefix}{now.path}" for prefix in ("", HUB)}
        told["command"] = [names.get(word, word) for word in attributes["command"]]
    return told


def with_backbones(words: Mapping[str, Any], image: Path | None, text: Path | None) -> dict[str, Any]:
    """Return the options `words` of a fine-tuned run with the files or folders of its own backbones.

    Runs of earlier versions do not say whether they apply EXIF orientations, as they do not.

    Raises:
        KeyError: the options are incomplete.
    """
    weights = {"visual": image, "text": text}
    of_hub = [key for key in weights if words[key] == HUB.rstrip(":")]  # such an encoder names its weights itself
    named = {key if key in of_hub else f"{key}_weights": path for key, path in weights.items()}
    return {
        "upright": False,
        "whole": False,
        **words,
        **{key: f"{HUB}{path}" if key in of_hub else str(path) for key, path in named.items() if path is not None},
    }


def _words(encoder: str, weights: str, dtype: str, settings: Mapping[str, Any]) -> dict[str, Any] | None:
    if encoder.startswith(HUB):
        weights = encoder.removeprefix(HUB)
        encoder = HUB.rstrip(":") if Path(weights).is_dir() else encoder  # the name of a folder means nothing elsewhere
    resolved = _resolved(encoder, weights)
    if resolved is None:
        return None
    words = {"xret": version("xret"), "encoder": encoder, "weights": resolved, "dtype": dtype}
    if encoder.startswith(LIBRARIES):  # which says what a name without a tag means, and how pictures are prepared
        library = encoder.partition(":")[0]
        try:
            words[library] = version({"open_clip": "open_clip_torch"}.get(library, library))
        except PackageNotFoundError:  # loading the encoder says so
            return None
    return {**words, **{key: list(value) if isinstance(value, tuple) else value for key, value in settings.items()}}


def _resolved(encoder: str, weights: str) -> str | None:
    of_hub = encoder == "bert" or f"{encoder}:".startswith(HUB)
    if not of_hub and weights == "imagenet":
        return weights  # whatever lies in the working folder under that name
    path = Path(weights)
    if weights and (path.is_file() or path.is_dir()):  # some checkpoints have folders of their own
        return f"sha256:{sha256_of(path, flat=encoder == 'bert')}"
    if not of_hub:
        return weights
    from huggingface_hub import try_to_load_from_cache
    from huggingface_hub.errors import HFValidationError

    try:
        config = try_to_load_from_cache(weights, "config.json")
    except HFValidationError:
        return None
    return f"revision:{Path(config).parent.name}" if isinstance(config, str) else None
