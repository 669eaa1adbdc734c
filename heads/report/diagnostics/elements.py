"""What each element of an embedding set does: alone, missing, winning, and beside the others.

Sources: *Improving Cross-Modal Retrieval with Set of Diverse Embeddings* (SetDiv, section 4.8, Table 5) and *Maximal
Matching Matters* (MaxMatch, section 4.4, Table 4 and Figure 4).
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from ....pipeline.progress import Progress
from ...evaluation.metrics import Ties, ranks, recall_table
from ...modules.similarity.shared import unit

PAIRS = 4096  # positive pairs looked at in one go

Compare = Callable[[Tensor, Tensor], Tensor]


def elements(images: Tensor, captions: Tensor, caption_image: Tensor, compare: Compare, ties: Ties) -> dict[str, Any]:
    """Return all that is known of the elements of a split's embedding sets.

    Args:
        images: sets ``[I, K1, D]``.
        captions: sets ``[C, K2, D]``.
        caption_image: the image of each caption, int64 ``[C]``.
        compare: takes sets of images and captions, of whatever sizes, to their similarity ``[I, C]``.
        ties: as for `metrics.recall`.

    Returns:
        ``{"rsum": ablated_rsum(…), "wins": wins(…), "similarity": mean_cosines(…)}``.
    """
    return {
        "rsum": ablated_rsum(images, captions, caption_image, compare, ties),
        "wins": wins(images, captions, caption_image),
        "similarity": mean_cosines(images, captions, caption_image),
    }


def ablated_rsum(
    images: Tensor, captions: Tensor, caption_image: Tensor, compare: Compare, ties: Ties
) -> dict[str, Any]:
    """Return the RSUM over the whole split with some elements only, as the run was trained with all of them.

    Args:
        images, captions, caption_image, compare, ties: as for `elements`.

    Returns:
        ``{"all": float, "image": {"only": [K1 floats], "without": [K1]}, "text": {"only": [K2], "without": [K2]},
        "pairs": [[K2] for each of K1]}``: of one side one element is taken, or left out, and the other side stays
        whole (SetDiv Table 5, MaxMatch Table 4); ``pairs`` takes one of both. ``without`` is null for sets of one.
    """

    image, text = range(images.shape[1]), range(captions.shape[1])
    tables = 1 + 2 * (len(image) + len(text)) + len(image) * len(text)
    with Progress("elements", tables, "tables") as progress:

        def rsum(some: Tensor, others: Tensor) -> float:
            found = recall_table(*ranks(compare(some, others), caption_image), ties).rsum
            progress.update(1)
            return found

        return {
            "all": rsum(images, captions),
            "image": {
                "only": [rsum(images[:, [k]], captions) for k in image],
                "without": [rsum(_without(images, k), captions) for k in image] if len(image) > 1 else None,
            },
            "text": {
                "only": [rsum(images, captions[:, [k]]) for k in text],
                "without": [rsum(images, _without(captions, k)) for k in text] if len(text) > 1 else None,
            },
            "pairs": [[rsum(images[:, [k]], captions[:, [other]]) for other in text] for k in image],
        }


def wins(images: Tensor, captions: Tensor, caption_image: Tensor) -> dict[str, Any]:
    """Return how often each pair of elements is the most similar one of an image and its own caption.

    Args:
        images, captions, caption_image: as for `elements`.

    Returns:
        ``{"pairs": [[K2] for each of K1], "image": [K1], "text": [K2]}``, shares of the captions, each adding up to
        one. Pairs of elements that tie share the win, so that collapsed sets show no winner.
    """
    share = torch.zeros(images.shape[1], captions.shape[1], dtype=torch.float64)
    for cosines in _positive_cosines(images, captions, caption_image):
        best = cosines == cosines.amax((1, 2), keepdim=True)
        share += (best / best.sum((1, 2), keepdim=True)).double().sum(0).cpu()
    share /= len(captions)
    return {"pairs": share.tolist(), "image": share.sum(1).tolist(), "text": share.sum(0).tolist()}


def mean_cosines(images: Tensor, captions: Tensor, caption_image: Tensor) -> dict[str, list[list[float]]]:
    """Return the mean cosine of every two elements (MaxMatch Figure 4).

    Args:
        images, captions, caption_image: as for `elements`.

    Returns:
        ``{"image": K1 x K1, "text": K2 x K2, "matching": K1 x K2, "any": K1 x K2}``: within the sets of images, within
        those of captions, between images and their own captions, and between all images and all captions. The last is
        what the one before it is to be seen against.
    """
    matching = torch.zeros(images.shape[1], captions.shape[1], dtype=torch.float64)
    for cosines in _positive_cosines(images, captions, caption_image):
        matching += cosines.double().sum(0).cpu()
    centres = [unit(sets).mean(0, dtype=torch.float64) for sets in (images, captions)]
    return {
        "image": _within(images).tolist(),
        "text": _within(captions).tolist(),
        "matching": (matching / len(captions)).tolist(),
        "any": (centres[0] @ centres[1].T).tolist(),
    }


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
