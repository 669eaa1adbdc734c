"""What image encoders of timm and open_clip share: the library's own transform, and a map that becomes rows."""

from abc import abstractmethod
from collections.abc import Callable

import torch
from PIL import Image
from torch import Tensor

from ...errors import EncoderError
from ...wording import reason
from ..grid import GRID_OPTIONS, Grid
from ..huggingface.hub import autocast
from ..weights import noise

_FAULTS = (AssertionError, AttributeError, IndexError, KeyError, RuntimeError, TypeError, ValueError)


class LibraryGrid(Grid):
    """Encode images as the cells of a map that a library's model gives, and that library's global feature."""

    takes = GRID_OPTIONS | {"layer"}
    device: str
    _half: bool  # let a GPU compute in bfloat16
    _transform: Callable[[Image.Image], Tensor]
    _layer: int  # whose map the local features are, counted from 0
    _last: bool  # whether that is the last

    def prepare(self, image: Image.Image) -> Tensor:
        """Prepare an image with the library's own transform; return pixels float32 [3,H,W]."""
        return self._transform(image)

    def features(self, pixels: Tensor) -> tuple[Tensor, Tensor]:
        """Return the patches or cells, and the library's global feature; shapes as of `Grid`."""
        with autocast(self.device, self._half):
            maps, pooled = self._run(pixels.to(self.device))
        return maps.flatten(2).transpose(1, 2).float().contiguous(), pooled.float()

    @abstractmethod
    def _run(self, pixels: Tensor) -> tuple[Tensor, Tensor]:
        """Return the map [B,C,H,W] of the layer, without tokens that are no patches, and the global feature [B,D]."""

    @abstractmethod
    def _count(self, pixels: Tensor) -> int:
        """Return how many layers have a map."""

    @torch.inference_mode()
    def _settle(self, what: str, layer: int, shape: tuple[int, int]) -> str:
        """Choose a layer, from 0 or, below 0, from the last, and take the features' shapes; return its name.

        Args:
            what: how a message calls the model.
            layer: which.
            shape: height and width of the pixels.

        Raises:
            EncoderError: there is no such layer, or the model encodes no picture of that shape so.
        """
        try:
            pixels = noise(shape).to(self.device)
            with autocast(self.device, self._half):
                count = self._count(pixels)
            if not -count <= layer < count:
                raise EncoderError(
                    f"{what} has no layer {layer}; choose one from 0 to {count - 1}, or from -1, the last, down to"
                    f" -{count}"
                )
            self._layer, self._last = layer % count, layer % count == count - 1
            maps, pooled = self._run(pixels)
            (_, channels, height, width), (_, global_channels) = maps.shape, pooled.shape
        except _FAULTS as error:
            if isinstance(error, EncoderError):
                raise
            raise EncoderError(
                f"{what} does not encode a picture of {shape[0]} x {shape[1]} pixels as a map ({reason(error)}); choose"
                " another model or --image-size"
            ) from error
        self._set_shapes((height, width), channels, global_channels)
        return "last" if self._last else f"intermediates.{self._layer}"


def seen(mode: str, side: int, resized: int) -> dict[str, int]:
    """Return what a network sees of a picture, as every encoder of a grid says it.

    Args:
        mode: ``crop`` the middle of the shorter side, ``squash`` the whole picture into a square, or ``pad`` the
            longer side.
        side: of the square that the network takes, pixels.
        resized: side that the picture is resized to before, pixels.
    """
    if mode == "crop":
        return {"resize": resized, "crop": side}
    if mode == "squash":
        return {"stretch": resized} | ({"crop": side} if resized != side else {})
    return {"resize": resized, "pad": side}
