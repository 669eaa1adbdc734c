"""Image models of timm: the map that `forward_intermediates` gives, and what goes into the classifier.

Source: timm's documentation, "Feature Extraction", "Quickstart" and "Sharing and Loading Models From the Hub".
"""

import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from ...documents import read_json
from ...errors import EncoderError, nearest
from .. import weights
from ..base import in_passes, library_versions, load_library, require_cut
from ..grid import GRID_OPTIONS, Grid
from ..huggingface.hub import Checkpoint, load_from, plain, quiet
from ..huggingface.images import HubImageEncoder, load_image_model
from ..spec import EncoderSpec, short_name

_SHAPING = ("input_size", "interpolation", "mean", "std", "crop_pct", "crop_mode")
_UNCUT = ("squash", 1.0)  # mode and share of a picture that is made a square as it is


class TimmEncoder(Grid):
    """Encode images as the cells or patches of a model of timm, and what it gives its classifier.

    The global feature is ``forward_head(forward_features(x), pre_logits=True)``. Layer 0 is the first block or stage,
    -1 the last, after the model's norm, and after the convolution with which an EfficientNet or a MobileNet ends.
    """

    takes = GRID_OPTIONS | {"layer"}

    def __init__(self, spec: EncoderSpec, device: str) -> None:
        timm = load_library("timm", "timm")
        known = timm.models.split_model_name_tag(spec.model)[0]
        if not timm.is_model(known):
            raise EncoderError(f"timm has no model '{known}'{nearest(known, timm.list_models())}")
        config = timm.get_pretrained_cfg(spec.model)
        self.name = config.architecture if spec.weights else f"{config.architecture}.{config.tag}"
        self._build(spec, device, config, {"pretrained_cfg": config.tag or None}, weights.seed_or_file(spec))

    def _build(
        self, spec: EncoderSpec, device: str, config: Any, arguments: dict[str, Any], source: int | Path | None
    ) -> None:
        """Build the model of a pretrained config and fill it; `arguments` are those of `timm.create_model`."""
        timm, what = load_library("timm", "timm"), spec.name
        self.device, self._half = device, spec.half
        if config.input_size[0] != 3:
            raise EncoderError(f"{what} takes pictures of {config.input_size[0]} channels, and not RGB")
        size = (3, spec.image_size, spec.image_size) if spec.image_size else tuple(config.input_size)
        sized = config.fixed_input_size and size != tuple(config.input_size)
        network: Any = _load(timm, spec, config, arguments | ({"img_size": size[1:]} if sized else {}), source, size)
        data = timm.data.resolve_model_data_config(network, {"input_size": size})
        if spec.whole:
            require_cut(what, (data["crop_mode"], data["crop_pct"]) != _UNCUT)
            data["crop_mode"], data["crop_pct"] = _UNCUT
        *steps, _ = timm.data.create_transform(**data, normalize=False).transforms  # without that to a tensor
        self._prepare_by(steps, data["mean"], data["std"])
        self.network = network.to(device).eval().requires_grad_(False)
        self._what, self._pixels = what, weights.noise(size[1:]).to(device)
        self._before = int(getattr(network, "num_prefix_tokens", 0))
        with torch.inference_mode(), weights.autocast(device, spec.half):
            try:
                (final, maps), norm = network.forward_intermediates(self._pixels, norm=True), True
            except AssertionError:  # Hiera's norm is not of a size with its map
                (final, maps), norm = network.forward_intermediates(self._pixels), False
            self._last, end = len(maps) - 1, _as_map(final, maps[-1], self._before)
            # A convolution after the last stage: more channels on the same cells.
            convolved = end is not None and end.shape[1] != maps[-1].shape[1]
            # What goes into the classifier is the last map, of a pass that gives the others without the norm.
            self._ends = end is not None and (convolved or torch.equal(end, maps[-1]))
            self._normed = self._last if norm and not self._ends else None
            self._last_name = "final" if convolved else "last"
        self.identity: dict[str, Any] = {
            "encoder": "timm",
            "weights": spec.weights if str(spec.weights).startswith("random:") else self.weights_id(),
            "model": {"name": config.architecture, "tag": config.tag},
            "preprocessing": _preprocessing(data),
            "tokens_left_out": self._before,
            "global": "pre_logits",
        }
        self.versions = library_versions("torch", "torchvision", "timm", "PIL")
        self.use_layer(spec.layer)

    def _run(self, pixels: Tensor, layers: Sequence[int]) -> list[tuple[Tensor, Tensor]]:
        network: Any = self.network
        found: dict[int, Any] = {}
        for indices in in_passes(layers, self._normed):
            # Hieras would stop at the layer, and the global feature is that of the last one.
            final, maps = network.forward_intermediates(
                pixels, indices=indices, norm=indices == [self._normed], stop_early=False
            )
            found |= zip(indices, maps, strict=True)
        if self._ends and self._last in found:
            found[self._last] = _as_map(final, found[self._last], self._before)
        pooled = network.forward_head(final, pre_logits=True)
        return [(found[layer], pooled) for layer in layers]


def _as_map(final: Any, like: Tensor, before: int) -> Tensor | None:
    """Return what goes into a classifier as a map [B,C,H,W] of the cells of `like`; None where it has others."""
    cells = like.shape[2:]
    if not isinstance(final, Tensor) or final.ndim not in (3, 4):
        return None
    if final.ndim == 3:  # tokens [B,N,C]
        rows = final[:, before:]
        return rows.transpose(1, 2).unflatten(2, cells) if rows.shape[1] == cells.numel() else None
    if final.shape[1:3] == cells:  # [B,H,W,C]
        return final.permute(0, 3, 1, 2)
    return final if final.shape[2:] == cells else None


class HubTimmEncoder(TimmEncoder):
    """Encode images by a model that timm has saved for the hub: its config.json has a pretrained config of timm's."""

    suffix = ""  # `save` writes a folder

    def __init__(self, spec: EncoderSpec, device: str, document: dict[str, Any], file: Path) -> None:
        timm = load_library("timm", "timm")
        self._document, self.name = document, short_name(spec.model)
        config = timm.models.PretrainedCfg(**document["pretrained_cfg"] | {"architecture": document["architecture"]})
        self._build(spec, device, config, {"pretrained_cfg": config, **document["model_args"]}, file)
        self.identity["model"] |= {"arguments": plain(document["model_args"])}
        self.versions |= Checkpoint(spec.model, "image").commit()

    def save(self, folder: Path) -> None:
        """Write the model as the hub has it, without a classifier."""
        folder.mkdir()
        (folder / "config.json").write_text(json.dumps(self._document | {"num_classes": 0}), encoding="utf-8")
        super().save(folder / "model.safetensors")


class HubEncoder:
    """Encode images by a checkpoint of the hub: by timm if timm has saved it, else by transformers.

    The wrapper of transformers around timm says neither which axis of a map has the channels nor which tokens are no
    cells, and fails on what timm 1.0.31 writes.
    """

    takes = HubImageEncoder.takes

    def __new__(cls, spec: EncoderSpec, device: str) -> Any:
        """Load the checkpoint."""
        found = load_from(spec.model, "image", spec.trust, _open)
        made_by: Any = HubTimmEncoder if isinstance(found[0], dict) else HubImageEncoder
        return made_by(spec, device, *found)


def _open(checkpoint: Checkpoint) -> tuple[Any, ...]:
    """Return the config.json and the file of the weights of a model that timm has saved; else `load_image_model`."""
    document = read_json(checkpoint.file("config.json"))
    if "pretrained_cfg" not in document:
        return load_image_model(checkpoint)
    try:
        file = checkpoint.file("model.safetensors")
    except OSError:
        file = checkpoint.file("pytorch_model.bin")
    # The classifier has as many classes as the file says.
    arguments = {key: value for key, value in (document.get("model_args") or {}).items() if key != "num_classes"}
    return document | {"model_args": arguments}, file


def _load(
    timm: Any, spec: EncoderSpec, config: Any, arguments: dict[str, Any], source: Any, size: tuple[int, ...]
) -> nn.Module:
    """Build a model and fill it; its classifier, whose weights are no part of the features, is taken off."""
    network: Any
    if isinstance(source, int):
        torch.default_generator.manual_seed(source)
        network = timm.create_model(config.architecture, **arguments)
        weights.settle_norms(
            network, lambda: network(weights.noise_images(16, max(size[1:]))[..., : size[1], : size[2]])
        )
    elif source is None:
        if not config.has_weights:
            raise EncoderError(f"timm has no weights of {spec.name}; give --visual-weights FILE or random:SEED")
        with quiet():
            network = timm.create_model(config.architecture, pretrained=True, **arguments)
    else:
        network = _of_file(timm, spec, config, weights.read_weights(source, spec.trust), arguments)
    network.reset_classifier(0)
    weights.require_finite(network, f"the weights of {spec.name}")
    return network


def _of_file(
    timm: Any, spec: EncoderSpec, config: Any, state: dict[str, Tensor], arguments: dict[str, Any]
) -> nn.Module:
    """Build a model and fill it from a state dict of any number of classes, as timm fills it from the hub.

    timm converts published names, and positions to the size of the pictures.
    """
    names = config.classifier or ()
    classifier = state.get(f"{names if isinstance(names, str) else next(iter(names), '')}.weight")
    classes = 0 if classifier is None else len(classifier)
    own = {"state_dict": state, "num_classes": classes, "label_offset": 0}
    try:
        network: Any = timm.create_model(config.architecture, pretrained=True, pretrained_cfg_overlay=own, **arguments)
    except Exception:
        weights.require_fit(
            timm.create_model(config.architecture, num_classes=classes, **arguments).state_dict(), state, spec
        )
        raise
    del network.pretrained_cfg["state_dict"]
    return network


def _preprocessing(data: dict[str, Any]) -> dict[str, Any]:
    _, height, width = data["input_size"]
    resized, shown = math.floor(height / data["crop_pct"]), {}
    if height == width:
        shown = {
            "center": {"resize": resized, "crop": height},
            "squash": {"stretch": resized} | ({"crop": height} if resized != height else {}),
            "border": {"resize": resized, "pad": height},
        }[data["crop_mode"] or "center"]
    return {"decoder": "pillow", "processor": "timm", **{key: plain(data[key]) for key in _SHAPING}, **shown}
