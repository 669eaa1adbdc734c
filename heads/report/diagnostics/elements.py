"""What each element of an embedding set does: alone, left out, winning, and compared with the others.

Sources: *Improving Cross-Modal Retrieval with Set of Diverse Embeddings* (SetDiv, section 4.8, Table 5) and *Maximal
Matching Matters* (MaxMatch, section 4.4, Table 4 and Figure 4).
"""

from collections.abc import Callable, Iterator
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
    """The RSUM with `only` each element of one modality, and `without` it, which sets of one have not."""

    only: list[float]
    without: list[float] | None


@dataclass(frozen=True)
class AblatedRsum:
    """The RSUM over the whole split with some elements only (SetDiv Table 5, MaxMatch Table 4).

    Attributes:
        all: with all elements.
        image, text: with one element of a modality taken, or left out, and the other modality whole.
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
    for cosines in _pair_cosines(images, captions, caption_image):
        best = cosines == cosines.amax((1, 2), keepdim=True)
        share += (best / best.sum((1, 2), keepdim=True)).double().sum(0).cpu()
    share /= len(captions)
    return Wins(share.tolist(), share.sum(1).tolist(), share.sum(0).tolist())


def mean_cosines(images: Tensor, captions: Tensor, caption_image: Tensor) -> Cosines:
    """Return the mean cosine of every two elements. Arguments as for `elements`."""
    centres = [unit(sets).mean(0, dtype=torch.float64) for sets in (images, captions)]
    return Cosines(
        _paired(images, images, torch.arange(len(images))),
        _paired(captions, captions, torch.arange(len(captions))),
        _paired(images, captions, caption_image),
        (centres[0] @ centres[1].T).tolist(),
    )


def _paired(left: Tensor, right: Tensor, owner: Tensor) -> list[list[float]]:
    """Return the mean cosines of the elements of each set of `right` and of its owner, a row of `left`."""
    total = torch.zeros(left.shape[1], right.shape[1], dtype=torch.float64)
    for cosines in _pair_cosines(left, right, owner):
        total += cosines.double().sum(0).cpu()
    return (total / len(right)).tolist()


def _pair_cosines(left: Tensor, right: Tensor, owner: Tensor) -> Iterator[Tensor]:
    """Yield the cosines of the elements of sets of `right` and of their owners, ``[some, K1, K2]`` each."""
    for rows, part in zip(torch.split(owner.to(left.device), PAIRS), torch.split(right, PAIRS), strict=True):
        yield unit(left[rows]) @ unit(part).transpose(1, 2)


def _without(sets: Tensor, element: int) -> Tensor:
    return sets[:, [k for k in range(sets.shape[1]) if k != element]]
