"""Augmentation of cached features: rows of a sample are left out, words are masked, or two samples are blended.

Sources: *Learning the Best Pooling Strategy for Visual Semantic Embedding* (VSE-infinity), section 3.2, "Learning
Generator with Diverse Set Sizes": 20% of the input vectors are dropped at random, of images and of captions. Its
published code draws that share for each grid, and masks words.
*Data-Efficient Multimodal Fusion on a Single GPU* (FuseMix, arXiv 2312.10144), section 4: both modalities of two pairs
are interpolated by the same share.
"""

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor
from torch.nn.functional import pad

from ...pipeline.device import on_host, send
from ...pipeline.reading.features import Features, set_by_set, side_by_side
from ..modules.padding import mean_rows, zero_padding
from ..modules.positions import square

MASKED, REPLACED = 0.5, 0.6  # up to which of a chosen word's chance it is masked, or replaced; beyond, left out
_AT_ONCE = 1024  # samples
_ROWS = 8  # by whose multiples batches differ in length on a GPU


def drop_rows(features: Features, share: float, varies: bool = False) -> Features:
    """Leave out each row of `[B, N, …]` with probability `share`, independently; a sample keeps at least one.

    The order of what stays is kept, and `place` says where the cells of a map were; global features stay as they are.
    Chances are drawn on the CPU from torch's global generator, so that a seed means the same on every device.

    `varies` draws the share of each sample: a number between 0 and 1, times `share`, but none where that number is not
    above `share` itself (published code of VSE-infinity, for the cells of a grid).
    """
    return features if share == 0 else set_by_set(lambda part: _drop_rows(part, share, varies), features)


def _drop_rows(features: Features, share: float, varies: bool) -> Features:
    rows = features.local if features.local is not None else features.token
    if rows is None:
        return features
    chance, valid = torch.rand(rows.shape[:2]), _valid(rows, features.length)
    chance = chance.masked_fill(~valid, -1)
    luckiest = chance == chance.amax(1, keepdim=True)  # kept whatever the share
    least: float | Tensor = share
    if varies:
        strength = torch.rand(len(rows), 1)
        least = strength.where(strength > share, 0) * share
    return _left(features, valid & ((chance >= least) | luckiest))


def mask_words(captions: Features, share: float, mask: int) -> Features:
    """Change the words of captions as `end_to_end.change_words` changes those of BERT's input; one word always stays.

    A word is chosen by the chance `share`, above 0; of those chosen 50% become `mask`, 10% any known word, of the ids 1
    to `mask - 1`, and 40% are left out. Chances are drawn as those of `drop_rows`. Other feature sets stay as they are.
    """
    parts = [part if part.token is None else _mask_words(part, share, mask) for part in captions.parts]
    return side_by_side(parts)


def _mask_words(captions: Features, share: float, mask: int) -> Features:
    token = captions.token
    assert token is not None, "words are masked"
    lot = torch.rand(token.shape) / share
    others = torch.randint(1, max(mask, 2), token.shape).where(lot >= MASKED, mask)
    keep = _valid(token, captions.length) & ((lot < REPLACED) | (lot >= 1))
    nothing = ~keep.any(1)
    others = others.masked_fill(lot >= REPLACED, -1)  # stays as it is
    others[nothing, 0] = mask
    keep[:, 0] |= nothing
    others = send(others, token.device)
    changed = token.where(others < 0, others)
    return _left(Features(captions.length, captions.local, captions.global_, changed), keep)


def _valid(rows: Tensor, length: Tensor) -> Tensor:
    return torch.arange(rows.shape[1]) < on_host(length)[:, None]


def _left(features: Features, keep: Tensor) -> Features:
    """Return the rows to `keep`, bool `[B, N]` on the host, in their order."""
    device, known = features.length.device, keep.sum(1)
    order = send((~keep).int().argsort(dim=1, stable=True)[:, : int(known.max())], device)
    length = send(known, device)
    # Rows left out may stand after the new length, where there must be zeros.
    local, token, grid = features.local, features.token, features.grid or square(keep.shape[1])
    if local is not None:
        local = zero_padding(local.gather(1, order[..., None].expand(-1, -1, local.shape[2])), length)
    if token is not None:
        token = zero_padding(token.gather(1, order), length)
    return Features(length, local, features.global_, token, order, grid)


def in_steps(features: Features) -> Features:
    """Return features that a GPU finds in few shapes: where lengths vary, the rows are padded to a multiple of 8."""
    return features if features.length.is_cpu else set_by_set(_in_steps, features)


def _in_steps(features: Features) -> Features:
    local, token, place = features.local, features.token, features.place
    rows = next((one.shape[1] for one in (local, token) if one is not None), 0)
    more = -rows % _ROWS
    if not more or (on_host(features.length) == rows).all():
        return features
    return replace(
        features,
        local=None if local is None else pad(local, (0, 0, 0, more)),
        token=None if token is None else pad(token, (0, more)),
        place=None if place is None else pad(place, (0, more)),
    )


def averaged(features: Features, which: Sequence[bool]) -> Features:
    """Return the mean of a sample's rows as its only row, float32, in those feature sets for which `which` says so.

    Blended vectors are not the vectors of blended rows, of which the longer sample has more.
    """
    pairs = zip(features.parts, which, strict=True)
    return side_by_side([_averaged(part) if chosen else part for part, chosen in pairs])


def _averaged(features: Features) -> Features:
    assert features.local is not None, "the adapter reads rows"
    # A few samples at once: float32 copies of a very large batch's rows would take far more than the rows.
    parts = zip(features.local.split(_AT_ONCE), features.length.split(_AT_ONCE), strict=True)
    means = torch.cat([mean_rows(rows.float(), length) for rows, length in parts])
    some = send((on_host(features.length) > 0).long(), means.device)  # zeros stay those of a sample without rows
    return Features(some, means[:, None], features.global_)


def blend(images: Features, captions: Features, caption_image: Tensor, alpha: float) -> tuple[Features, Features]:
    """Blend each pair with another one of the batch, by a share that is drawn from Beta(`alpha`, `alpha`).

    Share and partners are the same for both modalities (FuseMix) and for all feature sets, and are drawn on the CPU
    from torch's global generator. Rows are blended by their number; a blended sample is as long as the longer of the
    two. An image without a caption stays as it is. Where a head reads nothing but the mean of the rows, see `averaged`.

    `caption_image` is the image of each caption, int64 `[C]`; an image has at most one. Captions are no words.
    """
    share = torch.distributions.Beta(alpha, alpha).sample().item()
    device, caption_image = caption_image.device, on_host(caption_image)
    partner, of_image = torch.randperm(len(caption_image)), torch.arange(len(images.length))
    of_image[caption_image] = caption_image[partner]
    partner, of_image = send(partner, device), send(of_image, device)
    return (
        set_by_set(lambda part: _blended(part, share, of_image), images),
        set_by_set(lambda part: _blended(part, share, partner), captions),
    )


def _blended(features: Features, share: float, partner: Tensor) -> Features:
    def mixed(values: Tensor | None) -> Tensor | None:
        return None if values is None else torch.lerp(values[partner].float(), values.float(), share)

    length = on_host(features.length)
    length = send(torch.maximum(length, length[on_host(partner)]), partner.device)
    return Features(length, mixed(features.local), mixed(features.global_), None, grid=features.grid)
