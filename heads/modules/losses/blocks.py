"""Losses over all pairs of a large batch without its similarity matrix: block by block, computed again going back.

Memory holds the embeddings, their gradients and one block. Value and gradients are those of the whole matrix, but for
rounding. Source: Zhai et al., *Sigmoid Loss for Language Image Pre-Training*, section 3.3, sum their loss over blocks.
"""

from abc import ABC, abstractmethod
from itertools import product
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import threshold
from torch.utils.checkpoint import checkpoint

from ....pipeline.device import on_host, send, stacked
from ..aggregators.aggregated import Aggregated
from ..embedding import Embedding
from ..similarity.shared import check, precise
from .common import Loss

# Images and captions in a block. A block of 36 MiB is above glibc's largest threshold, so that it is given back at once
# and leaves no holes in the memory; a GPU wants few and large products.
SIDE, SIDE_ON_GPU = 3072, 4096
FARTHEST = -1e30  # in the place of -inf; float16 ends before


class Pairs(NamedTuple):
    """Some pairs of an image and a caption, each at most once: their rows and columns, int64 `[P]` each."""

    rows: Tensor
    columns: Tensor


class Parts(NamedTuple):
    """What a loss takes out of a block of R images and C captions, or of all blocks.

    Attributes:
        own: a number for each positive, `[P]`.
        images: one for each image, `[R]`; of all blocks `[blocks across, I]`.
        captions: one for each caption, `[C]`; of all blocks `[blocks down, C]`.
    """

    own: Tensor
    images: Tensor
    captions: Tensor


class BlockLoss(Loss, ABC):
    """Base of losses that can be computed block by block.

    One block is the whole matrix, so that both ways have one formula.
    """

    uses_pairs = True

    @abstractmethod
    def factor(self) -> Tensor:
        """Return what similarities are multiplied with; their products are called logits here."""

    @abstractmethod
    def of_block(self, logits: Tensor, positives: Pairs, ignored: Pairs) -> Parts:
        """Return what the loss needs of the logits `[R, C]` of R images and C captions, which it may overwrite.

        `ignored` are pairs beside the `positives` that take no part; their logits may be the lowest number already.
        """

    @abstractmethod
    def total(self, parts: Parts, positives: Pairs) -> Tensor:
        """Return the loss, a scalar, of the parts of all blocks and the positives in the order of the blocks."""

    @abstractmethod
    def of_matrix(self, logits: Tensor, positives: Tensor) -> Tensor:
        """Return the loss of the logits `[I, C]` of all pairs, by operations that `torch.vmap` has; a scalar."""

    def forward(self, similarity: Tensor, positives: Tensor, *_: Aggregated, pairs: Pairs | None = None) -> Tensor:
        """Return the loss of `similarity [I, C]` under `positives [I, C]`, which may be listed as `pairs`; a scalar."""
        # Finite before they are multiplied: 0 * inf would reach the gradient of the factor.
        logits = self.factor() * threshold(similarity.to(precise(similarity)), FARTHEST, FARTHEST)
        if stacked():
            return self.of_matrix(logits, positives)
        own = pairs or pairs_of(positives)
        parts = self.of_block(logits, own, Pairs(*(places[:0] for places in own)))
        return self.total(Parts(parts.own, parts.images[None], parts.captions[None]), own)


def pairs_of(mask: Tensor) -> Pairs:
    """Return the pairs for which `mask [I, C]` is true, on its device; a GPU has to be waited for."""
    return Pairs(*mask.nonzero().T)


def joined(one: Pairs, other: Pairs) -> Pairs:
    """Return the pairs of both."""
    if not len(other.rows):
        return one
    return Pairs(torch.cat([one.rows, other.rows]), torch.cat([one.columns, other.columns]))


def in_blocks(
    loss: BlockLoss, images: Embedding, captions: Embedding, positives: Pairs, ignored: Pairs, side: int | None = None
) -> Tensor:
    """Return the loss of the dot products of all pairs, a scalar, and never hold more than a few blocks of them.

    Images `[I, D]` and captions `[C, D]` are of unit length where the similarities are cosines. Of all pairs `ignored`
    ones take no part; both lists are on the host or were sent from there. `side` is how many images and captions a
    block has, None: what suits the device. ValueError where an embedding is no vector.
    """
    check("vector", images, captions)
    assert isinstance(images, Tensor) and isinstance(captions, Tensor), "they are vectors"
    side = side or (SIDE if images.device.type == "cpu" else SIDE_ON_GPU)
    with torch.autocast(images.device.type, enabled=False):
        rows, columns = (
            (loss.factor() * images.to(precise(images))).split(side),
            captions.to(precise(captions)).split(side),
        )
        positives, own = _by_block(positives, side, len(rows), len(columns), images.device)
        _, others = _by_block(ignored, side, len(rows), len(columns), images.device)

        def parts(row: Tensor, column: Tensor, block: int) -> Parts:
            return loss.of_block(row @ column.T, own[block], others[block])

        made: list[Parts] = [
            checkpoint(parts, row, column, block, use_reentrant=False, preserve_rng_state=False)
            for block, (row, column) in enumerate(product(rows, columns))
        ]
        across = len(columns)
        whole = Parts(
            torch.cat([part.own for part in made]),
            torch.stack([torch.cat([part.images for part in made[j::across]]) for j in range(across)]),
            torch.stack(
                [torch.cat([part.captions for part in made[i : i + across]]) for i in range(0, len(made), across)]
            ),
        )
        return loss.total(whole, positives)


def _by_block(pairs: Pairs, side: int, down: int, across: int, device: torch.device) -> tuple[Pairs, list[Pairs]]:
    """Return pairs in the order of the blocks of `side`, and those of each block, counted from its corner."""
    rows, columns = on_host(pairs.rows), on_host(pairs.columns)
    block = rows // side * across + columns // side
    order, counts = block.argsort(stable=True), block.bincount(minlength=down * across).tolist()
    both = torch.stack([rows, columns])[:, order]
    own, within = send(both, device), send(both % side, device)
    return Pairs(*own), [Pairs(*part) for part in within.split(counts, 1)]


def compared_pairs(caption_image: Tensor, text: Tensor | None, *, same_is_positive: bool) -> tuple[Pairs, Pairs]:
    """Return a batch's positives, and the pairs that take no part in a loss; it is computed on the host.

    `caption_image [C]` and `text [C]` are the image and the number of the text of each caption, None: texts are not
    compared. A caption with the text of an image's own is its positive if `same_is_positive`; else it takes no part.
    """
    captions = torch.arange(len(caption_image))
    own, none = Pairs(caption_image, captions), Pairs(*captions.new_empty(2, 0))
    if text is None:
        return own, none
    # Each text of an image, once, and all captions that have it, which stand side by side in `order`.
    number = text.unique(return_inverse=True)[1]
    order, count = number.argsort(stable=True), number.bincount()
    mine = (caption_image * len(count) + number).unique()
    image, its_text = mine // len(count), mine % len(count)
    repeats = count[its_text]
    rows, begun = image.repeat_interleave(repeats), repeats.cumsum(0) - repeats
    first = (count.cumsum(0) - count)[its_text]
    columns = order[torch.arange(len(rows)) + (first - begun).repeat_interleave(repeats)]
    other = caption_image[columns] != rows
    same = Pairs(rows[other], columns[other])
    if same_is_positive:
        return joined(own, same), none
    return own, same


def compared_masks(
    images: int, caption_image: Tensor, text: Tensor | None, *, same_is_positive: bool
) -> tuple[Tensor, Tensor | None]:
    """Return what `compared_pairs` lists as masks `[I, C]`; None where all pairs take part."""
    own = torch.arange(images)[:, None] == caption_image
    if text is None:
        return own, None
    known, number = text.unique(return_inverse=True)
    has = torch.zeros(images, len(known), dtype=torch.bool)
    has[caption_image, number] = True
    alike = has[:, number]
    return (alike, None) if same_is_positive else (own, alike & ~own)
