"""Size augmentation: rows of a sample are left out while training.

Source: *Learning the Best Pooling Strategy for Visual Semantic Embedding* (VSE-infinity), section 3.2, "Learning
Generator with Diverse Set Sizes": 20% of the input vectors are dropped at random, of images and of captions.
"""

import torch

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
