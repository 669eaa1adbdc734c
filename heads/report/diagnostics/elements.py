"""What each element of an embedding set does: alone, missing, winning, and beside the others.

Sources: *Improving Cross-Modal Retrieval with Set of Diverse Embeddings* (SetDiv, section 4.8, Table 5) and *Maximal
Matching Matters* (MaxMatch, section 4.4, Table 4 and Figure 4).
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from ....pipeline.progress import Progress
from ...evaluation.metrics import Ties, ranks, recall_table
from ...modules.similarity.shared import unit

PAIRS = 4096  # positive pairs looked at in one go

Compare = Callable[[Tensor, Tensor], Tensor]


@dataclass(frozen=True)
class Ablated:
    """The RSUM with each element of one modality alone, and without it; the other modality stays whole.

    Attributes:
        only: of each element.
        without: likewise; None for sets of one.
    """

    only: list[float]
    without: list[float] | None


@dataclass(frozen=True)
class AblatedRsum:
    """The RSUM over the whole split with some elements only (SetDiv Table 5, MaxMatch Table 4).

    Attributes:
        all: with all elements.
        image, text: with one element of a modality taken, or left out.
        pairs: with one element of both, K1 lists of K2.
    """

    all: float
    image: Ablated
    text: Ablated
    pairs: list[list[float]]


@dataclass(frozen=True)
class Wins:
    """How often two elements are the most similar ones of an image and its own caption.

    Attributes:
        pairs: shares of the captions, K1 lists of K2, that add up to one.
        image, text: the same of the K1 elements of an image, and of the K2 of a caption.
    """

    pairs: list[list[float]]
    image: list[float]
    text: list[float]


@dataclass(frozen=True)
class Cosines:
    """The mean cosine of every two elements (MaxMatch Figure 4).

    Attributes:
        image: within the sets of images, K1 lists of K1.
        text: within those of captions, K2 lists of K2.
        matching: between images and their own captions, K1 lists of K2.
        any: between all images and all captions, which `matching` is to be compared with.
    """

    image: list[list[float]]
    text: list[list[float]]
    matching: list[list[float]]
    any: list[list[float]]


@dataclass(frozen=True)
class Elements:
    """All that is known of the elements of a split's embedding sets."""

    rsum: AblatedRsum
    wins: Wins
    similarity: Cosines


def elements(images: Tensor, captions: Tensor, caption_image: Tensor, compare: Compare, ties: Ties) -> Elements:
    """Look at the elements of a split's embedding sets.

    Args:
        images: sets ``[I, K1, D]``.
        captions: sets ``[C, K2, D]``.
        caption_image: the image of each caption, int64 ``[C]``.
        compare: takes sets of images and captions, of whatever sizes, to their similarity ``[I, C]``.
        ties: as for `metrics.recall`.
    """
    return Elements(
        ablated_rsum(images, captions, caption_image, compare, ties),
        wins(images, captions, caption_image),
        mean_cosines(images, captions, caption_image),
    )


def ablated_rsum(images: Tensor, captions: Tensor, caption_image: Tensor, compare: Compare, ties: Ties) -> AblatedRsum:
    """Return the RSUM with some elements only; the run was trained with all of them. Arguments as for `elements`."""
    image, text = range(images.shape[1]), range(captions.shape[1])
    tables = 1 + 2 * (len(image) + len(text)) + len(image) * len(text)
    with Progress("elements", tables, "tables") as progress:

        def rsum(some: Tensor, others: Tensor) -> float:
            found = recall_table(*ranks(compare(some, others), caption_image), ties).rsum
            progress.update(1)
            return found

        return AblatedRsum(
            rsum(images, captions),
            Ablated(
                [rsum(images[:, [k]], captions) for k in image],
                [rsum(_without(images, k), captions) for k in image] if len(image) > 1 else None,
            ),
            Ablated(
                [rsum(images, captions[:, [k]]) for k in text],
                [rsum(images, _without(captions, k)) for k in text] if len(text) > 1 else None,
            ),
            [[rsum(images[:, [k]], captions[:, [other]]) for other in text] for k in image],
        )


def wins(images: Tensor, captions: Tensor, caption_image: Tensor) -> Wins:
    """Return how often each pair of elements is the most similar one of an image and its own caption.

    Pairs that tie share the win, so that collapsed sets show no winner. Arguments as for `elements`.
    """
    share = torch.zeros(images.shape[1], captions.shape[1], dtype=torch.float64)
    for cosines in _positive_cosines(images, captions, caption_image):
        best = cosines == cosines.amax((1, 2), keepdim=True)
        share += (best / best.sum((1, 2), keepdim=True)).double().sum(0).cpu()
    share /= len(captions)
    return Wins(share.tolist(), share.sum(1).tolist(), share.sum(0).tolist())


def mean_cosines(images: Tensor, captions: Tensor, caption_image: Tensor) -> Cosines:
    """Return the mean cosine of every two elements. Arguments as for `elements`."""
    matching = torch.zeros(images.shape[1], captions.shape[1], dtype=torch.float64)
    for cosines in _positive_cosines(images, captions, caption_image):
        matching += cosines.double().sum(0).cpu()
    centres = [unit(sets).mean(0, dtype=torch.float64) for sets in (images, captions)]
    return Cosines(
        _within(images).tolist(),
        _within(captions).tolist(),
        (matching / len(captions)).tolist(),
        (centres[0] @ centres[1].T).tolist(),
    )


def _positive_cosines(images: Tensor, captions: Tensor, caption_image: Tensor) -> list[Tensor]:
    """Return the cosines of the elements of captions and of their images, ``[some captions, K1, K2]`` each."""
    left, right = unit(images), unit(captions)
    owners = caption_image.to(left.device).split(PAIRS)
    return [left[some] @ part.transpose(1, 2) for some, part in zip(owners, right.split(PAIRS), strict=True)]


def _within(sets: Tensor) -> Tensor:
    """Return the mean cosines within sets, float64 ``[K, K]``."""
    total = torch.zeros(sets.shape[1], sets.shape[1], dtype=torch.float64)
    for part in sets.split(PAIRS):
        rows = unit(part)
        total += (rows @ rows.transpose(1, 2)).double().sum(0).cpu()
    return total / len(sets)


def _without(sets: Tensor, element: int) -> Tensor:
    return sets[:, [k for k in range(sets.shape[1]) if k != element]]
