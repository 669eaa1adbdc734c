"""Augmentation of cached features: rows of a sample are left out, or two samples are blended.

Sources: *Learning the Best Pooling Strategy for Visual Semantic Embedding* (VSE-infinity), section 3.2, "Learning
Generator with Diverse Set Sizes": 20% of the input vectors are dropped at random, of images and of captions.
*Data-Efficient Multimodal Fusion on a Single GPU* (FuseMix, arXiv 2312.10144), section 4: both modalities of two pairs
are interpolated by the same share.
"""

import torch
from torch import Tensor

from ...pipeline.errors import RecipeError
from ...pipeline.reading.features import Features
from ..modules.padding import valid_rows, zero_padding


def drop_rows(features: Features, share: float) -> Features:
    """Leave out each row with probability `share`, independently; a sample keeps at least one.

    The order of what stays is kept. Chances are drawn on the CPU from torch's global generator, so that a seed means
    the same on every device. The cached global feature stays what it is.

    Args:
        features: padded, `[B, N, …]`.
        share: between 0 and 1; 0 returns the features themselves.

    Returns:
        Features with shorter lengths, padded to the longest sample that is left.
    """
    if share == 0:
        return features
    rows = features.local if features.local is not None else features.token
    if rows is None:
        return features
    chance = torch.rand(rows.shape[:2]).to(rows.device, non_blocking=True)
    valid = valid_rows(rows, features.length)
    chance = chance.masked_fill(~valid, -1)
    luckiest = chance == chance.amax(1, keepdim=True)  # kept whatever the share
    keep = valid & ((chance >= share) | luckiest)
    length = keep.sum(1)
    order = (~keep).int().argsort(dim=1, stable=True)[:, : int(length.max())]
    # Rows left out may stand after the new length, where there must be zeros.
    local, token = features.local, features.token
    if local is not None:
        local = zero_padding(local.gather(1, order[..., None].expand(-1, -1, local.shape[2])), length)
    if token is not None:
        token = zero_padding(token.gather(1, order), length)
    return Features(length, local, features.global_, token)


def blend(images: Features, captions: Features, alpha: float) -> tuple[Features, Features]:
    """Blend each pair with another one of the batch, by a share that is drawn from Beta(`alpha`, `alpha`).

    Share and partners are the same for both modalities (FuseMix), and are drawn on the CPU from torch's global
    generator. Rows are blended by their number; a blended sample is as long as the longer of the two.

    Args:
        images: of B images.
        captions: of B captions, each of the image of its number.
        alpha: 0 returns the features themselves.

    Raises:
        RecipeError: a batch has several captions of an image, or captions are words.
    """
    if alpha == 0:
        return images, captions
    if captions.token is not None:
        raise RecipeError("augment.mix blends cached features, and words are none: extract --text bert, or set it to 0")
    if len(images.length) != len(captions.length):
        raise RecipeError("augment.mix blends pairs: set data.unit=image and data.captions=1")
    share = torch.distributions.Beta(alpha, alpha).sample().item()
    partner = torch.randperm(len(images.length)).to(images.length.device, non_blocking=True)
    return _blended(images, share, partner), _blended(captions, share, partner)


def _blended(features: Features, share: float, partner: Tensor) -> Features:
    def mixed(values: Tensor | None) -> Tensor | None:
        return None if values is None else torch.lerp(values[partner].float(), values.float(), share)

    length = torch.maximum(features.length, features.length[partner])
    return Features(length, mixed(features.local), mixed(features.global_), None)
