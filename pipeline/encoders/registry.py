"""Which class makes an encoder, and one function that loads it. Nothing stays loaded: an encoder is its caller's.

An encoder registers by its line in `IMAGES` or `TEXTS`. Only its own module imports torch or a library.
"""

import difflib
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from copy import copy
from pkgutil import resolve_name
from typing import TYPE_CHECKING, Any, NamedTuple

from ..errors import EncoderError, XretError
from ..wording import raised
from .spec import HUB, EncoderSpec
from .threads import loading

if TYPE_CHECKING:
    from .base import TextEncoder, VisualEncoder


class Registered(NamedTuple):
    """An encoder, or a family of them."""

    where: str  # module of this package, and class
    when: str = ""  # to take it, for `xret list encoders`; none where the same name of the other side says it
    listed: str = ""  # how that names a family


_TIMM, _OPEN_CLIP = "timm:", "open_clip:"
_FAMILIES = (HUB, _TIMM, _OPEN_CLIP)  # names begin with them
_OWN = "MODULE:CLASS"
_TORCHVISION = "resnet152"  # for all of its classifiers
IMAGES = {
    _TORCHVISION: Registered("grid:GridEncoder", "for papers' grids; or another torchvision classifier"),
    HUB: Registered(
        "libraries.timm_images:HubEncoder", "for strong features: DINOv2, CLIP, SigLIP and others", f"{HUB}ID"
    ),
    _TIMM: Registered(
        "libraries.timm_images:TimmEncoder", "for a network that transformers does not have", f"{_TIMM}NAME"
    ),
    _OPEN_CLIP: Registered(
        "libraries.open_clip:ClipImageEncoder",
        "for a CLIP of open_clip, or its weights in a file",
        f"{_OPEN_CLIP}ARCH/TAG",
    ),
    "butd": Registered("detectors.butd:ButdEncoder", "for papers' 36 regions of bottom-up attention"),
    "butd-grid": Registered("detectors.butd:ButdGridEncoder", "for a grid of that network, without time for boxes"),
    "fasterrcnn_resnet50_fpn_v2": Registered(
        "detectors.torchvision_detector:DetectorEncoder", "for regions without the weights of butd"
    ),
    "plain-ground": Registered("detectors.plain_ground:PlainGroundEncoder", "for the demo's drawings, without weights"),
    _OWN: Registered("own:OwnImageEncoder", "for a class that you have written"),
}
TEXTS = {
    "bert": Registered("huggingface.texts:HubTextEncoder", "pretrained states of tokens, for few training texts"),
    "words": Registered("words:WordsEncoder", "ids of words for a GRU, for many training texts"),
    HUB: Registered("huggingface.texts:HubTextEncoder"),
    _OPEN_CLIP: Registered("libraries.open_clip:ClipTextEncoder"),
    _OWN: Registered("own:OwnTextEncoder"),
}


def listed() -> dict[str, str]:
    """Return when to take each encoder, as `xret list encoders` names it."""
    return {one.listed or name: one.when for side in (IMAGES, TEXTS) for name, one in side.items() if one.when}


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
            encoder.choose(spec.layer)
        encoder.spec = spec.located(encoder.versions)
        encoders.setdefault(str(encoder.identity.get("layer")), encoder)
    return list(encoders.values())


@contextmanager
def _building(spec: EncoderSpec) -> Iterator[None]:
    """Be alone with torch, and name the encoder in what its library raises, which may be anything."""
    import torch

    try:
        with loading():
            yield
    except (XretError, MemoryError, torch.OutOfMemoryError):
        raise
    except Exception as error:
        size = f" for images of {spec.image_size} pixels" if spec.image_size else ""
        what = f"{spec.name}, weights {spec.weights}," if spec.weights else spec.name
        advice = "leave --image-size out, or choose another" if size else "check its weights, or the connection"
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


def _class_of(name: str, encoders: dict[str, Registered]) -> Any:
    family = _OWN if is_own(name) else next((start for start in _FAMILIES if name.startswith(start)), name)
    found = encoders.get(family, encoders.get(_TORCHVISION))
    if found is None:
        raise unknown(name, [*encoders], "text encoder")
    return resolve_name(f"{__package__}.{found.where}")
