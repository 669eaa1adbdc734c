"""Image models of timm: the map that `forward_intermediates` gives, and what goes into the classifier.

Source: timm's documentation, "Feature Extraction" and "Quickstart".
"""

import math
import sys
from contextlib import redirect_stdout
from typing import Any

from torch import Tensor, nn

from ...errors import EncoderError, nearest
from ...wording import reason
from ..base import library_versions, require_cut
from ..huggingface.hub import quiet
from ..huggingface.pixels import plain
from ..weights import misfits, noise_images, read_weights, require_finite, seed_or_file, seeded, settle_norms
from .pictures import LibraryGrid, load_library, seen

_SHAPING = ("input_size", "interpolation", "mean", "std", "crop_pct", "crop_mode")
_UNCUT = ("squash", 1.0)  # mode and share of a picture that is made a square as it is
_MODES = {"center": "crop", "squash": "squash", "border": "pad"}


class TimmEncoder(LibraryGrid):
    """Encode images as the cells or patches of a model of timm, and what it gives its classifier.

    The global feature is ``forward_head(forward_features(x), pre_logits=True)``.

    Args:
        name: of the model, and the tag of its pretrained weights where it is not the model's default.
        weights: ``imagenet``, which means those of the tag, a file, or ``random:SEED``.
        device: ``cpu``, ``cuda`` or ``cuda:N``.
        layer: which of the blocks or stages gives the local features: from 0, or -1, the last, after the model's norm.
        image_size: side of the input, pixels; None: that of the tag.
        half: let a GPU compute in bfloat16.
        trust: let a file of weights run code while it is read.
        whole: make the square of the whole picture, where the tag cuts out its middle or lays a border around it.

    Raises:
        EncoderError: timm is not installed, the name is unknown, the weights do not fit, or an option does not.
    """

    _norm = True  # whether the model's own norm goes over the last map

    def __init__(
        self,
        name: str,
        weights: str,
        device: str,
        layer: int = -1,
        image_size: int | None = None,
        *,
        half: bool = True,
        trust: bool = False,
        whole: bool = False,
    ) -> None:
        timm, what = load_library("timm", "timm"), f"timm:{name}"
        self.device, self._half = device, half
        config = _config(timm, name)
        size = _input_size(what, config, image_size)
        weights_id, network = _load(timm, what, config, weights, size, trust)
        data = timm.data.resolve_model_data_config(network, {"input_size": size})
        require_cut(what, (data["crop_mode"], data["crop_pct"]) != _UNCUT, whole)
        if whole:
            data["crop_mode"], data["crop_pct"] = _UNCUT
        self._transform = timm.data.create_transform(**data, is_training=False)
        self.network = network.to(device).eval().requires_grad_(False)
        self._settle(what, layer, size[1:])
        self.name = f"{config.architecture}.{config.tag}" if weights == "imagenet" else config.architecture
        self.identity = {
            "encoder": "timm",
            "weights": weights_id or self.weights_id(),
            "model": {"name": config.architecture, "tag": config.tag},
            "preprocessing": _preprocessing(data),
            "layer": self._layer_name(),
            "tokens_left_out": int(getattr(network, "num_prefix_tokens", 0)),
            "global": "pre_logits",
        }
        self.versions = library_versions("torch", "torchvision", "timm", "PIL")

    def _count(self, pixels: Tensor) -> int:
        network: Any = self.network
        try:
            maps = network.forward_intermediates(pixels, norm=True, intermediates_only=True)
        except AssertionError:  # Hiera's norm is not of a size with its map
            maps = network.forward_intermediates(pixels, intermediates_only=True)
            self._norm = False
        return len(maps)

    def _run(self, pixels: Tensor) -> tuple[Tensor, Tensor]:
        network: Any = self.network
        # Hieras would stop at the layer, and the global feature is that of the last one.
        options = {"norm": self._norm and self._last, "stop_early": False}
        final, (maps,) = network.forward_intermediates(pixels, indices=[self._layer], **options)
        return maps, network.forward_head(final, pre_logits=True)


def _config(timm: Any, name: str) -> Any:
    """Return what timm knows of a model's pretrained weights and pictures.

    Raises:
        EncoderError: there is no such model, or no such tag of it.
    """
    model, tag = timm.models.split_model_name_tag(name)
    if not timm.is_model(model):
        raise EncoderError(
            f"timm has no model '{model}'{nearest(model, timm.list_models())}; timm.list_models() lists them"
        )
    tags = [known.partition(".")[2] for known in timm.models.get_arch_pretrained_cfgs(model)]
    if tag and tag not in tags:
        raise EncoderError(
            f"timm's model '{model}' has no weights tagged '{tag}'{nearest(tag, tags)}; its tags are"
            f" {', '.join(tags) or 'none'}"
        )
    return timm.get_pretrained_cfg(name)


def _input_size(what: str, config: Any, image_size: int | None) -> tuple[int, int, int]:
    """Return channels, height and width of the pixels."""
    channels, height, width = config.input_size
    if channels != 3:
        raise EncoderError(f"{what} takes pictures of {channels} channels, and not RGB; choose another model")
    return (3, height, width) if image_size is None else (3, image_size, image_size)


def _load(
    timm: Any, what: str, config: Any, weights: str, size: tuple[int, int, int], trust: bool
) -> tuple[str | None, nn.Module]:
    """Build a model without its classifier; return its seed as an identity has it, if it has one, and itself."""
    arguments: dict[str, Any] = {"pretrained_cfg": config.tag or None}
    if config.fixed_input_size and size != tuple(config.input_size):
        arguments["img_size"] = size[1:]
    try:
        network: Any
        if weights == "imagenet":
            network = _pretrained(timm, what, config, arguments)
        elif isinstance(source := seed_or_file(weights, imagenet=True), int):
            with seeded(source):
                network = timm.create_model(config.architecture, **arguments)
                settle_norms(network, lambda: network(noise_images(16, max(size[1:]))[..., : size[1], : size[2]]))
        else:
            network = _of_file(timm, what, weights, config, read_weights(source, trust), arguments)
    except EncoderError:
        raise
    except (AssertionError, RuntimeError, TypeError, ValueError) as error:
        raise EncoderError(
            f"{what} does not take pictures of {size[1]} x {size[2]} pixels ({reason(error)}); leave --image-size"
            " out, or choose another"
        ) from error
    network.reset_classifier(0)  # its weights are no part of the features
    require_finite(network, f"weights '{weights}' of {what}" if weights != "imagenet" else f"the weights of {what}")
    return (weights if weights.startswith("random:") else None), network


def _pretrained(timm: Any, what: str, config: Any, arguments: dict[str, Any]) -> nn.Module:
    """Build a model with the weights of its tag, from the hub or its cache."""
    if not config.has_weights:
        raise EncoderError(f"timm has no weights of {what}; give a file as --visual-weights FILE, or random:SEED")
    try:
        with quiet(), redirect_stdout(sys.stderr):
            return timm.create_model(config.architecture, pretrained=True, **arguments)
    except (AssertionError, TypeError):  # of the model itself
        raise
    except Exception as error:  # the hub's library raises all kinds of errors without a connection
        where = config.hf_hub_id or config.url
        raise EncoderError(
            f"the weights of {what} cannot be fetched from {where} ({reason(error)}); check the connection, or give"
            " a file of them as --visual-weights FILE"
        ) from error


def _of_file(
    timm: Any, what: str, weights: str, config: Any, state: dict[str, Tensor], arguments: dict[str, Any]
) -> nn.Module:
    """Build a model and fill it from a state dict as timm fills it from the hub, whatever classes it tells apart.

    timm converts published names, and positions to the size of the pictures.
    """
    names = config.classifier or ()
    classifier = state.get(f"{names if isinstance(names, str) else next(iter(names), '')}.weight")
    classes = 0 if classifier is None else len(classifier)
    own = {"state_dict": state, "num_classes": classes, "label_offset": 0}
    try:
        network = timm.create_model(config.architecture, pretrained=True, pretrained_cfg_overlay=own, **arguments)
    except (AttributeError, KeyError, RuntimeError) as error:
        empty = timm.create_model(config.architecture, num_classes=classes, **arguments)
        shapes = {name: list(value.shape) for name, value in empty.state_dict().items()}
        faults = misfits(shapes, state, ()) or reason(error)
        raise EncoderError(
            f"{weights}: these weights do not fit {what}: {faults}; give the weights of this model"
        ) from error
    del network.pretrained_cfg["state_dict"]
    return network


def _preprocessing(data: dict[str, Any]) -> dict[str, Any]:
    """Return all that decides the pixels, for an identity."""
    _, height, width = data["input_size"]
    shown = {}
    if height == width:
        shown = seen(_MODES[data["crop_mode"] or "center"], height, math.floor(height / data["crop_pct"]))
    return {"decoder": "pillow", "processor": "timm", **{key: plain(data[key]) for key in _SHAPING}, **shown}
