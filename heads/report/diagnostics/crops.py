"""Uncertainty against ambiguity, and the binary selection task, on crops of images.

Source: *Uncertainty-based Cross-Modal Retrieval with Probabilistic Representations*, section 4.6: Figure 2 (mean
uncertainty of crops and captions A and C) and Table 4 (binary selection, which point embeddings can do too).
"""

import itertools
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from ....pipeline.data.images import image_size, open_image
from ....pipeline.data.sources import PictureReader
from ....pipeline.errors import CacheError, SampleError
from ....pipeline.progress import Progress
from ....pipeline.reading.features import Features
from ....pipeline.reading.reattachment import unreadable
from ...evaluation.metrics import Ties
from ...model import Model
from ...modules.embedding import Embedding, each
from ..views import Side, embed_side
from .regions import Region, Triplet, regions_of, triplet

THRESHOLDS = (0.1, 0.2, 0.3, 0.4, 0.5)  # Figure 2: the share of the image that A and B stay below
IMAGES = 2000  # that triplets are made of; drawn at random where there are more
TOGETHER = 16  # triplets compared in one go; each is compared with the others too, for nothing
PART = 256  # crops that are held decoded

Encode = Callable[[Sequence[Any]], Iterator[Features]]


@dataclass(frozen=True)
class Images:
    """The images as a feature set saw them: turned as their EXIF orientations say, if they are `upright`."""

    reader: PictureReader
    upright: bool

    def size(self, name: str) -> tuple[int, int]:
        """Return the width and height of an image."""
        try:
            return image_size(self.reader.open(name), self.upright)
        except SampleError as error:
            raise unreadable(error) from error

    def open(self, name: str) -> Image.Image:
        """Return an image."""
        try:
            return open_image(self.reader.open(name), upright=self.upright)
        except SampleError as error:
            raise unreadable(error) from error


@dataclass(frozen=True)
class Accuracy:
    """How often the right one of two is chosen, in percent (Table 4), by the letter, ``A`` or ``C``, of what asks."""

    image_to_text: dict[str, float]
    text_to_image: dict[str, float]


@dataclass(frozen=True)
class Crop:
    """A crop of an example: its box in pixels, its caption, and the uncertainty of both by ``image`` and ``text``."""

    box: list[float]
    phrase: str
    uncertainty: dict[str, float] | None


@dataclass(frozen=True)
class Example:
    """One of the triplets.

    Attributes:
        file_name: of the image.
        size: its width and height.
        A, B, C: the crops.
        accuracy: of this triplet alone.
    """

    file_name: str
    size: list[int]
    A: Crop
    B: Crop
    C: Crop
    accuracy: Accuracy


@dataclass(frozen=True)
class Threshold:
    """The triplets whose crops A and B stay below a share of their image.

    Attributes:
        area: the share.
        uncertainty: their mean, by modality (``image``: the crops, ``text``: the captions), then by letter (``A``,
            ``C``); None without Gaussians.
        accuracy: of all of them.
        example: one of them; of another image at each threshold where there are as many.
    """

    area: float
    triplets: int
    uncertainty: dict[str, dict[str, float]] | None
    accuracy: Accuracy
    example: Example


@dataclass(frozen=True)
class Crops:
    """What the crops of `images` images show, by threshold; those without a triplet are left out."""

    images: int
    thresholds: list[Threshold]


class Found(NamedTuple):
    """A triplet, the image that it is of with its width and height, and the threshold that its crops are below."""

    file_name: str
    size: tuple[int, int]
    threshold: float
    triplet: Triplet

    @property
    def ambiguous(self) -> list[tuple[str, Region]]:
        """Regions A and C, each with the image's file."""
        return [(self.file_name, self.triplet.a), (self.file_name, self.triplet.c)]


@dataclass(frozen=True)
class _Looked:
    """Crops and their captions, embedded, and where each of them stands."""

    images: Side
    captions: Side
    row: dict[tuple[str, Region], int]

    @property
    def uncertainty(self) -> dict[str, Tensor]:
        """By modality; empty without Gaussians."""
        images, captions = self.images.uncertainty, self.captions.uncertainty
        return {} if images is None or captions is None else {"image": images, "text": captions}

    def crop(self, name: str, region: Region) -> Crop:
        row = self.row[name, region]
        known = {side: values[row].item() for side, values in self.uncertainty.items()}
        return Crop(list(region.box), region.phrase, known or None)


def crops(
    model: Model,
    pictures: Images,
    regions: dict[str, list[Any]],
    encode_images: Encode,
    encode_text: Encode,
    ties: Ties,
) -> Crops:
    """Make triplets of crops, embed crops and captions A and C, and compare the ones with the others.

    Args:
        model: embeds and compares.
        pictures: the images.
        regions: those of some images, see `regions.read_regions`; at most 2,000 images are taken.
        encode_images: makes features of decoded pictures, as the model wants them.
        encode_text: makes features of texts.
        ties: whether a tie is a failure (``pessimistic``), a success (``optimistic``), or half of one (``mean``).

    Raises:
        CacheError: a region is none, or no image has two that are small enough.
        SampleError: an image cannot be read.
    """
    names = sorted(regions)
    if len(names) > IMAGES:
        names = np.random.default_rng(0).choice(names, IMAGES, replace=False).tolist()
    found = find_triplets(pictures, {name: regions[name] for name in names})
    if not found:
        raise CacheError(
            f"none of the {len(names):,} images of this split that have regions has two of at most"
            f" {max(THRESHOLDS):.0%} of its area; take another --split or data set"
        )
    examples = _examples(found)
    looked = _look(model, pictures, found, examples.values(), encode_images, encode_text)
    rows = torch.tensor([[looked.row[part] for part in one.ambiguous] for one in found])
    similarity = _similarity(model, looked, rows)
    thresholds = []
    for area, example in examples.items():
        inside = [place for place, one in enumerate(found) if one.threshold == area]
        mean = {
            side: dict(zip("AC", values.cpu()[rows[inside]].mean(0).tolist(), strict=True))
            for side, values in looked.uncertainty.items()
        }
        a, b, c = (looked.crop(example.file_name, region) for region in example.triplet)
        alone = selection_accuracy(similarity[[found.index(example)]], ties)
        shown = Example(example.file_name, list(example.size), a, b, c, alone)
        thresholds.append(
            Threshold(area, len(inside), mean or None, selection_accuracy(similarity[inside], ties), shown)
        )
    return Crops(len({one.file_name for one in found}), thresholds)


def find_triplets(pictures: Images, regions: dict[str, list[Any]]) -> list[Found]:
    """Return the triplets of images by their regions, those of the smallest threshold first.

    Raises:
        CacheError: a region is none.
        SampleError: an image cannot be read.
    """
    found = []
    for name, listed in regions.items():
        size = pictures.size(name)
        usable = regions_of(listed, size)
        for threshold in THRESHOLDS:
            if (one := triplet(usable, size, threshold)) is not None:
                found.append(Found(name, size, threshold, one))
    return sorted(found, key=lambda one: one.threshold)


def selection_accuracy(similarity: Tensor, ties: Ties) -> Accuracy:
    """Return how often the right one of two is chosen.

    Args:
        similarity: of the crops A and C (rows) of each triplet with the captions A and C, ``[triplets, 2, 2]``.
        ties: what a tie counts, see `crops`.
    """
    tie = {"pessimistic": 0.0, "optimistic": 1.0, "mean": 0.5}[ties]
    right = similarity.diagonal(dim1=1, dim2=2)
    chosen = []
    for wrong in (similarity.flip(2), similarity.flip(1)):
        other = wrong.diagonal(dim1=1, dim2=2)
        hits = 100 * ((right > other).double() + tie * (right == other).double()).mean(0)
        chosen.append(dict(zip("AC", hits.tolist(), strict=True)))
    return Accuracy(*chosen)


def _examples(found: Sequence[Found]) -> dict[float, Found]:
    """Return a triplet of each threshold, of another image each time where there are as many."""
    examples: dict[float, Found] = {}
    for threshold in dict.fromkeys(one.threshold for one in found):
        of_threshold = [one for one in found if one.threshold == threshold]
        names = {one.file_name for one in examples.values()}
        examples[threshold] = next((one for one in of_threshold if one.file_name not in names), of_threshold[0])
    return examples


def _look(
    model: Model,
    pictures: Images,
    found: Sequence[Found],
    examples: Iterable[Found],
    encode_images: Encode,
    encode_text: Encode,
) -> _Looked:
    """Embed crops and captions A and C of all triplets, and B of some examples; what several share is there once."""
    wanted = {part for one in found for part in one.ambiguous}
    parts = sorted(wanted | {(one.file_name, one.triplet.b) for one in examples})
    with Progress("crops", len(parts), "crops") as progress:
        images = embed_side(model.embed_images, _encoded(pictures, parts, encode_images, progress))
    captions = embed_side(model.embed_captions, encode_text([region.phrase for _, region in parts]))
    return _Looked(images, captions, {part: row for row, part in enumerate(parts)})


def pixels(box: Sequence[float]) -> tuple[int, int, int, int]:
    """Return the whole pixels that a box touches, at least one each way."""
    return math.floor(box[0]), math.floor(box[1]), math.ceil(box[2]), math.ceil(box[3])


def _encoded(
    pictures: Images, parts: list[tuple[str, Region]], encode: Encode, progress: Progress
) -> Iterator[Features]:
    """Cut crops out of their images and encode them; the regions of an image stand together."""
    cut = (
        image.crop(pixels(region.box))
        for name, of_image in itertools.groupby(parts, key=lambda part: part[0])
        for image in [pictures.open(name)]
        for _, region in of_image
    )
    while some := list(itertools.islice(cut, PART)):
        for features in encode(some):
            yield features
            progress.update(len(features.length))


@torch.no_grad()
def _similarity(model: Model, looked: _Looked, rows: Tensor) -> Tensor:
    """Compare the crops A and C of each triplet with its captions A and C, `rows` of both: ``[triplets, 2, 2]``."""

    def taken(side: Side, rows: Tensor) -> Embedding:
        return each(lambda t: t[rows.flatten().to(t.device)], side.embedding)

    blocks = []
    for some in torch.split(rows, TOGETHER):
        compared = model.similarity(taken(looked.images, some), taken(looked.captions, some))
        compared = compared.view(len(some), 2, len(some), 2)
        blocks.append(compared.diagonal(dim1=0, dim2=2).permute(2, 0, 1).cpu())
    return torch.cat(blocks)
