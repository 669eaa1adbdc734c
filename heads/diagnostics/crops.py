"""Uncertainty against ambiguity, and the binary selection task, on crops of images.

Source: *Uncertainty-based Cross-Modal Retrieval with Probabilistic Representations*, section 4.6: Figure 2 (mean
uncertainty of crops and captions A and C) and Table 4 (binary selection, which point embeddings can do too).
"""

import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeVar

import numpy as np
import torch
from PIL import Image
from torch import Tensor
from tqdm import tqdm

from ...pipeline.data.images import image_size, open_image
from ...pipeline.data.sources import PictureReader
from ...pipeline.errors import CacheError, SampleError
from ...pipeline.reading.features import Features
from ...pipeline.reading.reattachment import unreadable
from ..evaluation.metrics import Ties
from ..evaluation.number_table import NumberTable, Rows
from ..evaluation.scoring import Side, embed_side
from ..model import Model
from ..modules.embedding import Embedding, each
from .regions import Region, Triplet, regions_of, triplet

THRESHOLDS = (0.1, 0.2, 0.3, 0.4, 0.5)  # Figure 2: the share of the image that A and B stay below
IMAGES = 2000  # that triplets are made of; drawn at random from more
TOGETHER = 16  # triplets compared in one go; each is compared with the others too, for nothing
PART = 256  # crops that are held decoded

T = TypeVar("T")
Encode = Callable[[Sequence[Any]], Iterator[Features]]


@dataclass(frozen=True)
class Images:
    """The images as a feature set saw them: turned as their EXIF orientations say, if they are `upright`."""

    reader: PictureReader
    upright: bool

    def size(self, name: str) -> tuple[int, int]:
        """Return the width and height of an image."""
        return self._read(image_size, name)

    def open(self, name: str) -> Image.Image:
        """Return an image."""
        return self._read(open_image, name)

    def _read(self, read: Callable[..., T], name: str) -> T:
        try:
            return read(self.reader.open(name), upright=self.upright)
        except SampleError as error:
            raise unreadable(error) from error


class Found(NamedTuple):
    """A triplet of an image, and the threshold that its crops are below."""

    file_name: str
    threshold: float
    triplet: Triplet

    @property
    def ambiguous(self) -> list[tuple[str, Region]]:
        """Regions A and C, each with the image's file."""
        return [(self.file_name, self.triplet.a), (self.file_name, self.triplet.c)]


def crop_tables(
    model: Model,
    pictures: Images,
    regions: dict[str, list[Any]],
    encode_images: Encode,
    encode_text: Encode,
    ties: Ties,
) -> dict[str, NumberTable]:
    """Embed crops and captions A and C of triplets, and compare the ones with the others.

    Args:
        model: embeds and compares.
        pictures: the images.
        regions: those of some images, see `regions.read_regions`; at most 2,000 images are taken.
        encode_images: makes features of decoded pictures, as the model wants them.
        encode_text: makes features of texts.
        ties: whether a tie is a failure (``pessimistic``), a success (``optimistic``), or half of one (``mean``).

    Returns:
        ``crops``, a row a threshold with the accuracies; with Gaussians also ``uncertainty of crops``, their means.

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
    parts = sorted({part for one in found for part in one.ambiguous})
    with tqdm(total=len(parts), desc="crops", unit=" crops", disable=None) as progress:
        images = embed_side(model.embed_images, _encoded(pictures, parts, encode_images, progress))
    captions = embed_side(model.embed_captions, encode_text([region.phrase for _, region in parts]))
    row = {part: number for number, part in enumerate(parts)}
    rows = torch.tensor([[row[part] for part in one.ambiguous] for one in found])
    similarity = _similarity(model, images, captions, rows)
    selected, uncertain = Rows(), Rows()
    for area in dict.fromkeys(one.threshold for one in found):
        inside = [place for place, one in enumerate(found) if one.threshold == area]
        selected.append([f"{area:.0%}", len(inside), *selection_accuracy(similarity[inside], ties)])
        if images.uncertainty is not None and captions.uncertainty is not None:
            means = [side.cpu()[rows[inside]].mean(0).tolist() for side in (images.uncertainty, captions.uncertainty)]
            uncertain.append([f"{area:.0%}", *means[0], *means[1]])
    letters = [f"{query} {letter}" for query in ("crop", "caption") for letter in "AC"]
    caption = (
        "Binary selection, accuracy (%); chance is 50. Crop A asks: which of the captions A and C of its image is "
        "its own? Caption A asks for its crop likewise. A is a region smaller than the area's share of the image, C "
        "the box around it and another one."
    )
    tables = {"crops": NumberTable(caption, ["area", "triplets", *(f"{one} asks" for one in letters)], selected)}
    if uncertain:
        caption = "Uncertainty of crops and captions against ambiguity: means over the triplets."
        tables["uncertainty of crops"] = NumberTable(caption, ["area", *letters], uncertain)
    return tables


def find_triplets(pictures: Images, regions: dict[str, list[Any]]) -> list[Found]:
    """Return the triplets of images by their regions, those of the smallest threshold first."""
    found = []
    for name, listed in regions.items():
        size = pictures.size(name)
        usable = regions_of(listed, size)
        triplets = ((threshold, triplet(usable, size, threshold)) for threshold in THRESHOLDS)
        found += [Found(name, threshold, one) for threshold, one in triplets if one is not None]
    return sorted(found, key=lambda one: one.threshold)


def selection_accuracy(similarity: Tensor, ties: Ties) -> list[float]:
    """Return how often (%) the right one of two is chosen, if crop A, crop C, caption A or caption C asks.

    Args:
        similarity: of the crops A and C (rows) of each triplet with the captions A and C, ``[triplets, 2, 2]``.
        ties: what a tie counts, see `crop_tables`.
    """
    tie = {"pessimistic": 0.0, "optimistic": 1.0, "mean": 0.5}[ties]
    right = similarity.diagonal(dim1=1, dim2=2)
    accuracies = []
    for wrong in (similarity.flip(2), similarity.flip(1)):
        other = wrong.diagonal(dim1=1, dim2=2)
        accuracies += (100 * ((right > other).double() + tie * (right == other).double()).mean(0)).tolist()
    return accuracies


def pixels(box: Sequence[float]) -> tuple[int, int, int, int]:
    """Return the whole pixels that a box touches, at least one each way."""
    return math.floor(box[0]), math.floor(box[1]), math.ceil(box[2]), math.ceil(box[3])


def _encoded(
    pictures: Images, parts: list[tuple[str, Region]], encode: Encode, progress: "tqdm[Any]"
) -> Iterator[Features]:
    """Cut crops out of their images and encode them; the regions of an image are next to each other."""
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
def _similarity(model: Model, images: Side, captions: Side, rows: Tensor) -> Tensor:
    """Compare the crops A and C of each triplet with its captions A and C, `rows` of both: ``[triplets, 2, 2]``."""

    def taken(side: Side, rows: Tensor) -> Embedding:
        return each(lambda t: t[rows.flatten().to(t.device)], side.embedding)

    blocks = []
    for some in torch.split(rows, TOGETHER):
        compared = model.similarity(taken(images, some), taken(captions, some)).view(len(some), 2, len(some), 2)
        blocks.append(compared.diagonal(dim1=0, dim2=2).permute(2, 0, 1).cpu())
    return torch.cat(blocks)
