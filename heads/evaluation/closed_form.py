"""Linear maps between cached features: read from a split, and chosen by how they rank samples that were held out."""

from collections.abc import Callable, Iterable, Iterator
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import normalize

from ...pipeline.data.texts import ranges
from ...pipeline.reading.batches import Batches
from ...pipeline.reading.features import Features
from ..model import Model
from ..modules.canonical import LinearMap, Moments
from ..modules.residual import ClosedForm
from .metrics import block_ranks, recall_table
from .pairs import Pairs, Part
from .scoring import cosine_model, representatives

BATCH = 256  # images read in one go, with their captions
HELD = 1000  # images that choose a map, at most
RIDGES = (0.03, 0.1, 0.3, 1.0, 3.0, 10.0)  # in mean eigenvalues
POWERS = (0.0, 0.25, 0.5, 1.0, 2.0)  # of the correlations, on either side: 0.5 weights a product by them
PROCRUSTES = float("inf"), 0.0

Maps = tuple[LinearMap, LinearMap]  # of images and of captions
Read = Callable[[Features], list[Tensor]]  # the vectors of each feature set


class Block(NamedTuple):
    """Images with their captions: of each set a vector a sample, and the image of each caption among these."""

    images: list[Tensor]  # [I, C]
    captions: list[Tensor]  # [M, C]
    owner: Tensor  # int64 [M]


class Chosen(NamedTuple):
    """Maps with the ridge and the power that ranked best, and the RSUM that they reached."""

    maps: Maps
    ridge: float
    power: float
    rsum: float


def with_captions(batches: Batches) -> np.ndarray:
    """Return the images of a split that have captions, as places among its images."""
    return np.unique(batches.caption_image)


def blocks(batches: Batches, chosen: np.ndarray, image: Read, caption: Read) -> Iterator[Block]:
    """Yield the chosen images, which have captions, some at a time, on the CPU."""
    count = np.bincount(batches.caption_image, minlength=batches.images)
    first = count.cumsum() - count
    for images in np.split(chosen, range(BATCH, len(chosen), BATCH)):
        owner = torch.from_numpy(np.repeat(np.arange(len(images)), count[images]))
        of_images = image(batches.image_source.fetch(images)())
        of_captions = caption(batches.caption_source.fetch(ranges(first[images], count[images]))())
        yield Block([vectors.cpu() for vectors in of_images], [vectors.cpu() for vectors in of_captions], owner)


def moments_of(parts: Iterable[Block]) -> Moments:
    """Return the means and covariances of blocks."""
    moments = Moments()
    for part in parts:
        moments.add(*part)
    return moments


class Held:
    """Images with their captions, in memory, to rank by maps."""

    def __init__(self, batches: Batches, chosen: np.ndarray, image: Read, caption: Read) -> None:
        parts = [*blocks(batches, chosen, image, caption)]
        self.images, self.captions = (
            [torch.cat(of_set) for of_set in zip(*side, strict=True)]
            for side in ([part.images for part in parts], [part.captions for part in parts])
        )
        rows = np.flatnonzero(np.isin(batches.caption_image, chosen))
        self.owner = torch.from_numpy(np.searchsorted(chosen, batches.caption_image[rows]))
        texts = batches.texts()
        self.texts = [texts[row] for row in rows.tolist()]

    def rsum(self, maps: Maps, image: int = 0, caption: int = 0) -> float:
        """Return the RSUM of an image set and a caption set by the cosine of what the maps give, ties pessimistic."""
        vectors = self.images[image], self.captions[caption]
        images, captions = (normalize(linear(side), dim=1).float() for linear, side in zip(maps, vectors, strict=True))
        pairs = Pairs((Part(cosine_model(), (images,), captions),), self.owner, representatives(captions, self.texts))
        return recall_table(*block_ranks(pairs.blocks, len(images), self.owner)).rsum

    def best(self, moments: Moments, image: int = 0, caption: int = 0) -> Chosen:
        """Choose the ridge, the power, and the ridge once more; Procrustes where that ranks better."""
        tried: dict[tuple[float, float], Chosen] = {}

        def rsum(ridge: float, power: float) -> float:
            if (ridge, power) not in tried:
                maps = moments.maps(ridge, power, image, caption)
                tried[ridge, power] = Chosen(maps, ridge, power, self.rsum(maps, image, caption))
            return tried[ridge, power].rsum

        ridge = max(RIDGES, key=lambda choice: rsum(choice, 0.5))
        power = max(POWERS, key=lambda choice: rsum(ridge, choice))
        for ridge, power in (*((choice, power) for choice in RIDGES), PROCRUSTES):
            rsum(ridge, power)
        return max(tried.values(), key=lambda choice: choice.rsum)


def find_base(model: Model, train: Batches, val: Batches, *, rotate: bool = False) -> Chosen:
    """Set the bases of both branches, each a `ClosedForm`, to the maps of `train` that rank `val` best.

    With `rotate` they are Procrustes', whatever ranks better.
    """
    residuals = (branch.residual.base for branch in (model.image, model.text) if branch.residual is not None)
    bases = [base for base in residuals if isinstance(base, ClosedForm)]
    image, caption = map(_reader, bases)
    moments = moments_of(blocks(train, with_captions(train), image, caption))
    images = with_captions(val)
    held = Held(val, images[:: -(-len(images) // HELD)], image, caption)
    maps = moments.maps(*PROCRUSTES)
    chosen = Chosen(maps, *PROCRUSTES, held.rsum(maps)) if rotate else held.best(moments)
    for base, linear in zip(bases, chosen.maps, strict=True):
        base.mean.copy_(linear.mean)
        base.matrix.copy_(linear.matrix / linear.matrix.abs().max())  # its scale means nothing
    return chosen


def _reader(base: ClosedForm) -> Read:
    return lambda features: [base.vectors(features)]
