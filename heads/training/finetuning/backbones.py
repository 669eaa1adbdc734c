"""Putting the backbone of a feature set back: the same network, weights and preprocessing, found again or named."""

from typing import Any, cast

import numpy as np
import torch
from torch import Tensor

from ....pipeline.data.sources import PictureReader
from ....pipeline.encoders.base import TrainableEncoder, VisualEncoder
from ....pipeline.encoders.origin import Origin, grid_side
from ....pipeline.encoders.registry import is_own
from ....pipeline.errors import CacheError, EncoderError, SampleError
from ....pipeline.reading.pictures import unreadable
from ....pipeline.store import CaptionSet, ImageSet
from ....pipeline.wording import option

_PROBED = 4  # images whose features are compared with the cache
_DIFFERENCE = 0.05  # between the features of other files and those of the same; other libraries stay far below


def put_back_images(
    features: ImageSet,
    rows: np.ndarray,
    pictures: PictureReader,
    weights: str | None,
    device: str,
    image_size: int | None,
    trust: bool = False,
) -> TrainableEncoder:
    """Return the encoder that made an image set; some of its usable `rows` are compared with the `pictures` first.

    `weights` says where the encoder's are, if not where they were; `image_size` is another side of the input, pixels.

    Raises:
        EncoderError: these are not the set's weights, or the network does not take images of that size.
        CacheError: the set holds no grid or was imported, or the images are others.
        SampleError: an image cannot be read.
    """
    origin = Origin.of(features)
    if features.kind != "grid" or origin.spec is None or is_own(origin.spec.name) or origin.spec.pool:
        raise CacheError(
            f"the encoder of '{features.name}' in {features.cache.url} cannot be trained: that needs a grid by xret of"
            " torchvision, transformers, timm or open_clip, without --pool; leave its images on the cache with"
            " --reattach text"
        )
    encoder: Any = origin.load_images(weights, device, trust)
    _check_images(encoder, features, rows, pictures)
    side = grid_side(features.identity)
    if image_size is None or image_size == side:
        return cast(TrainableEncoder, encoder)
    try:
        other: Any = origin.load_images(weights, device, trust, image_size=image_size)
        other.network.load_state_dict(encoder.network.state_dict())
    except (EncoderError, RuntimeError) as error:
        what = error if isinstance(error, EncoderError) else f"its weights are for images of {side} pixels"
        raise EncoderError(f"finetune.image_size={image_size} does not suit the backbone: {what}") from error
    return cast(TrainableEncoder, other)


def put_back_captions(features: CaptionSet, weights: str | None, device: str, trust: bool = False) -> TrainableEncoder:
    """Return the encoder that made a caption set; EncoderError for other weights, CacheError for an unfit set."""
    origin = Origin.of(features)
    if features.kind != "tokens" or origin.spec is None or is_own(origin.spec.name):
        raise CacheError(
            f"'{features.name}' in {features.cache.url} holds no states of a text encoder that xret ran, so there is"
            " no backbone to put back; take --reattach image"
        )
    return cast(TrainableEncoder, origin.load_captions(weights, device, trust))


def read_image(encoder: VisualEncoder, pictures: PictureReader, name: str) -> Tensor:
    """Return one image's pixels as the network takes them; a `SampleError` says what to do."""
    try:
        pixels: Tensor = encoder.decode(pictures.open(name))[0]
    except SampleError as error:
        raise unreadable(error) from error
    return pixels


def _check_images(encoder: Any, features: ImageSet, rows: np.ndarray, pictures: PictureReader) -> None:
    for row in rows[np.linspace(0, len(rows) - 1, min(_PROBED, len(rows))).astype(int)]:
        (name,) = features.cache.file_names(row, row + 1)
        pixels = read_image(encoder, pictures, name)
        with torch.inference_mode():
            found = encoder.features(pixels[None])[1].cpu().numpy()[0]
        cached = features.global_(np.array([row]))[0].astype(np.float32)
        if np.linalg.norm(found - cached) > _DIFFERENCE * np.linalg.norm(cached):
            raise CacheError(
                f"{name} has other features than '{features.name}' holds for it, so it is not the file that"
                f" was extracted; give the right {option('data-root')}"
            )
