"""How good a similarity matrix is: recall, median rank and their sum, with a stated rule for ties.

A rank is kept as three counts (`Ranks`), from which any rule for ties follows exactly. The circular variance is
that of SetDiv (*Improving Cross-Modal Retrieval with Set of Diverse Embeddings*, section 4.6, Table 3) and of MaxMatch
(*Maximal Matching Matters*, section 4.4, Table 4).
"""

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from math import comb
from statistics import fmean
from typing import Literal, NamedTuple, get_args

import torch
from torch import Tensor
from torch.nn import functional

from ...pipeline.errors import RunError

Ties = Literal["pessimistic", "optimistic", "mean"]
WAYS: tuple[Literal["image_to_text"], Literal["text_to_image"]] = ("image_to_text", "text_to_image")
BLOCK = 1 << 21  # cells of the similarity matrix looked at in one go
FOLDED = 5000  # images that 1k-folds is defined for
FOLDS = [range(first, first + 1000) for first in range(0, FOLDED, 1000)]  # images of each fold of COCO 1K


class Ranks(NamedTuple):
    """The rank of the best own item of each of Q queries, as counts `[Q]` (int64)."""

    better: Tensor  # wrong items that score strictly higher
    tied: Tensor  # wrong items that score the same
    own: Tensor  # own items with that score, at least one


@dataclass(frozen=True)
class Table:
    """Numbers by name in both directions, and the sum of the six recalls; None if recalls are not measured."""

    image_to_text: dict[str, float]
    text_to_image: dict[str, float]
    rsum: float | None = None


@dataclass(frozen=True)
class Recalls(Table):
    """``R@1``, ``R@5`` and ``R@10`` in percent and the median rank ``medr`` of both directions."""

    rsum: float


Block = tuple[slice, Tensor, Tensor]  # rows of images, columns of captions [N], and their similarities [rows, N]


def ranks(similarity: Tensor, caption_image: Tensor) -> tuple[Ranks, Ranks]:
    """Count, for every query, the items ahead of its best own item and those tied with it.

    The matrix is read in blocks, which take a few more megabytes, whatever its size.

    Args:
        similarity: `[I, C]`, larger is closer.
        caption_image: the image (row) that each caption belongs to, `[C]`.

    Returns:
        The ranks of the images' own captions (images without a caption ask nothing and are left out), and of the
        captions' own images.

    Raises:
        ValueError: where a similarity is NaN, or there are not as many captions as columns.
    """
    images, captions = similarity.shape
    if len(caption_image) != captions:
        raise ValueError(f"caption_image has {len(caption_image)} captions, and the similarity {captions} columns")
    columns, step = torch.arange(captions, device=similarity.device), max(1, BLOCK // max(captions, 1))

    def blocks(_: bool) -> Iterator[Block]:
        rows = (slice(first, min(first + step, images)) for first in range(0, images, step))
        return ((some, columns, similarity[some]) for some in rows)

    return block_ranks(blocks, images, caption_image.to(similarity.device))


def block_ranks(blocks: Callable[[bool], Iterable[Block]], images: int, caption_image: Tensor) -> tuple[Ranks, Ranks]:
    """Return `ranks` of a matrix that nobody holds: its blocks are asked for twice, and must be the same each time.

    Args:
        blocks: gives all blocks, each pair in one of them, on the device of `caption_image`; where its argument is
            true, those without an image and a caption of its own may be left out.
        images: how many there are.
        caption_image: as of `ranks`.
    """
    captions = len(caption_image)
    own_scores = torch.empty(0)
    for rows, columns, block in blocks(True):
        own_scores = block.new_empty(captions) if len(own_scores) < captions else own_scores
        owner = caption_image[columns]
        inside = ((owner >= rows.start) & (owner < rows.stop)).nonzero()[:, 0]
        own_scores[columns[inside]] = block[owner[inside] - rows.start, inside]
    best = own_scores.new_full((images,), -torch.inf).scatter_reduce(0, caption_image, own_scores, "amax")
    count = torch.zeros_like(best, dtype=torch.int64)
    own_at_best = count.scatter_add(0, caption_image, (own_scores == best[caption_image]).long())
    asked = count.scatter_add(0, caption_image, torch.ones_like(caption_image)) > 0

    image_better, image_tied = torch.zeros_like(count), torch.zeros_like(count)
    caption_better, caption_tied = torch.zeros((2, captions), dtype=torch.int64, device=own_scores.device)
    for rows, columns, block in blocks(False):
        if block.isnan().any():
            row, column = block.isnan().nonzero()[0].tolist()
            pair = f"image {rows.start + row} and caption {int(columns[column])}"
            raise ValueError(f"the similarity of {pair} is NaN and cannot be ranked")
        # No own item beats the best own one, so whatever does is wrong. Own items tied with it go below.
        image_better[rows] += (block > best[rows, None]).sum(1, dtype=torch.int32)
        image_tied[rows] += (block == best[rows, None]).sum(1, dtype=torch.int32)
        caption_better[columns] += (block > own_scores[columns]).sum(0, dtype=torch.int32)
        caption_tied[columns] += (block == own_scores[columns]).sum(0, dtype=torch.int32)
    image_to_text = Ranks(image_better[asked], (image_tied - own_at_best)[asked], own_at_best[asked])
    return image_to_text, Ranks(caption_better, caption_tied - 1, torch.ones_like(caption_tied))


def hits(ranks: Ranks, k: int, ties: Ties = "pessimistic") -> Tensor:
    """Return the probability that each of Q queries has an own item among the first k, float64 `[Q]`; see `recall`."""
    better, tied, own = ranks
    if ties == "pessimistic":
        return (better + tied < k).double()
    if ties == "optimistic":
        return (better < k).double()
    # The first k - better of `tied + own` items in random order are looked at: none of them is an own one with the
    # probability of drawing that many wrong ones in a row.
    miss = torch.ones_like(better, dtype=torch.float64)
    for drawn in range(k):
        step = (tied - drawn).clamp(min=0) / (tied + own - drawn).clamp(min=1).double()
        miss = torch.where(drawn < k - better, miss * step, miss)
    return 1 - miss


def recall(ranks: Ranks, k: int, ties: Ties = "pessimistic") -> float:
    """Return the percentage of queries with an own item among the first k.

    Args:
        ranks: of Q queries.
        k: how many items are looked at.
        ties: `pessimistic`: tied wrong items come first. `optimistic`: they come last. `mean`: the exact
            expectation over all orders of the tied items.
    """
    return 100 * hits(ranks, k, ties).mean().item()


def expected_ranks(ranks: Ranks, ties: Ties = "pessimistic") -> Tensor:
    """Return the rank, from 1, of the best own item of each of Q queries, float64 `[Q]`; `mean`: its expectation."""
    better, tied, own = ranks
    before = {"pessimistic": tied, "optimistic": 0 * tied, "mean": tied / (own + 1).double()}[ties]
    return (1 + better + before).double()


def median_rank(ranks: Ranks, ties: Ties = "pessimistic") -> float:
    """Return the median over queries of the rank, from 1, of the best own item; ties as in `recall`.

    It is the mean of the two in the middle of an even number; `mean` takes every query's expected rank.
    """
    return expected_ranks(ranks, ties).quantile(0.5).item()


def require_ties(ties: str) -> None:
    """Raise RunError where there is no such rule for ties."""
    if ties not in get_args(Ties):
        raise RunError(f"ties is '{ties}', but must be one of {', '.join(get_args(Ties))}")


def recall_table(image_to_text: Ranks, text_to_image: Ranks, ties: Ties = "pessimistic") -> Recalls:
    """Return recalls and median rank of both directions, and the sum of the six recalls; RunError as `require_ties`."""
    require_ties(ties)
    recalls = [{f"R@{k}": recall(way, k, ties) for k in (1, 5, 10)} for way in (image_to_text, text_to_image)]
    rsum = sum(value for way in recalls for value in way.values())
    median = [{"medr": median_rank(way, ties)} for way in (image_to_text, text_to_image)]
    return Recalls(recalls[0] | median[0], recalls[1] | median[1], rsum)


def fold_ranks(similarity: Tensor, caption_image: Tensor, fold: range) -> tuple[Ranks, Ranks]:
    """Return `ranks` among the images of one fold and their captions alone."""
    rows, columns = inside(fold, caption_image)
    return ranks(similarity[rows][:, columns.to(similarity.device)], caption_image[columns] - fold.start)


def inside(fold: range, caption_image: Tensor) -> tuple[slice, Tensor]:
    """Return the rows of a fold's images, and which captions are theirs, bool `[C]`."""
    return slice(fold.start, fold.stop), (caption_image >= fold.start) & (caption_image < fold.stop)


def mean_table(tables: Sequence[Recalls]) -> Recalls:
    """Return the mean of each number of some tables, RSUM and median rank included."""
    ways = [
        {name: fmean(getattr(table, way)[name] for table in tables) for name in getattr(tables[0], way)} for way in WAYS
    ]
    return Recalls(ways[0], ways[1], fmean(table.rsum for table in tables))


def recalls(similarity: Tensor, caption_image: Tensor, protocol: str = "full", ties: Ties = "pessimistic") -> Recalls:
    """Return the table of a protocol for ``similarity [I, C]``.

    ``full``: all images against all captions (Flickr30K 1K, COCO 5K, any number of captions an image); ``1k-folds``:
    the mean of five consecutive folds of 1,000 images in the order of Karpathy's file (COCO 1K). Arguments as of
    `ranks` and `recall`; ValueError as there, and for another protocol or number of images.
    """
    if protocol == "full":
        return recall_table(*ranks(similarity, caption_image), ties=ties)
    if protocol != "1k-folds" or len(similarity) != FOLDS[-1].stop:
        raise ValueError(f"protocol is '{protocol}', but must be full, or 1k-folds of {FOLDS[-1].stop:,} images")
    return mean_table([recall_table(*fold_ranks(similarity, caption_image, fold), ties) for fold in FOLDS])


def chance(captions: Sequence[int]) -> float:
    """Return the RSUM, of 600, that a random order of images and of captions is expected to have.

    A query with `own` right items among `all` finds none of them in the first K with the probability that a draw of K
    without replacement has none. `captions` is how many each image has; those without any ask nothing.
    """
    total = sum(captions)
    total_rsum = 0.0
    for k in (1, 5, 10):
        total_rsum += 100 * min(k / len(captions), 1.0)  # captions ask for their image
        asked = Counter(right for right in captions if right)
        misses = {right: comb(total - right, k) / comb(total, k) if k <= total else 0.0 for right in asked}
        total_rsum += 100 * sum(many * (1 - misses[right]) for right, many in asked.items()) / asked.total()
    return total_rsum


def chance_rsum(caption_image: Tensor, images: int, protocol: str) -> float | None:
    """Return the RSUM that chance has under ``full`` or ``1k-folds``, see `chance`; None under others."""
    counts = torch.bincount(caption_image.cpu(), minlength=images).tolist()
    if protocol == "full":
        return chance(counts)
    if protocol == "1k-folds":
        return fmean(chance(counts[fold.start : fold.stop]) for fold in FOLDS)
    return None


def log_circular_variance(*sets: Tensor, power: int = 1) -> float:
    """Return the natural log of the mean of 1 - n over embedding sets ``[B, K, D]``, of several tensors together.

    n is the norm of the mean of a set's unit elements (SetDiv), or, with a `power` of 2, its square (MaxMatch). Sets
    without any spread give about -36, where double precision ends.
    """
    parts = [part for elements in sets for part in torch.split(elements, 1024)]
    norms = torch.cat([functional.normalize(part.double(), dim=-1).mean(1).norm(dim=-1) for part in parts])
    return (1 - norms**power).mean().clamp(min=torch.finfo(torch.float64).eps).log().item()
