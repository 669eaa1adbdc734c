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
from ..grid import Grid
from ..weights import digest
from ..weights_source import short_name
from .hub import autocast, commit_of, counted_from_0, load_from, load_model, place_of, quiet
from .pixels import Pixels, noise, plain

# Settings that change the features of equal weights.
_SHAPING = (
    *("hidden_act", "layer_norm_eps", "num_attention_heads", "num_heads", "patch_size", "window_size"),
    *("image_size", "rope_theta", "use_mean_pooling"),
)
_TOKENS = ("class_embedding", "cls_token", "distillation_token", "register_tokens")  # weights that go before patches
_FAULTS = (AttributeError, IndexError, KeyError, RuntimeError, TypeError, ValueError)


class HubImageEncoder(Grid):
    """Encode images as the states of their patches, or the cells of the last map, and one global feature.

    The global feature is the projected embedding of a model of pictures and texts (CLIP, SigLIP); else what its
    pooler gives, unless the checkpoint lacks the pooler's weights; else the state of the class token, or the mean.

    Args:
        weights: a folder, or a model id of the hub.
        device: ``cpu``, ``cuda`` or ``cuda:N``.
        layer: whose hidden states are the local features: 0 the embeddings, -1 the last, after the model's own norm.
            The global feature is that of the last in any case.
        image_size: side of the input, pixels; None: the checkpoint's own.
        half: let a GPU compute in bfloat16.
        trust: let a program that comes with the checkpoint run.
        whole: make the square of the whole picture, where the checkpoint cuts out its middle.

    Raises:
        EncoderError: there is no such model, it is incomplete, or does not encode pictures so.
    """

    suffix = ""  # `save` writes a folder

    def __init__(
        self,
        weights: str,
        device: str,
        layer: int = -1,
        image_size: int | None = None,
        *,
        half: bool = True,
        trust: bool = False,
        whole: bool = False,
    ) -> None:
        self.name, self.device, self._half = short_name(weights), device, half
        self.network, processor, lacks_pooler, self.space = load_from(
            weights, "image", lambda off: _load(weights, off, trust)
        )
        self._joint = hasattr(self.network, "get_image_features")
        self._pixels = Pixels(processor, weights, image_size, whole)
        self.network.to(device)
        self._layer: int | None = None  # the last, after the model's own norm
        self._options: dict[str, bool] = {}  # what the model has to be told to take pictures of this size
        self._before, self._global = 0, ""
        try:
            found = self._first(image_size is not None)
            layers = len(found.hidden_states) - 1
            layer = counted_from_0(f"image weights '{weights}'", "--visual-layer", layer, layers)
            self._layer = None if layer == layers else layer
            self._before, self.grid = _laid_out(self.network, found, self._layer, self._pixels.shape)
            self._global = "projected" if self._joint else _pooling(found, lacks_pooler, self._before)
            local, global_ = self.encode(noise(self._pixels.shape))
        except _FAULTS as error:
            raise _no_encoder(weights, self.network, self._pixels.shape, image_size, error) from error
        _, self.rows, self.channels = local.shape
        if self.rows == 1:
            raise EncoderError(
                f"image weights '{weights}' make a single cell of pictures of {self._pixels.shape[0]} pixels; choose a"
                " larger --image-size"
            )
        self.global_channels = global_.shape[1]
        self.identity = self._identify()
        self.versions = library_versions("torch", "torchvision", "transformers", "PIL") | commit_of(weights)

    def prepare(self, image: Image.Image) -> Tensor:
        """Prepare an image with the checkpoint's own processor; return pixels float32 [3,H,W]."""
        return self._pixels.prepare(image)

    def features(self, pixels: Tensor) -> tuple[Tensor, Tensor]:
        """Encode a batch of decoded images [B,3,H,W], so that gradients reach `network`.

        Returns:
            The patches or cells, row by row, float32 [B,N,C], and the global feature, float32 [B,D], on the device.
        """
        found = self._run(pixels, self._layer is not None)
        states = _states(found, self._layer)
        local = states.flatten(2).transpose(1, 2) if states.ndim == 4 else states[:, self._before :]
        return local.float().contiguous(), self._pooled(found, local).float()

    def _pooled(self, found: Any, local: Tensor) -> Tensor:
        if self._global in ("projected", "pooler"):
            return found.pooler_output.flatten(1)
        if self._global == "class token":
            return found.last_hidden_state[:, 0]
        last = found.last_hidden_state
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

    def _identify(self) -> dict[str, Any]:
        config = _vision(self.network.config)
        settings = {key: plain(value) for key in _SHAPING if (value := getattr(config, key, None)) is not None}
        return {
            "encoder": "hf",
            "weights": self.weights_id(),
            "model": {"class": type(self.network).__name__, **settings},
            "preprocessing": self._pixels.settings,
            "layer": "last_hidden_state" if self._layer is None else f"hidden_states.{self._layer}",
            "tokens_left_out": self._before,
            "global": self._global,
        }

    def weights_id(self) -> str:
        """Return the weights' entry in the identity of an encoder that reads what `save` writes now."""
        return digest({name: value for name, value in self._state().items() if "logit_" not in name})

    def save(self, folder: Path) -> None:
        """Write the model, of pictures and texts this tower alone, and the image processor as the hub has them."""
        network: Any = self.network
        with quiet():
            network.save_pretrained(folder, state_dict=self._state())
            self._pixels.save(folder)

    def _state(self) -> dict[str, Tensor]:
        """Return the weights without those of a pooler that the checkpoint lacks, or that has no part in them."""
        used = self._global == "pooler"
        return {name: value for name, value in self.network.state_dict().items() if used or "pooler." not in name}


def _load(weights: str, offline: bool, trust: bool) -> tuple[nn.Module, Any, bool, str | None]:
    """Return a model, its image processor, whether it lacks the weights of its pooler, and its space."""
    model, missing, space = load_model(weights, "image", offline, trust, AutoModel)
    if model.main_input_name != "pixel_values" and not hasattr(model, "get_image_features"):
        raise EncoderError(
            f"image weights '{weights}' are a {type(model).__name__}, which takes no pictures; give an image model, or"
            " use it as --text"
        )
    try:
        name, options = place_of(weights, offline)
        processor = AutoImageProcessor.from_pretrained(name, **options, trust_remote_code=trust)
    except (OSError, ValueError) as error:
        if "trust_remote_code" in str(error):
            raise
        raise EncoderError(
            f"image weights '{weights}' have no image processor that can be used, which says how pictures are"
            " prepared; put the model's own preprocessor_config.json next to them"
        ) from error
    return model, processor, bool(missing), space


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


def _no_encoder(
    weights: str, model: nn.Module, shape: tuple[int, int], image_size: int | None, error: Exception
) -> EncoderError:
    kind = type(model).__name__
    if image_size is not None:
        return EncoderError(
            f"image weights '{weights}' ({kind}) do not take pictures of {shape[0]} x {shape[1]} pixels"
            f" ({reason(error)}); leave --image-size out"
        )
    return EncoderError(
        f"image weights '{weights}' are a {kind}, which does not encode a picture of {shape[0]} x {shape[1]} pixels"
        f" patch by patch ({reason(error)}); choose another image model"
    )
