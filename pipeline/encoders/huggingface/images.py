"""Patch features: the states of an image model of transformers, and the global feature that its authors use.

Source: the models' pages in transformers' documentation, which load them by `AutoModel` and `AutoImageProcessor`.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AutoImageProcessor, AutoModel

from ...errors import EncoderError
from ..base import choose_layer, library_versions
from ..grid import GRID_OPTIONS, Grid
from ..spec import EncoderSpec, short_name
from ..weights import autocast, digest, noise
from .hub import Checkpoint, load_model, plain, quiet, states_of
from .pixels import Pixels

# Settings that change the features of equal weights.
_SHAPING = (
    *("hidden_act", "layer_norm_eps", "num_attention_heads", "num_heads", "patch_size", "window_size"),
    *("image_size", "rope_theta", "use_mean_pooling"),
)
_TOKENS = ("class_embedding", "cls_token", "distillation_token", "register_tokens")  # weights that go before patches


class HubImageEncoder(Grid):
    """Encode images as the states of their patches, or the cells of the last map, and one global feature.

    The global feature, of the last layer in any case, is the projected embedding of a model of pictures and texts
    (CLIP, SigLIP); else what its pooler gives, unless the checkpoint lacks the pooler's weights; else the state of the
    class token, or the mean. Of layer 0 the local features are the embeddings, of -1 the last states after the norm.
    """

    takes = GRID_OPTIONS - {"weights"} | {"layer"}
    suffix = ""  # `save` writes a folder

    def __init__(
        self, spec: EncoderSpec, device: str, network: nn.Module, processor: Any, lacks_pooler: bool, space: str | None
    ) -> None:
        checkpoint, self.name = Checkpoint(spec.model, "image"), short_name(spec.model)
        self.device, self._half = device, spec.half
        self.network, self._processor, self.space = network, processor, space
        what = str(checkpoint)
        self._joint = hasattr(self.network, "get_image_features")
        pixels = Pixels(self._processor, what, spec.image_size, spec.whole)
        self.prepare = pixels.prepare
        self.network.to(device)
        self._options: dict[str, bool] = {}  # what makes the model take pictures of this size
        self._what, self._pixels = what, noise(pixels.shape)
        found = self._first(self._pixels, spec.image_size is not None)
        before, _ = _layout(what, self.network, found, None, pixels.shape)
        projected = self._joint and found.pooler_output.ndim == 2
        self._global = "projected" if projected else _pooling(found, lacks_pooler, before)
        config = _vision(self.network.config)
        settings = {key: plain(value) for key in _SHAPING if (value := getattr(config, key, None)) is not None}
        self.identity: dict[str, Any] = {
            "encoder": "hf",
            "weights": self.weights_id(),
            "model": {"class": type(self.network).__name__, **settings},
            "preprocessing": pixels.settings,
            "global": self._global,
        }
        self.versions = library_versions("torch", "torchvision", "transformers", "PIL") | checkpoint.commit()
        self.use_layer(spec.layer)

    def use_layer(self, layer: int) -> None:
        """Let the local features be those of a layer."""
        found = self._first(self._pixels, False)
        last = len(found.hidden_states) - 1
        layer = choose_layer(self._what, layer, last + 1)
        self._layer = None if layer == last else layer  # None: after the model's own norm
        *_, height, width = self._pixels.shape
        self._before, grid = _layout(self._what, self.network, found, self._layer, (height, width))
        self._measure(self._pixels, grid)
        name = "last_hidden_state" if self._layer is None else f"hidden_states.{layer}"
        self.identity = {**self.identity, "layer": name, "tokens_left_out": self._before}

    def _run(self, pixels: Tensor, layers: Sequence[int | None]) -> list[tuple[Tensor, Tensor]]:
        found = self._forward(pixels, any(layer is not None for layer in layers))
        last = found.last_hidden_state
        if self._global in ("projected", "pooler"):
            pooled = found.pooler_output.flatten(1)
        elif self._global == "class token":
            pooled = last[:, 0]
        else:
            pooled = last.flatten(2).mean(2) if last.ndim == 4 else last.mean(1)
        states = (states_of(found, layer) for layer in layers)
        return [(one if one.ndim == 4 else one[:, self._before :], pooled) for one in states]

    def _forward(self, pixels: Tensor, every_layer: bool) -> Any:
        run: Any = self.network.get_image_features if self._joint else self.network
        return run(pixel_values=pixels, output_hidden_states=every_layer, **self._options)

    @torch.inference_mode()
    def _first(self, pixels: Tensor, resized: bool) -> Any:
        """Return the outputs for a first picture; positions are interpolated where they have to be."""
        with autocast(self.device, self._half):
            try:
                return self._forward(pixels.to(self.device), True)
            except (RuntimeError, ValueError):
                if not resized:
                    raise
                self._options = {"interpolate_pos_encoding": True}
                return self._forward(pixels.to(self.device), True)

    def weights_id(self) -> str:
        """Return the weights' entry in the identity of an encoder that reads what `save` writes now."""
        return digest({name: value for name, value in self._state().items() if "logit_" not in name})

    def save(self, folder: Path) -> None:
        """Write the model, of pictures and texts this tower alone, and the image processor as the hub has them."""
        network: Any = self.network
        with quiet():
            network.save_pretrained(folder, state_dict=self._state())
            self._processor.save_pretrained(folder)

    def _state(self) -> dict[str, Tensor]:
        """Return the weights without those of a pooler that the checkpoint lacks, or that has no part in them."""
        used = self._global == "pooler"
        return {name: value for name, value in self.network.state_dict().items() if used or "pooler." not in name}


def load_image_model(checkpoint: Checkpoint) -> tuple[nn.Module, Any, bool, str | None]:
    """Return a model, its image processor, whether it lacks the weights of its pooler, and its space."""
    model, lacks_pooler, space = load_model(checkpoint, AutoModel)
    if model.main_input_name != "pixel_values" and not hasattr(model, "get_image_features"):
        raise EncoderError(
            f"{checkpoint} are a {type(model).__name__}, which takes no pictures; give an image model, or use it as"
            " --text"
        )
    return model, checkpoint.load(AutoImageProcessor), lacks_pooler, space


def _vision(config: Any) -> Any:
    return getattr(config, "vision_config", config)


def _layout(
    what: str, model: nn.Module, found: Any, layer: int | None, shape: tuple[int, int]
) -> tuple[int, tuple[int, int]]:
    """Return how many states stand before those of the patches, and height and width of the grid of patches."""
    states, config = states_of(found, layer), _vision(model.config)
    if states.ndim == 4:  # a map [B,C,H,W]
        rows, columns = states.shape[2:]
        if abs(rows - columns * shape[0] / shape[1]) >= 1:
            raise EncoderError(
                f"{what} are a {type(model).__name__}, whose map of shape {list(states.shape)} has not the form of"
                f" {shape[0]} x {shape[1]} pixels after its channels; choose another layer or model"
            )
        return 0, (rows, columns)
    maps = getattr(found, "reshaped_hidden_states", None)
    if maps is not None:  # Swin's patches grow from stage to stage
        height, width = maps[-1 if layer is None else layer].shape[2:]
    else:
        patch = getattr(config, "patch_size", shape)  # without one, the picture is a single patch
        sides = (patch, patch) if isinstance(patch, int) else patch
        height, width = shape[0] // sides[0], shape[1] // sides[1]
    weights = [weight for name, weight in model.named_parameters() if name.endswith(_TOKENS)]
    before = sum(1 if weight.ndim == 1 else weight.shape[-2] for weight in weights)
    if states.shape[1] != before + height * width:
        raise EncoderError(
            f"{what} are a {type(model).__name__}, which does not encode pictures patch by patch: it has"
            f" {states.shape[1]} states, not {before} and {height} x {width}; choose another image model"
        )
    return before, (height, width)


def _pooling(found: Any, lacks_pooler: bool, before: int) -> str:
    pooled = getattr(found, "pooler_output", None)
    if pooled is not None and pooled.ndim != 3 and not lacks_pooler:  # PaliGemma and others give a vector a patch
        return "pooler"
    return "class token" if before else "mean"
