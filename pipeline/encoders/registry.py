"""Which class makes an encoder, and one function that loads it. Nothing stays loaded: an encoder is its caller's.

An encoder registers by its line in `IMAGES` or `TEXTS`. Only its own module imports torch or a library.
"""

import difflib
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from copy import copy
from pkgutil import resolve_name
from typing import TYPE_CHECKING, Any

from ..errors import EncoderError, XretError
from ..wording import raised
from .spec import HUB, EncoderSpec
from .threads import alone

if TYPE_CHECKING:
    from .base import TextEncoder, VisualEncoder


_FAMILIES = (HUB, "timm:", "open_clip:")  # names begin with them
_OWN, _TORCHVISION = "MODULE:CLASS", "resnet152"  # any class of a user's, and any classifier
# By name, or as those of a family are listed, module and class, and when to take it: a line of `xret list encoders`,
# but for an empty one.
IMAGES = {
    _TORCHVISION: ("grid:GridEncoder", "for papers' grids; or another torchvision classifier"),
    "hf:ID": ("libraries.timm_images:HubEncoder", "for strong features: DINOv2, CLIP, SigLIP and others"),
    "timm:NAME": ("libraries.timm_images:TimmEncoder", "for a network that transformers does not have"),
    "open_clip:ARCH/TAG": ("libraries.open_clip:ClipImageEncoder", "for a CLIP of open_clip, or its weights in a file"),
    "butd": ("detectors.butd:ButdEncoder", "for papers' 36 regions of bottom-up attention"),
    "butd-grid": ("detectors.butd:ButdGridEncoder", "for a grid of that network, without time for boxes"),
    "fasterrcnn_resnet50_fpn_v2": (
        "detectors.torchvision_detector:DetectorEncoder",
        "for regions without the weights of butd",
    ),
    "plain-ground": ("detectors.plain_ground:PlainGroundEncoder", "for the demo's drawings, without weights"),
    _OWN: ("own:OwnImageEncoder", "for a class that you have written"),
}
TEXTS = {
    "bert": ("huggingface.texts:HubTextEncoder", "pretrained states of tokens, for few training texts"),
    "words": ("words:WordsEncoder", "ids of words for a GRU, for many training texts"),
    "hf:ID": ("huggingface.texts:HubTextEncoder", ""),
    "open_clip:ARCH/TAG": ("libraries.open_clip:ClipTextEncoder", ""),
    _OWN: ("own:OwnTextEncoder", ""),
}


def listed() -> dict[str, str]:
    """Return when to take each encoder."""
    return {name: when for side in (IMAGES, TEXTS) for name, (_, when) in side.items() if when}


def is_own(name: str) -> bool:
    """Return whether the name of an encoder is the import path of a user's own class."""
    return ":" in name and not name.startswith(_FAMILIES)


def load_visual(spec: EncoderSpec, device: str) -> "VisualEncoder":
    """Return a new image encoder on `device`: ``cpu``, ``cuda`` or ``cuda:N``.

    Raises:
        EncoderError: the name is unknown, the weights do not fit or cannot be loaded, or an option does not fit.
    """
    return load_visual_layers([spec], device)[0]


def load_visual_layers(specs: Sequence[EncoderSpec], device: str) -> "list[VisualEncoder]":
    """Return image encoders by specs that differ in their layers alone; they share a network, see `encode_layers`.

    Specs of the same layer, as 11 and -1 of twelve, make one encoder. Errors as of `load_visual`.
    """
    make, (spec, *_) = _class_of(specs[0].name, IMAGES), specs
    for one in specs:
        one.require(make.takes)
        if one.frames is not None and (one.pool or one.views or one.layer != -1):
            raise EncoderError(
                "--frames takes the global feature of each frame; leave --pool, --views and --layers out"
            )
    with _building(spec):
        encoder: Any = make(spec, device)
        if not is_own(spec.name):
            encoder.identity["preprocessing"] |= {"orientation": "exif"} | ({"whole": True} if spec.whole else {})
        if spec.whole:
            encoder.longest = None
        encoders = _of_layers(encoder, specs)
        if spec.pool or spec.views or spec.frames:
            from .wrappers import wrap

            encoders = [wrap(one, spec) for one in encoders]
    return encoders


def load_text(spec: EncoderSpec, device: str) -> "TextEncoder":
    """Return a new caption encoder on `device`; errors as of `load_visual`.

    Of ``words``, which have no weights, `words.WordsEncoder.build` makes one.
    """
    return load_text_layers([spec], device)[0]


def load_text_layers(specs: Sequence[EncoderSpec], device: str) -> "list[TextEncoder]":
    """Return caption encoders as `load_visual_layers` does image encoders."""
    spec = specs[0]
    make = _class_of(spec.name, TEXTS)
    for one in specs:
        one.require(make.takes)
    with _building(spec):
        return _of_layers(make(spec, device), specs)


def _of_layers(encoder: Any, specs: Sequence[EncoderSpec]) -> list[Any]:
    """Return an encoder, made by the first of these specs, and those of the other layers, which share its network."""
    encoders: dict[str, Any] = {}
    for number, spec in enumerate(specs):
        if number:
            encoder = copy(encoder)
            encoder.use_layer(spec.layer)
        encoder.spec = spec.located(encoder.versions)
        encoders.setdefault(str(encoder.identity.get("layer")), encoder)
    return list(encoders.values())


@contextmanager
def _building(spec: EncoderSpec) -> Iterator[None]:
    """Be alone with torch, whose random numbers, which may be seeded meanwhile, then go on as before.

    What a library raises becomes an EncoderError that names the encoder.
    """
    import torch

    try:
        with alone(), torch.random.fork_rng(devices=[]):
            yield
    except (XretError, MemoryError, torch.OutOfMemoryError):
        raise
    except Exception as error:
        size = f" for images of {spec.image_size} pixels" if spec.image_size else ""
        what = f"{spec.name}, weights {spec.weights}," if spec.weights else spec.name
        advice = "leave --image-size out, or choose another" if size else "check its weights, or the connection"
        advice = "correct the class" if is_own(spec.name) else advice
        raise EncoderError(f"{what} cannot be loaded{size} ({raised(error)}); {advice}") from error


def unknown(name: str, known: list[str], what: str = "encoder") -> EncoderError:
    """Return the error for an encoder that does not exist, with the nearest name or family."""
    if found := re.fullmatch(r"([^:/]+)[:/](.+)", name):
        beginning = found[1].lower().replace("-", "_")
        family = difflib.get_close_matches(f"{beginning}:", _FAMILIES, n=1, cutoff=0.8)
        near = f"{family[0]}{found[2]}" if family else "" if ":" in name else f"{HUB}{name}"
    else:
        near = next(iter(difflib.get_close_matches(name, known, n=1)), "")
    hint = f" (did you mean '{near}'?)" if near else ""
    return EncoderError(f"there is no {what} '{name}'{hint}; `xret list encoders` lists them")


def _class_of(name: str, encoders: dict[str, tuple[str, str]]) -> Any:
    family = next((start for start in _FAMILIES if name.startswith(start)), None)
    known = next((key for key in encoders if key == name or (family and key.startswith(family))), _TORCHVISION)
    known = _OWN if is_own(name) else known
    if known not in encoders:
        raise unknown(name, [*encoders], "text encoder")
    return resolve_name(f"{__package__}.{encoders[known][0]}")
