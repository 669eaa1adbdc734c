"""Image towers of open_clip: the states of the patches, or a map's cells, and the projected embedding.

Source: open_clip's README, "Usage", and `forward_intermediates` of its models.
"""

from dataclasses import replace
from importlib import import_module
from typing import Any

from torch import Tensor

from ..base import library_versions, require_cut
from ..huggingface.pixels import plain
from .clip_models import load_clip
from .pictures import LibraryGrid, seen

_MODES = {"shortest": "crop", "squash": "squash", "longest": "pad"}


class ClipImageEncoder(LibraryGrid):
    """Encode images as the patches or cells of an image tower, and its projected embedding.

    Args:
        name, weights, trust: as of `clip_models.load_clip`.
        device: ``cpu``, ``cuda`` or ``cuda:N``.
        layer: which of the blocks or stages gives the local features: from 0, or -1, the last, after the model's norm
            where that goes over the patches.
        image_size: side of the input, pixels; None: the architecture's own.
        half: let a GPU compute in bfloat16.
        whole: make the square of the whole picture, where the model cuts out its middle or lays a border around it.

    Raises:
        EncoderError: there is no such model, or an option does not fit it.
    """

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
        loaded = load_clip(name, weights, "visual", image_size, trust)
        self.name, self.space, self.device, self._half = loaded.name, loaded.space, device, half
        tower = loaded.model.visual
        transform = import_module("open_clip.transform")
        pictures = transform.PreprocessCfg(**tower.preprocess_cfg)
        require_cut(loaded.what, pictures.resize_mode != "squash", whole)
        if whole:
            pictures = replace(pictures, resize_mode="squash")
        self._transform = transform.image_transform_v2(pictures, is_train=False)
        self.network = tower.to(device)
        trunk = getattr(tower, "trunk", None)  # of timm
        before = getattr(trunk, "num_prefix_tokens", 0) if trunk is not None else int(hasattr(tower, "class_embedding"))
        # Where a tower pools before its norm, or by attention, that norm is not of the patches.
        own = getattr(tower, "attn_pool", None) is None and not getattr(tower, "final_ln_after_pool", False)
        self._norm = trunk is not None or (own and hasattr(tower, "ln_post"))
        self._settle(loaded.what, layer, _shape(pictures))
        self.identity = {
            "encoder": "open_clip",
            "weights": loaded.seed or self.weights_id(),
            "model": loaded.described,
            "preprocessing": _preprocessing(pictures),
            "layer": self._layer_name(),
            "tokens_left_out": before,
            "global": "projected",
        }
        self.versions = library_versions("torch", "torchvision", "open_clip", "timm", "PIL")

    def _count(self, pixels: Tensor) -> int:
        network: Any = self.network
        self._layers = len(network.forward_intermediates(pixels, intermediates_only=True)["image_intermediates"])
        return self._layers

    def _run(self, pixels: Tensor) -> tuple[Tensor, Tensor]:
        network: Any = self.network
        found = network.forward_intermediates(
            pixels,
            indices=sorted({self._layer, self._layers - 1}),  # CLIP's ResNets stop at the last that is asked for
            normalize_intermediates=self._norm and self._last,
        )
        return found["image_intermediates"][0], found["image_features"]

    def _state(self) -> dict[str, Tensor]:
        return {f"visual.{name}": value for name, value in self.network.state_dict().items()}


def _shape(pictures: Any) -> tuple[int, int]:
    size = pictures.size
    return (size, size) if isinstance(size, int) else (size[0], size[1])


def _preprocessing(pictures: Any) -> dict[str, Any]:
    """Return all that decides the pixels, for an identity."""
    (height, width), mode = _shape(pictures), pictures.resize_mode
    settings = {key: plain(getattr(pictures, key)) for key in ("mean", "std", "interpolation", "resize_mode")}
    shown = seen(_MODES[mode], height, height) if height == width else {}
    return {"decoder": "pillow", "processor": "open_clip", "size": [height, width], **settings, **shown}
