"""Grid features: the last feature map of a torchvision classification network, one row per cell."""

from abc import abstractmethod
from collections.abc import Callable, Sequence
from functools import partial
from math import isqrt
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torchvision
from PIL import Image
from safetensors.torch import save_file
from torch import Tensor, nn
from torchvision import transforms
from torchvision.models import DenseNet, VisionTransformer, get_model, get_model_weights, list_models

from ..data.images import LONGEST, AnyPicture, open_image
from ..device import to_host
from ..errors import EncoderError
from .base import VisualEncoder, choose_layer, library_versions
from .captured import Captured
from .registry import IMAGES, unknown
from .spec import EncoderSpec
from .weights import autocast, digest, load_network, noise_images

GRID_OPTIONS = frozenset({"weights", "image_size", "whole", "pool", "views", "frames"})
IMAGE_SIZE = 224  # side of the square input of networks that have none of their own, pixels
# The part that gives the last map in ResNets, ShuffleNets, GoogLeNet, Inception, RegNets, MaxViT, MNASNets and Swins.
_LAST = ("layer4", "conv5", "inception5b", "Mixed_7c", "trunk_output", "blocks", "layers", "permute")


class Grid(VisualEncoder):
    """What the encoders of a grid have in common: images become tensors of one shape, and cells become rows."""

    takes = GRID_OPTIONS
    kind = "grid"
    suffix = ".safetensors"  # of what `save` writes
    longest: int | None = LONGEST  # how many times its shorter side an image's longer one may be
    network: nn.Module  # up to the last feature map; frozen, unless fine-tuning changes that
    device: str
    identity: dict[str, Any]
    _layer: Any = None  # whose map the local features are; None: the last
    _what: str  # the encoder's name in errors
    _last: int  # number of the last layer, and how an identity names that
    _last_name = "last"
    _pixels: Tensor  # of nothing, to try the network with
    _half = False  # let a GPU compute in bfloat16
    _captured: Captured | None = None
    prepare: Callable[[Image.Image], Tensor]  # an image to pixels [3,S,S] as the network takes it, uint8 or float32
    _mean: Tensor  # of uint8 pixels over 255, and their deviation `_std`; float ones are taken as they are
    _std: Tensor

    def decode(self, picture: AnyPicture) -> tuple[Tensor, tuple[int, int]]:
        """Read an image, upright, and `prepare` it; return pixels [3,S,S] on the CPU, and its own (width, height).

        Raises:
            SampleError: the image cannot be read, or is far too long and narrow.
        """
        image = open_image(picture, upright=True, longest=self.longest)
        return self.prepare(image), image.size

    def _prepare_by(self, steps: Sequence[Callable[[Image.Image], Image.Image]], mean: Any, std: Any) -> None:
        """Let these steps give a picture whose uint8 pixels are scaled and normalised on the device, batch by batch."""
        self.prepare = transforms.Compose([*steps, pixels_of])
        self._mean, self._std = (torch.tensor(one, device=self.device)[:, None, None] for one in (mean, std))

    def encode(self, pixels: Tensor) -> tuple[np.ndarray, np.ndarray]:
        """Encode a batch of decoded images [B,3,S,S]; return what `features` does."""
        with torch.inference_mode():
            return to_host(*self.features(pixels))

    @torch.inference_mode()
    def encode_layers(self, pixels: Tensor, encoders: "Sequence[Grid]") -> list[tuple[Tensor, Tensor]]:
        """Return what `encode` of each encoder does, on the device; they differ in their layers alone.

        On a GPU the network's weights keep their place in memory from the second batch on, see `Captured`.
        """
        layers = [one._layer for one in encoders]
        if self.device == "cpu":
            return self._features(pixels, layers)
        if self._captured is None:
            self._captured = Captured()
        return self._captured(self._features, pixels, layers, self.device)

    def features(self, pixels: Tensor) -> tuple[Tensor, Tensor]:
        """Encode a batch of decoded images [B,3,S,S], so that gradients reach `network`.

        Returns:
            The cells, row by row of the map, float32 [B,N,C], and the global features, float32 [B,D], on the device.
        """
        return self._features(pixels, [self._layer])[0]

    def _features(self, pixels: Tensor, layers: Sequence[Any]) -> list[tuple[Tensor, Tensor]]:
        pixels = pixels.to(self.device, non_blocking=True)
        if pixels.dtype == torch.uint8:
            pixels = pixels.float().div_(255).sub_(self._mean).div_(self._std)
        with autocast(self.device, self._half):
            found = self._run(pixels, layers)
        return [(_rows(local).float().contiguous(), global_.float()) for local, global_ in found]

    @abstractmethod
    def _run(self, pixels: Tensor, layers: Sequence[Any]) -> list[tuple[Tensor, Tensor]]:
        """Return of each layer a map [B,C,H,W] or rows [B,N,C], and the global features [B,D]."""

    def use_layer(self, layer: int) -> None:
        """Let the local features be those of a layer of a library that counts the maps of a pass from 0."""
        self._layer = choose_layer(self._what, layer, self._last + 1)
        self._measure(self._pixels)
        name = self._last_name if self._layer == self._last else f"intermediates.{self._layer}"
        self.identity = {**self.identity, "layer": name}

    def weights_id(self) -> str:
        """Return the weights' entry in the identity of an encoder that reads what `save` writes now."""
        return digest(self._state())

    def save(self, path: Path) -> None:
        """Write the whole network as a ``.safetensors`` file; the layers that were cut off are as they were read."""
        save_file({name: value.detach().cpu().contiguous() for name, value in self._state().items()}, path)

    def _state(self) -> dict[str, Tensor]:
        return self.network.state_dict()

    @torch.inference_mode()
    def _measure(self, pixels: Tensor, grid: tuple[int, int] | None = None) -> None:
        """Take the features' shapes from those of a picture [1,3,H,W]; `grid` is that of rows without a map."""
        ((local, global_),) = self._run(pixels.to(self.device), [self._layer])
        self.grid = (local.shape[2], local.shape[3]) if grid is None else grid
        self.rows = self.grid[0] * self.grid[1]
        self.channels, self.global_channels = _rows(local).shape[2], global_.shape[1]
        if self.rows == 1:
            raise EncoderError(f"'{self.name}' makes a single cell of an image; choose a larger --image-size")


def pixels_of(image: Image.Image) -> Tensor:
    """Return the pixels of an RGB image, uint8 [3,H,W], as torchvision's `PILToTensor` does.

    That lets go of the interpreter eight times, and each time a thread that reads pictures waits to have it back. Here
    the pixels also lie channel by channel, so that a batch of them is stacked in a fifth of the time.
    """
    rows = np.frombuffer(image.tobytes(), np.uint8).reshape(image.height, image.width, 3)
    return torch.from_numpy(rows.transpose(2, 0, 1).copy())


def _rows(local: Tensor) -> Tensor:
    return local.flatten(2).transpose(1, 2) if local.ndim == 4 else local


class GridEncoder(Grid):
    """Encode images as the cells of the last feature map of a network of torchvision's, and their mean."""

    def __init__(self, spec: EncoderSpec, device: str) -> None:
        known = list_models(module=torchvision.models)
        if spec.name not in known:
            raise unknown(spec.name, [*known, *IMAGES])
        self.name, self.device = spec.name, device
        size, presets = spec.image_size or IMAGE_SIZE, get_model_weights(spec.name)
        published = presets.__members__.get("IMAGENET1K_V1")  # all but two have it
        preset: Any = (presets.DEFAULT if published is None else published).transforms()
        normalize = transforms.Normalize(preset.mean, preset.std)
        weights_id, network = load_network(
            spec, lambda: _build(spec.name, size), lambda network: network(normalize(noise_images(16, size))), published
        )
        layer, whole = last_map(network), network.state_dict()
        self._exported = _cut_after(network, layer)
        # Channels last: 1.7 times as fast for MobileNetV2 on a CPU, no slower for ResNet-18.
        self.network = network.to(device, memory_format=torch.channels_last).requires_grad_(False)
        kept = self.network.state_dict()
        self._head = {name: value for name, value in whole.items() if name not in kept}
        shorter = round(size * preset.resize_size[0] / preset.crop_size[0])
        steps = [
            transforms.Resize([size, size] if spec.whole else [shorter], preset.interpolation),
            transforms.CenterCrop(size),
        ]
        self._prepare_by(steps, preset.mean, preset.std)
        self._measure(torch.zeros(1, 3, size, size))
        self.identity = {
            "encoder": spec.name,
            "weights": weights_id,
            "preprocessing": {
                "decoder": "pillow",
                **({"stretch": size} if spec.whole else {"resize": shorter, "crop": size}),
                "interpolation": preset.interpolation.value,
                "mean": list(preset.mean),
                "std": list(preset.std),
            },
            "layer": layer,
        }
        self.versions = library_versions("torch", "torchvision", "PIL")

    def _run(self, pixels: Tensor, _layers: Sequence[Any]) -> list[tuple[Tensor, Tensor]]:
        try:
            self.network(pixels.contiguous(memory_format=torch.channels_last))
            maps = self._exported.pop()
        except _Reached as reached:
            (maps,) = reached.args
        if maps.ndim == 3:  # of a vision transformer the tokens [B,1+N,C], the class token first
            maps = maps[:, 1:].transpose(1, 2).unflatten(2, (isqrt(maps.shape[1]), -1))
        return [(maps, mean_of_cells(maps))]

    def _state(self) -> dict[str, Tensor]:
        return {**self._head, **self.network.state_dict()}


def mean_of_cells(maps: Tensor) -> Tensor:
    """Return the mean [B,C] of a map [B,C,H,W], summed cell by cell."""
    return _rows(maps).contiguous().mean(1)


def last_map(network: nn.Module) -> str:
    """Return the name of the part that makes the last map, or a transformer's tokens."""
    if isinstance(network, VisionTransformer):
        return "encoder.ln"
    if isinstance(network, DenseNet):
        return "relu"  # a function after its features
    return next((name for name in _LAST if hasattr(network, name)), "features")


class _Reached(Exception):
    """Carries the last map out of a network, from any thread; what would come after it does not run."""


def _reached(exported: list[Tensor], _part: nn.Module, _inputs: Any, maps: Tensor) -> None:
    if not torch.compiler.is_exporting():
        raise _Reached(maps)
    exported.append(maps)  # torch.export has to see the end of each module


def _cut_after(network: Any, layer: str) -> list[Tensor]:
    """Let a network raise `_Reached` at its last map, and forget the parts that come after it.

    Return a list to which it appends the map instead while torch exports it.

    torchvision's own feature extraction traces the network, and meanwhile no other thread can call a module.
    """
    exported: list[Tensor] = []
    if layer == "relu":
        layer = "features"
        network.features.add_module("relu", nn.ReLU(inplace=True))
    names = [name for name, _ in network.named_children()]
    for name in names[names.index(layer.partition(".")[0]) + 1 :]:
        setattr(network, name, nn.Identity())
    part = network.get_submodule(layer)
    (part[-1] if isinstance(part, nn.ModuleList) else part).register_forward_hook(partial(_reached, exported))
    return exported


def _build(name: str, image_size: int) -> nn.Module:
    options: dict[str, Any] = {}
    if name in ("googlenet", "inception_v3"):
        # The published weights want the inputs transformed; without init_weights the constructor warns.
        options = {"aux_logits": False, "init_weights": True, "transform_input": True}
    elif name.startswith("vit_"):
        options = {"image_size": image_size}
    elif name.startswith("maxvit_"):
        options = {"input_size": (image_size, image_size)}
    return get_model(name, **options).eval()
