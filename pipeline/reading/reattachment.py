"""Putting the backbone of a feature set back: the same network, weights and preprocessing, found again or named."""

from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor

from ..data.manifest import Manifest, bundled_manifests, load_manifest
from ..data.sources import FOLDER, PictureReader, find_source, is_url
from ..encoders.base import TrainableEncoder, VisualEncoder
from ..encoders.registry import is_own
from ..errors import CacheError, EncoderError, ManifestError, SampleError
from ..store import CaptionSet, FeatureCache, ImageSet
from ..wording import option
from .origin import Origin, grid_side

_LOOKED_FOR = 100  # images of which one has to be in a folder; single ones may be missing
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
    if features.kind != "tokens" or origin.spec is None:
        raise CacheError(
            f"'{features.name}' in {features.cache.url} holds no states of a text encoder that xret ran, so there is"
            " no backbone to put back; take --reattach image"
        )
    return cast(TrainableEncoder, origin.load_captions(weights, device, trust))


def image_folder(cache: FeatureCache, data_root: Path | None) -> Path:
    """Return the folder that holds the images of a cache.

    It is `data_root`, the folder ``images`` in it, or where a manifest in `data_root` says, which may be a copy of a
    bundled one; else where the bundled one says, below `data_root`. CacheError or ManifestError if they are not there.
    """
    folders = [] if data_root is None else [data_root, data_root / "images"]
    folders += [manifest.images for manifest in manifests_in(data_root, cache.dataset)]
    names = cache.file_names(0, min(cache.images, _LOOKED_FOR))
    for folder in folders:
        if any((folder / name).exists() for name in names):
            return folder
    if cache.dataset in bundled_manifests():
        return load_manifest(cache.dataset, data_root).images
    tried = f"{names[0]} is not in {', '.join(map(str, folders))}" if folders else "no folder was given"
    raise CacheError(
        f"the images of '{cache.dataset}' are missing: {tried}; give their folder as {option('data-root', 'DIR')}"
    )


def manifests_in(folder: Path | None, dataset: str) -> Iterator[Manifest]:
    """Yield the manifests of a data set that lie in a folder, or next to that folder."""
    for path in sorted([*folder.glob("*.yaml"), *folder.parent.glob("*.yaml")]) if folder is not None else ():
        with suppress(ManifestError):
            manifest = load_manifest(path)
            if manifest.name == dataset:
                yield manifest


def find_pictures(cache: FeatureCache, data_root: Path | None) -> PictureReader:
    """Return what opens the pictures of a cache by their file names; errors as of `image_folder`.

    `data_root` is that of `image_folder`; where pictures lie in files with others, what the names of these start from.
    """
    folder = image_folder(cache, data_root) if cache.source == FOLDER else _folder_of_files(cache, data_root)
    return cache.open_pictures(folder, 0, cache.images)


def _folder_of_files(cache: FeatureCache, data_root: Path | None) -> Path:
    """Return the folder where the names of the files start that hold the pictures of a cache.

    A store may come from a stranger: it names files outside `data_root` only where a manifest in there does, too.
    """
    names = [file.name for file in cache.source.files]
    for manifest in manifests_in(data_root, cache.dataset):
        if set(names) <= {file.name for file in find_source(manifest).files}:
            return manifest.images
    outside = [name for name in names if is_url(name) or Path(name).is_absolute() or ".." in Path(name).parts]
    if not outside and data_root is not None and (data_root / names[0]).exists():
        return data_root
    where = f"is not in {data_root}" if data_root else "lies in a folder that was not given"
    what = "of the manifest that names it" if outside else "that this name starts from"
    raise CacheError(
        f"the images of '{cache.dataset}' are missing: {(outside or names)[0]} {where}; give the folder {what} as"
        f" {option('data-root', 'DIR')}"
    )


def read_image(encoder: VisualEncoder, pictures: PictureReader, name: str) -> Tensor:
    """Return one image's pixels as the network takes them; a `SampleError` says what to do."""
    try:
        pixels: Tensor = encoder.decode(pictures.open(name))[0]
    except SampleError as error:
        raise unreadable(error) from error
    return pixels


def unreadable(error: SampleError) -> SampleError:
    """Return the error of an image that was extracted and cannot be read now, with what to do."""
    return SampleError(error.sample, f"{error.reason}; put the extracted file back, or check {option('data-root')}")


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
