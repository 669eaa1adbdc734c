"""A checkpoint's own image processor: pixels as its documentation prepares them, of any side where it can."""

from functools import partial
from typing import Any

import numpy as np
from PIL import Image
from torch import Tensor

from ...errors import EncoderError
from ..base import require_cut
from .hub import plain

# Settings that decide the pixels. What a processor has besides is of the moment, or of other tasks.
_SHAPING = (
    *("do_convert_rgb", "do_resize", "size", "resample", "crop_pct", "do_center_crop", "crop_size", "do_pad"),
    *("pad_size", "do_rescale", "rescale_factor", "do_normalize", "image_mean", "image_std"),
)
_TRIED = ((96, 64), (64, 96))  # pictures whose pixels must have one shape


class Pixels:
    """Prepare pictures with an image processor of transformers, for a checkpoint that messages call `what`.

    `settings` is all that decides the pixels, as JSON. Of pictures made squares, ``resize`` is the shorter side and
    ``crop`` that of the middle; ``stretch`` is the side of the whole picture made a square, before a crop. `shape` is
    (height, width) of the pixels. EncoderError: they have no one shape, or an option does not fit the processor.
    """

    def __init__(self, processor: Any, what: str, image_size: int | None, whole: bool) -> None:
        settings = {key: value for key, value in processor.to_dict().items() if key in _SHAPING and value is not None}
        sizes = {} if image_size is None else _resized(what, settings, image_size)
        settings |= sizes
        if whole:
            sizes = _uncut(what, settings)
            settings |= sizes
        self._process = partial(processor, return_tensors="pt", **sizes)
        made = [self._process(images=Image.fromarray(np.zeros((*size, 3), dtype=np.uint8))) for size in _TRIED]
        shapes = {tuple(one["pixel_values"].shape[2:]) if "pixel_values" in one else () for one in made}
        self.shape = shapes.pop()
        if shapes or len(self.shape) != 2:
            raise EncoderError(
                f"{what}: the processor does not bring all pictures to one shape; let its preprocessor_config.json crop"
                " or stretch them, or take a checkpoint of a fixed resolution, as google/siglip2-base-patch16-224"
            )
        self.settings: dict[str, Any] = {
            "decoder": "pillow",
            "processor": type(processor).__name__,
            **{key: plain(value) for key, value in settings.items()},
            **_seen(settings, self.shape),
        }

    def prepare(self, image: Image.Image) -> Tensor:
        """Return the pixels of an RGB picture, float32 [3,H,W]."""
        pixels: Tensor = self._process(images=image)["pixel_values"][0]
        return pixels.float()


def _resized(what: str, settings: dict[str, Any], side: int) -> dict[str, Any]:
    """Return the sizes that make squares of a side, in the proportion in which the checkpoint resizes and crops."""
    size, crop = settings.get("size"), settings.get("crop_size")
    if not settings.get("do_resize", True) or not size:
        raise EncoderError(f"{what}: the processor resizes nothing; leave --image-size out")
    if not (settings.get("do_center_crop") and crop):
        return {"size": dict.fromkeys(size, side)}
    scaled = {key: round(side * value / crop["height"]) for key, value in size.items()}
    return {"size": scaled, "crop_size": {"height": side, "width": side}}


def _uncut(what: str, settings: dict[str, Any]) -> dict[str, Any]:
    size, crop = settings.get("size"), settings.get("crop_size")
    if "crop_pct" in settings or not settings.get("do_resize", True):
        raise EncoderError(f"{what}: the processor crops by a rule of its own, or not at all; leave --whole out")
    require_cut(what, bool(settings.get("do_center_crop") and crop and crop != size))
    return {"size": dict(crop or {}), "do_center_crop": False}


def _seen(settings: dict[str, Any], shape: tuple[int, int]) -> dict[str, int]:
    """Return what a network of square inputs sees of a picture that is resized: see `Pixels.settings`."""
    size, (height, width) = settings.get("size") or {}, shape
    if height != width or not settings.get("do_resize", True):
        return {}
    crops = bool(settings.get("do_center_crop"))
    if "height" in size and size["height"] == size["width"]:
        return {"stretch": size["height"]} | ({"crop": height} if crops else {})
    if "shortest_edge" in size and crops:
        return {"resize": size["shortest_edge"], "crop": height}
    if "shortest_edge" in size and "crop_pct" in settings:  # ConvNeXt's
        warps = height >= 384
        return {"stretch": height} if warps else {"resize": int(height / settings["crop_pct"]), "crop": height}
    return {}
