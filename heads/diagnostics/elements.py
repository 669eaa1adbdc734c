"""What each element of an embedding set does: how diverse they are, and each alone, left out, winning and compared.

Sources: *Improving Cross-Modal Retrieval with Set of Diverse Embeddings* (SetDiv, sections 4.6 and 4.8, Tables 3 and 5)
and *Maximal Matching Matters* (MaxMatch, section 4.4, Table 4 and Figure 4).
"""

from collections.abc import Callable, Iterator

import torch
from torch import Tensor
from tqdm import tqdm

from ...pipeline.progress import hidden
from ..evaluation.metrics import Ties, log_circular_variance, ranks, recall_table
from ..evaluation.number_table import NumberTable, Rows
from ..modules.similarity.shared import unit

PAIRS = 4096  # positive pairs looked at in one go
BOTH = "image ↓ caption →"

Compare = Callable[[Tensor, Tensor], Tensor]


def element_tables(
    images: Tensor, captions: Tensor, caption_image: Tensor, compare: Compare, ties: Ties
) -> dict[str, NumberTable]:
    """Look at the elements of a split's embedding sets, of images ``[I, K1, D]`` and of captions ``[C, K2, D]``.

    `caption_image` is the image of each caption, int64 ``[C]``; `compare` takes sets of whatever sizes to their
    similarity ``[I, C]``; `ties` are as for `metrics.recall`.

    Returns:
        ``circular variance``; ``rsum image`` and ``rsum caption``, with one element only and with all but one;
        ``rsum pairs``, with one of both; ``wins``; and mean cosines, ``cosines matching`` of images and their own
        captions, ``any`` of all, ``image`` and ``caption`` within their sets.
    """
    rows: Rows = [
        [form, *(log_circular_variance(*sets, power=power) for sets in ((images,), (captions,), (images, captions)))]
        for power, form in ((1, "ln of 1 − ‖mean‖ (SetDiv)"), (2, "ln of 1 − ‖mean‖² (MaxMatch)"))
    ]
    caption = "Circular variance within the sets, natural logarithms; the larger, the more diverse."
    tables = {"circular variance": NumberTable(caption, ["form", "images", "captions", "both"], rows)}
    tables |= rsum_tables(images, captions, caption_image, compare, ties)
    caption = "How often (%) two elements are the most similar ones of an image and its own caption."
    tables["wins"] = _matrix(caption, BOTH, 100 * wins(images, captions, caption_image), 1)
    centres = [unit(sets).mean(0, dtype=torch.float64) for sets in (images, captions)]
    within = [mean_cosines(sets, sets, torch.arange(len(sets))) for sets in (images, captions)]
    for name, what, corner, cosines in (
        ("matching", "images and their own captions", BOTH, mean_cosines(images, captions, caption_image)),
        ("any", "all images and all captions", BOTH, centres[0] @ centres[1].T),
        ("image", "within the sets of images", "image ↓ image →", within[0]),
        ("caption", "within the sets of captions", "caption ↓ caption →", within[1]),
    ):
        tables[f"cosines {name}"] = _matrix(f"Mean cosine of elements, {what}.", corner, cosines)
    return tables


def rsum_tables(
    images: Tensor, captions: Tensor, caption_image: Tensor, compare: Compare, ties: Ties
) -> dict[str, NumberTable]:
    """Return the RSUM with some elements only; the run was trained with all. Arguments as for `element_tables`."""
    tables = dict[str, NumberTable]()
    with tqdm(desc="elements", unit=" tables", disable=hidden()) as progress:

        def rsum(some: Tensor, others: Tensor) -> float:
            progress.update()
            return recall_table(*ranks(compare(some, others), caption_image), ties).rsum

        whole = f"all elements give {rsum(images, captions):.2f}"
        pairs = [
            [rsum(images[:, [k]], captions[:, [j]]) for j in range(captions.shape[1])] for k in range(images.shape[1])
        ]
        for name, sets in (("image", images), ("caption", captions)):
            rows = Rows()
            for k in range(sets.shape[1]):
                rest = [j for j in range(sets.shape[1]) if j != k]
                kept = [sets[:, [k]], *([sets[:, rest]] if rest else [])]
                rsums = [rsum(some, captions) if name == "image" else rsum(images, some) for some in kept]
                rows.append([str(k + 1), rsums[0], rsums[1] if rest else None])
            caption = f"RSUM with a single {name} element, and with each left out, the other side whole; {whole}."
            header = [f"{name} element", "only this", "all but this"]
            tables[f"rsum {name}"] = NumberTable(caption, header, rows)
    caption = f"RSUM with one element of the image and one of the caption; {whole}."
    return tables | {"rsum pairs": _matrix(caption, BOTH, torch.tensor(pairs), 1)}


def wins(images: Tensor, captions: Tensor, caption_image: Tensor) -> Tensor:
    """Return how often each pair of elements is the most similar one of an image and its own caption, ``[K1, K2]``.

    The shares add up to one. Pairs that tie share the win, so that collapsed sets show no winner.
    """
    share = torch.zeros(images.shape[1], captions.shape[1], dtype=torch.float64)
    for cosines in _pair_cosines(images, captions, caption_image):
        best = cosines == cosines.amax((1, 2), keepdim=True)
        share += (best / best.sum((1, 2), keepdim=True)).double().sum(0).cpu()
    return share / len(captions)


def mean_cosines(left: Tensor, right: Tensor, owner: Tensor) -> Tensor:
    """Return the mean cosines of the elements of each set of `right` and of its owner, a row of `left`."""
    total = torch.zeros(left.shape[1], right.shape[1], dtype=torch.float64)
    for cosines in _pair_cosines(left, right, owner):
        total += cosines.double().sum(0).cpu()
    return total / len(right)


def _pair_cosines(left: Tensor, right: Tensor, owner: Tensor) -> Iterator[Tensor]:
    """Yield the cosines of the elements of sets of `right` and of their owners, ``[some, K1, K2]`` each."""
    for rows, part in zip(torch.split(owner.to(left.device), PAIRS), torch.split(right, PAIRS), strict=True):
        yield unit(left[rows]) @ unit(part).transpose(1, 2)


def _matrix(caption: str, corner: str, values: Tensor, digits: int = 2) -> NumberTable:
    header = [corner, *(str(k) for k in range(1, values.shape[1] + 1))]
    return NumberTable(caption, header, [[str(k), *row] for k, row in enumerate(values.tolist(), 1)], digits)
