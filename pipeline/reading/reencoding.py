"""New pictures and captions, encoded as those of a feature set were: by the encoders of `origin.Origin`."""

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
import torch
from PIL import Image

from ..data.images import PictureFile
from ..data.regions import Regions, lay_out
from ..encoders import TextEncoder, VisualEncoder, encoding
from ..errors import SampleError
from .features import Features, pad, pad_ids, side_by_side

BATCH = 32  # samples that go through an encoder at once
Picture: TypeAlias = str | Path | PictureFile | Image.Image


def encode_images(encoder: VisualEncoder, dtype: str, device: str, images: Sequence[Picture]) -> Iterator[Features]:
    """Yield the features of pictures on `device`, the encoder's, some at a time and rounded to `dtype`.

    Args:
        images: files, or folders of frames where the encoder takes videos; decoded pictures where it does not.

    Raises:
        SampleError: one cannot be read, or `dtype` cannot hold its features.
    """
    for first in range(0, len(images), BATCH):
        some = images[first : first + BATCH]
        features, usable = _encode(encoder, dtype, device, [_decode(encoder, image) for image in some])
        for image, good in zip(some, usable, strict=True):
            if not good:
                raise SampleError(_name(image), f"its features are beyond {dtype} or no numbers; take another picture")
        yield features


def encode_images_by_all(
    encoders: Sequence[tuple[VisualEncoder, str]], device: str, images: Sequence[Picture]
) -> Iterator[Features]:
    """Yield the features that several encoders, each with its dtype, give pictures; see `encode_images`."""
    made = [encode_images(encoder, dtype, device, images) for encoder, dtype in encoders]
    return map(side_by_side, zip(*made, strict=True))


def encode_decoded(
    encoders: Sequence[tuple[VisualEncoder, str]], device: str, decoded: Sequence[Sequence[Any]]
) -> tuple[Features, np.ndarray]:
    """Return the features that several encoders, each with its dtype, give B pictures, at most `BATCH`.

    Args:
        decoded: by encoder the pictures as its `decode` gave them.

    Returns:
        The features, and whether the dtypes can hold those of each picture, bool [B].
    """
    made = [_encode(*encoder, device, some) for encoder, some in zip(encoders, decoded, strict=True)]
    return side_by_side([features for features, _ in made]), np.logical_and.reduce([usable for _, usable in made])


def encode_captions_by_all(
    encoders: Sequence[tuple[TextEncoder, str]], device: str, texts: Sequence[str]
) -> Iterator[Features]:
    """Yield the features that several encoders, each with its dtype, give captions; see `encode_captions`."""
    made = [encode_captions(encoder, dtype, device, texts) for encoder, dtype in encoders]
    return map(side_by_side, zip(*made, strict=True))


def encode_captions(encoder: TextEncoder, dtype: str, device: str, texts: Sequence[str]) -> Iterator[Features]:
    """Yield the features of captions on `device`, the encoder's, some at a time and rounded to `dtype`.

    Raises:
        SampleError: `dtype` cannot hold those of one.
    """
    for first in range(0, len(texts), BATCH):
        ids = encoder.tokenize(list(texts[first : first + BATCH]))
        token, length = pad_ids(ids)
        token = token.to(device)
        with encoding(device):
            encoded = encoder.encode(ids)
        if encoded is None:
            yield Features(length.to(device), token=token)
            continue
        with np.errstate(over="ignore"):  # found below
            states, pooled = (array.astype(dtype) for array in encoded)
        if not (np.isfinite(states).all() and np.isfinite(pooled).all()):
            raise SampleError("the text", f"its features are beyond {dtype} or no numbers; take other words")
        local = pad(torch.from_numpy(states), length).to(device)
        yield Features(length.to(device), local, torch.from_numpy(pooled).to(device), token)


def _encode(encoder: VisualEncoder, dtype: str, device: str, decoded: Sequence[Any]) -> tuple[Features, np.ndarray]:
    with encoding(device):
        encoded = encoder.encode(torch.stack(list(decoded)) if encoder.kind == "grid" else list(decoded))
    with np.errstate(over="ignore"):  # whoever asked sees it in the second value
        arrays = _laid_out(encoder, dtype, encoded)
    features = Features(
        torch.from_numpy(arrays["length"]).long().to(device),
        local=torch.from_numpy(arrays["local"]).to(device),
        global_=torch.from_numpy(arrays["global"]).to(device),
        grid=encoder.grid,
    )
    finite = [np.isfinite(arrays[name]).reshape(len(decoded), -1).all(1) for name in ("local", "global")]
    return features, np.logical_and(*finite)


def _decode(encoder: VisualEncoder, image: Picture) -> Any:
    if isinstance(image, Image.Image) and encoder.kind == "frames":
        raise SampleError(_name(image), "this is no video; give a folder of frames")
    try:
        return encoder.decode(image)[0]
    except SampleError as error:
        raise SampleError(_name(image), error.reason) from error


def _name(image: Picture) -> str:
    if isinstance(image, PictureFile):
        return str(image.name)
    return "the picture" if isinstance(image, Image.Image) else str(image)


def _laid_out(
    encoder: VisualEncoder, dtype: str, encoded: "tuple[np.ndarray, np.ndarray] | list[Regions]"
) -> dict[str, np.ndarray]:
    """Return local features, their number, and the global ones, as the set's arrays hold them."""
    if isinstance(encoded, list):
        arrays = {
            "local": np.empty((len(encoded), encoder.rows, encoder.channels), dtype),
            "global": np.empty((len(encoded), encoder.global_channels), dtype),
            "length": np.empty(len(encoded), np.int32),
        }
        for row, regions in enumerate(encoded):
            lay_out(arrays, row, regions)
        return arrays
    local, global_ = encoded
    length = np.full(len(local), local.shape[1])
    return {"local": local.astype(dtype), "global": global_.astype(dtype), "length": length}
