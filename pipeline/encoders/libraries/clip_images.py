"""Image towers of open_clip: the states of the patches, or a map's cells, and the projected embedding.

Source: open_clip's README, "Usage", and `forward_intermediates` of its models.
"""

from dataclasses import replace
from importlib import import_module
from typing import Any

from torch import Tensor

from ..base import library_versions, require_cut
from ..huggingface.pixels import plain
from ..spec import EncoderSpec
from .clip_models import load_clip
from .pictures import LibraryGrid, seen

_MODES = {"shortest": "crop", "squash": "squash", "longest": "pad"}


class ClipImageEncoder(LibraryGrid):
    """Encode images as the patches or cells of an image tower, and its projected embedding."""

    def __init__(self, spec: EncoderSpec, device: str) -> None:
        """Load the tower; layer -1 is the last, after the model's norm where that goes over the patches.

        Raises:
            EncoderError: there is no such model, or an option does not fit it.
        """
        loaded = load_clip(spec, "visual")
        self.name, self.space, self.device, self._half = loaded.name, loaded.space, device, spec.half
        tower = loaded.model.visual
        transform = import_module("open_clip.transform")
        pictures = transform.PreprocessCfg(**tower.preprocess_cfg)
        if spec.whole:
            require_cut(spec.name, pictures.resize_mode != "squash")
            pictures = replace(pictures, resize_mode="squash")
        self._transform = transform.image_transform_v2(pictures, is_train=False)
        self.network = tower.to(device)
        trunk = getattr(tower, "trunk", None)  # of timm
        before = getattr(trunk, "num_prefix_tokens", 0) if trunk is not None else int(hasattr(tower, "class_embedding"))
        # Where a tower pools before its norm, or by attention, that norm is not of the patches.
        own = getattr(tower, "attn_pool", None) is None and not getattr(tower, "final_ln_after_pool", False)
        self._norm = trunk is not None or (own and hasattr(tower, "ln_post"))
        height, width = (pictures.size,) * 2 if isinstance(pictures.size, int) else pictures.size
        layer = self._settle(spec.name, spec.layer, (height, width))
        settings = {key: plain(getattr(pictures, key)) for key in ("mean", "std", "interpolation", "resize_mode")}
        shown = seen(_MODES[pictures.resize_mode], height, height) if height == width else {}
        shape = {"decoder": "pillow", "processor": "open_clip", "size": [height, width]}
        self.identity = {
            "encoder": "open_clip",
            "weights": loaded.seed or self.weights_id(),
            "model": loaded.described,
            "preprocessing": {**shape, **settings, **shown},
            "layer": layer,
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
