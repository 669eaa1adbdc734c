"""Patch features: the states of an image model of transformers, and the global feature that its authors use.

Source: the models' pages in transformers' documentation, which load them by `AutoModel` and `AutoImageProcessor`.
"""

from pathlib import Path
from typing import Any

import torch
from PIL import Image
from torch import Tensor, nn
from transformers import AutoImageProcessor, AutoModel

from ...errors import EncoderError
from ...wording import reason
from ..base import library_versions
from ..grid import GRID_OPTIONS, Grid
from ..spec import EncoderSpec, short_name
from ..weights import digest, noise
from .hub import autocast, commit_of, counted_from_0, load_from, load_model, place_of, quiet
from .pixels import Pixels, plain

# Settings that change the features of equal weights.
_SHAPING = (
    *("hidden_act", "layer_norm_eps", "num_attention_heads", "num_heads", "patch_size", "window_size"),
    *("image_size", "rope_theta", "use_mean_pooling"),
)
_TOKENS = ("class_embedding", "cls_token", "distillation_token", "register_tokens")  # weights that go before patches
_FAULTS = (AttributeError, IndexError, KeyError, RuntimeError, TypeError, ValueError)


class HubImageEncoder(Grid):
    """Encode images as the states of their patches, or the cells of the last map, and one global feature.

    The global feature, of the last layer in any case, is the projected embedding of a model of pictures and texts
    (CLIP, SigLIP); else what its pooler gives, unless the checkpoint lacks the pooler's weights; else the state of the
    class token, or the mean. Of layer 0 the local features are the embeddings, of -1 the last states after the norm.
    """

    takes = GRID_OPTIONS - {"weights"} | {"layer"}
    suffix = ""  # `save` writes a folder

    def __init__(self, spec: EncoderSpec, device: str) -> None:
        """Load a model and its image processor.

        Raises:
            EncoderError: there is no such model, it is incomplete, or does not encode pictures so.
        """
        source, what = spec.model, f"image weights '{spec.model}'"
        self.name, self.device, self._half = short_name(source), device, spec.half
        self.network, processor, lacks_pooler, self.space = load_from(
            source, "image", lambda offline: _load(source, offline, spec.trust)
        )
        self._joint = hasattr(self.network, "get_image_features")
        self._pixels = Pixels(processor, what, spec.image_size, spec.whole)
        self.network.to(device)
        self._layer: int | None = None  # the last, after the model's own norm
        self._options: dict[str, bool] = {}  # what makes the model take pictures of this size
        self._before, self._global = 0, ""
        try:
            found = self._first(spec.image_size is not None)
            layers = len(found.hidden_states) - 1
            layer = counted_from_0(what, spec.layer, layers)
            self._layer = None if layer == layers else layer
            self._before, grid = _laid_out(self.network, found, self._layer, self._pixels.shape)
            self._global = "projected" if self._joint else _pooling(found, lacks_pooler, self._before)
            local, global_ = self.encode(noise(self._pixels.shape))
        except _FAULTS as error:
            if isinstance(error, EncoderError):
                raise
            advice = "choose another image model" if spec.image_size is None else "leave --image-size out"
            kind, (height, width) = type(self.network).__name__, self._pixels.shape
            raise EncoderError(
                f"{what} ({kind}) do not encode pictures of {height} x {width} pixels patch by patch ({reason(error)});"
                f" {advice}"
            ) from error
        self._set_shapes(grid, local.shape[2], global_.shape[1])
        config = _vision(self.network.config)
        settings = {key: plain(value) for key in _SHAPING if (value := getattr(config, key, None)) is not None}
        self.identity = {
            "encoder": "hf",
            "weights": self.weights_id(),
            "model": {"class": type(self.network).__name__, **settings},
            "preprocessing": self._pixels.settings,
            "layer": "last_hidden_state" if self._layer is None else f"hidden_states.{self._layer}",
            "tokens_left_out": self._before,
            "global": self._global,
        }
        self.versions = library_versions("torch", "torchvision", "transformers", "PIL") | commit_of(source)

    def prepare(self, image: Image.Image) -> Tensor:
        """Prepare an image with the checkpoint's own processor; return pixels float32 [3,H,W]."""
        return self._pixels.prepare(image)

    def features(self, pixels: Tensor) -> tuple[Tensor, Tensor]:
        """Return the patches or cells, and the global feature; shapes as of `Grid`."""
        found = self._run(pixels, self._layer is not None)
        states = _states(found, self._layer)
        local = states.flatten(2).transpose(1, 2) if states.ndim == 4 else states[:, self._before :]
        return local.float().contiguous(), self._pooled(found).float()

    def _pooled(self, found: Any) -> Tensor:
        if self._global in ("projected", "pooler"):
            return found.pooler_output.flatten(1)
        last = found.last_hidden_state
        if self._global == "class token":
            return last[:, 0]
        return last.flatten(2).mean(2) if last.ndim == 4 else last.mean(1)

    def _run(self, pixels: Tensor, every_layer: bool) -> Any:
        run: Any = self.network.get_image_features if self._joint else self.network
        with autocast(self.device, self._half):
            return run(pixel_values=pixels.to(self.device), output_hidden_states=every_layer, **self._options)

    @torch.inference_mode()
    def _first(self, resized: bool) -> Any:
        """Return what the model makes of a first picture; its positions are interpolated where they have to be."""
        try:
            return self._run(noise(self._pixels.shape), True)
        except (RuntimeError, ValueError):
            if not resized:
                raise
            self._options = {"interpolate_pos_encoding": True}
            return self._run(noise(self._pixels.shape), True)

    def weights_id(self) -> str:
        """Return the weights' entry in the identity of an encoder that reads what `save` writes now."""
        return digest({name: value for name, value in self._state().items() if "logit_" not in name})

    def save(self, folder: Path) -> None:
        """Write the model, of pictures and texts this tower alone, and the image processor as the hub has them."""
        network: Any = self.network
        with quiet():
            network.save_pretrained(folder, state_dict=self._state())
            self._pixels.processor.save_pretrained(folder)

    def _state(self) -> dict[str, Tensor]:
        """Return the weights without those of a pooler that the checkpoint lacks, or that has no part in them."""
        used = self._global == "pooler"
        return {name: value for name, value in self.network.state_dict().items() if used or "pooler." not in name}


def _load(source: str, offline: bool, trust: bool) -> tuple[nn.Module, Any, bool, str | None]:
    """Return a model, its image processor, whether it lacks the weights of its pooler, and its space."""
    model, lacks_pooler, space = load_model(source, "image", offline, trust, AutoModel)
    if model.main_input_name != "pixel_values" and not hasattr(model, "get_image_features"):
        raise EncoderError(
            f"image weights '{source}' are a {type(model).__name__}, which takes no pictures; give an image model, or"
            " use it as --text"
        )
    try:
        name, options = place_of(source, offline)
        processor = AutoImageProcessor.from_pretrained(name, **options, trust_remote_code=trust)
    except (OSError, ValueError) as error:
        if "trust_remote_code" in str(error):
            raise
        raise EncoderError(
            f"image weights '{source}' have no usable image processor; put the model's own preprocessor_config.json"
            " next to them"
        ) from error
    return model, processor, lacks_pooler, space


def _vision(config: Any) -> Any:
    return getattr(config, "vision_config", config)


def _states(found: Any, layer: int | None) -> Tensor:
    return found.last_hidden_state if layer is None else found.hidden_states[layer]


def _laid_out(model: nn.Module, found: Any, layer: int | None, shape: tuple[int, int]) -> tuple[int, tuple[int, int]]:
    """Return how many states stand before those of the patches, and height and width of the grid of patches.

    Raises:
        ValueError: the states are others.
    """
    states, config = _states(found, layer), _vision(model.config)
    if states.ndim == 4:  # a map [B,C,H,W]
        return 0, (states.shape[2], states.shape[3])
    maps = getattr(found, "reshaped_hidden_states", None)
    if maps is not None:  # Swin's patches grow from stage to stage
        height, width = maps[-1 if layer is None else layer].shape[2:]
    else:
        patch = config.patch_size
        sides = (patch, patch) if isinstance(patch, int) else patch
        height, width = shape[0] // sides[0], shape[1] // sides[1]
    weights = [weight for name, weight in model.named_parameters() if name.endswith(_TOKENS)]
    before = sum(1 if weight.ndim == 1 else weight.shape[-2] for weight in weights)
    if states.shape[1] != before + height * width:
        raise ValueError(f"it has {states.shape[1]} states where {before} and {height} x {width} are expected")
    return before, (height, width)


def _pooling(found: Any, lacks_pooler: bool, before: int) -> str:
    """Return where the global feature of a model without texts comes from."""
    if getattr(found, "pooler_output", None) is not None and not lacks_pooler:
        return "pooler"
    return "class token" if before else "mean"
