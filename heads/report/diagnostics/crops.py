"""Uncertainty against ambiguity, and the binary selection task, on crops of images.

Source: *Uncertainty-based Cross-Modal Retrieval with Probabilistic Representations*, section 4.6: Figure 2 (mean
uncertainty of crops and captions A and C) and Table 4 (binary selection, which point embeddings can do too).
"""

import itertools
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from ....pipeline.data.images import open_image
from ....pipeline.errors import CacheError, SampleError
from ....pipeline.progress import Progress
from ....pipeline.reading.batches import Features
from ....pipeline.reading.reattachment import unreadable
from ...evaluation.metrics import Ties
from ...model import Model
from ...modules.embedding import Embedding, each
from .embedded import Side, embed_side
from .regions import Box, Region, Triplet, regions_of, triplet

THRESHOLDS = (0.1, 0.2, 0.3, 0.4, 0.5)  # Figure 2: the share of the image that A and B stay below
IMAGES = 2000  # that triplets are made of; drawn at random where there are more
TOGETHER = 16  # triplets compared in one go; each is compared with the others too, for nothing
PART = 256  # crops that are held decoded

Encode = Callable[[Sequence[Any]], Iterator[Features]]


@dataclass(frozen=True)
class Found:
    """A triplet, the image that it is of, and the threshold that its crops are below."""

    file_name: str
    threshold: float
    triplet: Triplet


@dataclass(frozen=True)
class _Looked:
    """Crops and captions, embedded, and where each of them stands."""

    images: Side
    captions: Side
    image_row: dict[tuple[str, Box], int]
    caption_row: dict[str, int]

    def rows(self, one: Found, region: Region) -> tuple[int, int]:
        """Return the row of a region's crop, and that of its caption."""
        return self.image_row[one.file_name, region.box], self.caption_row[region.phrase]

    def described(self, one: Found) -> dict[str, Any]:
        """Return the regions of a triplet by letter, see `crops`."""
        regions = {"A": one.triplet.a, "B": one.triplet.b, "C": one.triplet.c}
        return {
            letter: {"box": list(region.box), "phrase": region.phrase, "uncertainty": self._uncertainty(one, region)}
            for letter, region in regions.items()
        }

    def _uncertainty(self, one: Found, region: Region) -> dict[str, float] | None:
        if self.images.uncertainty is None or self.captions.uncertainty is None:
            return None
        image, caption = self.rows(one, region)
        return {"image": self.images.uncertainty[image].item(), "text": self.captions.uncertainty[caption].item()}


def crops(
    model: Model,
    folder: Path,
    regions: dict[str, list[Any]],
    encode_images: Encode,
    encode_text: Encode,
    ties: Ties,
) -> dict[str, Any]:
    """Make triplets of crops, embed crops and captions A and C, and compare the ones with the others.

    Args:
        model: embeds and compares.
        folder: of the images.
        regions: those of some images, see `regions.read_regions`; at most 2,000 images are taken.
        encode_images: makes features of decoded pictures, as the model wants them.
        encode_text: makes features of texts.
        ties: whether a tie is a failure (``pessimistic``), a success (``optimistic``), or half of one (``mean``).

    Returns:
        ``{"images": int, "thresholds": […]}``, of each of `THRESHOLDS` that there are triplets for ``{"area": share of
        the image, "triplets": int, "uncertainty": {"image": {"A", "C"}, "text": {"A", "C"}} or None without Gaussians,
        "accuracy": {"image_to_text": {"A", "C"}, "text_to_image": {"A", "C"}}, "example": {"file_name", "size": [width,
        height], "A": {"box": [left, top, right, bottom] in pixels, "phrase", "uncertainty": {"image", "text"} or None},
        "B", "C", "accuracy": as above, of this triplet alone}}``. Uncertainties are means. Accuracies are percent,
        by the query: crop A or C chooses between captions A and C, caption A or C between the crops. The example is one
        of the triplets, of another image at each threshold where there are as many.

    Raises:
        CacheError: a region is none, or no image has two that are small enough.
        SampleError: an image cannot be read.
    """
    names = sorted(regions)
    if len(names) > IMAGES:
        names = np.random.default_rng(0).choice(names, IMAGES, replace=False).tolist()
    found = find_triplets(folder, {name: regions[name] for name in names})
    if not found:
        raise CacheError(
            f"none of the {len(names):,} images of this split that have regions has two of at most"
            f" {max(THRESHOLDS):.0%} of its area; take another --split or data set"
        )
    examples = _examples(found)
    looked = _look(model, folder, found, examples.values(), encode_images, encode_text)
    rows = torch.tensor([[looked.rows(one, region) for region in (one.triplet.a, one.triplet.c)] for one in found])
    image_rows, text_rows = rows.unbind(2)
    similarity = _similarity(model, looked.images.embedding, looked.captions.embedding, image_rows, text_rows)
    thresholds = []
    for threshold, example in examples.items():
        inside = torch.tensor([one.threshold == threshold for one in found])
        alone = torch.tensor([one is example for one in found])
        thresholds.append(
            {
                "area": threshold,
                "triplets": int(inside.sum()),
                "uncertainty": _uncertainties(looked.images, looked.captions, image_rows[inside], text_rows[inside]),
                "accuracy": selection_accuracy(similarity[inside], ties),
                "example": {
                    "file_name": example.file_name,
                    "size": list(_size(folder / example.file_name)),
                    **looked.described(example),
                    "accuracy": selection_accuracy(similarity[alone], ties),
                },
            }
        )
    return {"images": len({one.file_name for one in found}), "thresholds": thresholds}


def find_triplets(folder: Path, regions: dict[str, list[Any]]) -> list[Found]:
    """Return the triplets of images by their regions, those of the smallest threshold first.

    Raises:
        CacheError: a region is none.
        SampleError: an image cannot be read.
    """
    found = []
    for name, listed in regions.items():
        size = _size(folder / name)
        usable = regions_of(listed, size)
        for threshold in THRESHOLDS:
            if (one := triplet(usable, size, threshold)) is not None:
                found.append(Found(name, threshold, one))
    return sorted(found, key=lambda one: one.threshold)


def selection_accuracy(similarity: Tensor, ties: Ties) -> dict[str, dict[str, float]]:
    """Return how often the right one of two is chosen, in percent (Table 4).

    Args:
        similarity: of the crops A and C (rows) of each triplet with the captions A and C, ``[triplets, 2, 2]``.
        ties: what a tie counts, see `crops`.

    Returns:
        ``{"image_to_text": {"A", "C"}, "text_to_image": {"A", "C"}}``.
    """
    tie = {"pessimistic": 0.0, "optimistic": 1.0, "mean": 0.5}[ties]
    right = similarity.diagonal(dim1=1, dim2=2)
    table = {}
    for way, wrong in (("image_to_text", similarity.flip(2)), ("text_to_image", similarity.flip(1))):
        other = wrong.diagonal(dim1=1, dim2=2)
        hits = 100 * ((right > other).double() + tie * (right == other).double()).mean(0)
        table[way] = dict(zip("AC", hits.tolist(), strict=True))
    return table


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
    folder: Path,
    found: Sequence[Found],
    examples: Iterable[Found],
    encode_images: Encode,
    encode_text: Encode,
) -> _Looked:
    """Embed crops and captions A and C of all triplets, and B of some examples; what several share is there once."""
    parts = [(one.file_name, region) for one in found for region in (one.triplet.a, one.triplet.c)]
    parts += [(one.file_name, one.triplet.b) for one in examples]
    boxes = sorted({(name, region.box) for name, region in parts})
    phrases = sorted({region.phrase for _, region in parts})
    with Progress("crops", len(boxes), "crops") as progress:
        images = embed_side(model.embed_images, _encoded(folder, boxes, encode_images, progress))
    captions = embed_side(model.embed_captions, encode_text(phrases))
    return _Looked(
        images,
        captions,
        {box: row for row, box in enumerate(boxes)},
        {phrase: row for row, phrase in enumerate(phrases)},
    )


def pixels(box: Box) -> tuple[int, int, int, int]:
    """Return the whole pixels that a box touches, at least one each way."""
    return math.floor(box[0]), math.floor(box[1]), math.ceil(box[2]), math.ceil(box[3])


def _encoded(folder: Path, boxes: list[tuple[str, Box]], encode: Encode, progress: Progress) -> Iterator[Features]:
    """Cut crops out of their images and encode them; the boxes of an image stand together."""
    cut = (
        image.crop(pixels(box))
        for name, of_image in itertools.groupby(boxes, key=lambda key: key[0])
        for image in [_open(folder / name)]
        for _, box in of_image
    )
    while some := list(itertools.islice(cut, PART)):
        for features in encode(some):
            yield features
            progress.update(len(features.length))


@torch.no_grad()
def _similarity(model: Model, images: Embedding, captions: Embedding, left: Tensor, right: Tensor) -> Tensor:
    """Compare the crops `left [triplets, 2]`, rows of `images`, with the captions `right`: ``[triplets, 2, 2]``."""

    def taken(embedding: Embedding, rows: Tensor) -> Embedding:
        return each(lambda t: t[rows.flatten().to(t.device)], embedding)

    blocks = []
    for rows, columns in zip(left.split(TOGETHER), right.split(TOGETHER), strict=True):
        compared = model.similarity(taken(images, rows), taken(captions, columns))
        compared = compared.view(len(rows), 2, len(rows), 2)
        blocks.append(compared.diagonal(dim1=0, dim2=2).permute(2, 0, 1).cpu())
    return torch.cat(blocks)


def _uncertainties(images: Side, captions: Side, left: Tensor, right: Tensor) -> dict[str, dict[str, float]] | None:
    """Return the mean uncertainty of crops and captions A and C, rows of `images` and `captions`, ``[triplets, 2]``."""
    if images.uncertainty is None or captions.uncertainty is None:
        return None
    means = {"image": images.uncertainty.cpu()[left].mean(0), "text": captions.uncertainty.cpu()[right].mean(0)}
    return {side: dict(zip("AC", mean.tolist(), strict=True)) for side, mean in means.items()}


def _size(path: Path) -> tuple[int, int]:
    """Return an image's width and height, which need no decoding."""
    try:
        with Image.open(path) as image:
            return image.size
    except OSError:
        return _open(path).size  # says what is wrong


def _open(path: Path) -> Image.Image:
    try:
        return open_image(path)
    except SampleError as error:
        raise unreadable(error) from error
