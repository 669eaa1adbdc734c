"""Putting the backbone of a feature set back: the same network, weights and preprocessing, found again or named.

A set's identity says what its features were made with; weights count by their digest, wherever they come from.
"""

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ..cache import CaptionSet, FeatureCache, FeatureSet, ImageSet
from ..data.manifest import bundled_manifests, load_manifest
from ..encoders import TrainableEncoder, VisualEncoder, loading, make_visual
from ..errors import CacheError, EncoderError, SampleError

_PROBED = 4  # images whose features are compared with the cache
_DIFFERENCE = 0.05  # between the features of other files and those of the same; other libraries stay far below


def put_back_images(
    features: ImageSet, rows: np.ndarray, folder: Path, weights: str | None, device: str, image_size: int | None
) -> TrainableEncoder:
    """Return the encoder that made an image set, of its own, not shared with anybody.

    A few images are encoded and compared with the set first: are they the same files?

    Args:
        features: the set.
        rows: image rows that could be read when it was made.
        folder: of the images.
        weights: a file, ``imagenet`` or ``random:SEED``; None: as the set remembers them, unless they came from a file.
        device: where it runs.
        image_size: another side of the input than the set's, pixels; None: the set's.

    Raises:
        EncoderError: these are not the set's weights, or the network does not take images of that size.
        CacheError: the set holds no grid or was imported, or the images are others.
        SampleError: an image cannot be read.
    """
    size = grid_side(features.identity)
    if features.kind != "grid" or size is None:
        raise CacheError(
            f"'{features.name}' in {features.cache.url} holds no grid that xret extracted, so its backbone cannot be"
            " put back; leave its images on the cache with --reattach text"
        )
    weights = weights or remembered_weights(features)
    if weights is None:
        raise EncoderError(
            f"'{features.name}' was made with weights from a file; give that file as --visual-weights FILE"
        )
    name = features.identity["encoder"]
    encoder = _load_images(name, weights, size, device)
    _check(encoder.identity, features, weights, "--visual-weights")
    _check_images(encoder, features, rows, folder)
    if image_size is None or image_size == size:
        return encoder
    other = _load_images(name, weights, image_size, device)
    try:
        other.network.load_state_dict(encoder.network.state_dict())
    except RuntimeError as error:
        raise EncoderError(
            f"the weights of {name} are for images of {size} pixels and do not fit those of {image_size}; leave"
            " finetune.image_size as it is"
        ) from error
    return other


def put_back_captions(features: CaptionSet, weights: str, device: str) -> TrainableEncoder:
    """Return the encoder that made a caption set, of its own, not shared with anybody.

    Args:
        features: the set.
        weights: folder or hub id.
        device: where it runs.

    Raises:
        EncoderError: these are not the set's weights.
        CacheError: nothing can be put back: the set holds words, or was imported.
    """
    identity = features.identity if features.kind == "tokens" else {}
    if identity.get("encoder") != "bert" or "preprocessing" not in identity:
        raise CacheError(
            f"'{features.name}' in {features.cache.url} holds no states of a text encoder that xret ran, so there is"
            " no backbone to put back; take --reattach image"
        )
    from ..encoders.bert import BertEncoder

    layer, special_tokens, max_tokens = text_options(identity).values()
    with loading():
        encoder = BertEncoder(weights, device, layer, special_tokens, max_tokens)
    _check(encoder.identity, features, weights, "--text-weights")
    return encoder


def extraction_words(encoders: Iterable[TrainableEncoder]) -> dict[str, Any]:
    """Return how an extraction names these encoders, weights apart, in the words of `options.Options`."""
    words: dict[str, Any] = {"visual": None, "text": None}
    for encoder in encoders:
        identity = encoder.identity
        if identity["encoder"] == "bert":
            words |= {"text": "bert", **text_options(identity)}
        else:
            words |= {"visual": identity["encoder"], "image_size": grid_side(identity)}
    return words


def image_folder(cache: FeatureCache, data_root: Path | None) -> Path:
    """Return the folder that holds the images of a cache.

    Args:
        cache: names the data set and the files.
        data_root: what the paths of a bundled manifest start from, or the folder of the images, or one that has
            them in ``images``.

    Raises:
        CacheError: they are not there.
        ManifestError: the data set is a bundled one, and is not below `data_root`.
    """
    (first,) = cache.file_names(0, 1)
    for folder in [data_root, data_root / "images"] if data_root else []:
        if (folder / first).exists():
            return folder
    if cache.dataset in bundled_manifests():
        return load_manifest(cache.dataset, data_root).images
    where = (
        f"{data_root} has no {first}, neither there nor in images" if data_root else "it is not known where they are"
    )
    raise CacheError(f"the images of '{cache.dataset}' are wanted, and {where}; give their folder as --data-root DIR")


def read_image(encoder: VisualEncoder, path: Path) -> Tensor:
    """Return one image's pixels as the network takes them; a `SampleError` says what to do."""
    try:
        return encoder.decode(path)[0]
    except SampleError as error:
        raise unreadable(error) from error


def unreadable(error: SampleError) -> SampleError:
    """Return the error of an image that the cache has and that is not there now, with what to do."""
    return SampleError(error.sample, f"{error.reason}; put the file back that was extracted, or check --data-root")


def grid_side(identity: dict[str, Any]) -> int | None:
    """Return the side of a grid encoder's input, pixels; None for what is no such encoder's."""
    preprocessing = identity.get("preprocessing")
    if not isinstance(preprocessing, dict):
        return None
    return preprocessing.get("crop", preprocessing.get("stretch"))


def text_options(identity: dict[str, Any]) -> dict[str, Any]:
    """Return the options of an extraction with which a text encoder of this identity was made, weights apart."""
    preprocessing, layer = identity["preprocessing"], identity["layer"]
    return {
        "text_layer": -1 if layer == "last_hidden_state" else int(layer.rpartition(".")[2]),
        "special_tokens": preprocessing.get("special_tokens", True),
        "max_tokens": preprocessing["max_length"],
    }


def remembered_weights(features: FeatureSet) -> str | None:
    """Return ``imagenet`` or ``random:SEED`` if a set was made with these weights."""
    weights = str(features.identity.get("weights", ""))
    if weights.startswith("random:"):
        return weights
    asked = features.attributes.get("asked") or {}
    return "imagenet" if asked.get("weights") == "imagenet" else None


def _load_images(name: str, weights: str, size: int, device: str) -> Any:
    with loading():
        return make_visual(name, weights, size, device)


def _check(identity: dict[str, Any], features: FeatureSet, weights: str, option: str) -> None:
    differing = sorted(key for key in features.identity if identity.get(key) != features.identity[key])
    if differing:
        raise EncoderError(
            f"'{weights}' is not what '{features.name}' was made with: {', '.join(differing)} differ"
            f"{'s' if len(differing) == 1 else ''}; give those very weights as {option}"
        )


def _check_images(encoder: Any, features: ImageSet, rows: np.ndarray, folder: Path) -> None:
    for row in rows[np.linspace(0, len(rows) - 1, min(_PROBED, len(rows))).astype(int)]:
        (name,) = features.cache.file_names(row, row + 1)
        pixels = read_image(encoder, folder / name)
        with torch.inference_mode():
            found = encoder.features(pixels[None])[1].cpu().numpy()[0]
        cached = features.global_(np.array([row]))[0].astype(np.float32)
        if np.linalg.norm(found - cached) > _DIFFERENCE * np.linalg.norm(cached):
            raise CacheError(
                f"{folder / name} has other features than '{features.name}' holds for it: the files there are not those"
                " that were extracted; give the right --data-root"
            )
