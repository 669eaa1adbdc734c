"""Losses over all pairs of a large batch without its similarity matrix: block by block, computed again going back.

A loss of this kind takes what it needs out of a block of the matrix, and makes its value of what all blocks gave. Going
forward a block is then forgotten; going back it is computed a second time (`torch.utils.checkpoint`). So memory holds
the embeddings, their gradients and a few blocks, and the value and all gradients are those of the whole matrix, but for
rounding: nothing is left out.

Source: the idea is that of Gao et al., *Scaling Deep Contrastive Learning Batch Size under Memory Limited Setup*, which
`training.large_batches` has for embeddings; Zhai et al., *Sigmoid Loss for Language Image Pre-Training*, section 3.3,
sum their loss over blocks.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from ..aggregators.aggregated import Aggregated
from ..similarity.shared import check, unit
from .common import Loss

# Images and captions in a block. On a CPU it stays in the cache; a GPU wants few and large products.
SIDE, SIDE_ON_GPU = 1024, 4096


class Pairs(NamedTuple):
    """Some pairs of an image and a caption, each at most once: their rows and columns, int64 `[P]` each."""

    rows: Tensor
    columns: Tensor


class BlockLoss(Loss):
    """Base of losses that can be computed block by block.

    One block is the whole matrix, so that both ways have one formula.
    """

    def factor(self) -> Tensor | float:
        """Return what similarities are multiplied with; their products are called logits here."""
        raise NotImplementedError

    def of_block(self, logits: Tensor, positives: Pairs, ignored: Pairs) -> Any:
        """Return what the loss needs of a block of logits `[R, C]`, which it may overwrite.

        Args:
            logits: of R images and C captions.
            positives: those of the block.
            ignored: others that take no part.
        """
        raise NotImplementedError

    def total(self, blocks: Sequence[Sequence[Any]], positives: Pairs, captions: int) -> Tensor:
        """Return the loss, a scalar.

        Args:
            blocks: what the blocks gave, a list for each row of them.
            positives: of the batch, in the order of the blocks.
            captions: of the batch.
        """
        raise NotImplementedError

    def forward(self, similarity: Tensor, positives: Tensor, *_: Aggregated) -> Tensor:
        """Return the loss of `similarity [I, C]` under `positives [I, C]`, a scalar."""
        infinite = similarity == -torch.inf
        # Filled before they are multiplied: 0 * inf would reach the gradient of the factor.
        logits = self.factor() * similarity.masked_fill(infinite, 0)
        own, ignored = pairs_of(positives), pairs_of(infinite & ~positives)
        return self.total([[self.of_block(logits, own, ignored)]], own, similarity.shape[1])


def pairs_of(mask: Tensor) -> Pairs:
    """Return the pairs for which `mask [I, C]` is true."""
    return Pairs(*mask.nonzero(as_tuple=True))


def joined(one: Pairs, other: Pairs) -> Pairs:
    """Return the pairs of both."""
    return Pairs(torch.cat([one.rows, other.rows]), torch.cat([one.columns, other.columns]))


def in_blocks(
    loss: BlockLoss, images: Tensor, captions: Tensor, positives: Pairs, ignored: Pairs, side: int | None = None
) -> Tensor:
    """Return the loss of the cosines of all pairs, a scalar, without ever holding more than a few blocks of them.

    Args:
        loss: of cosine similarities.
        images: `[I, D]`.
        captions: `[C, D]`.
        positives: which belong together.
        ignored: others that take no part.
        side: images and captions in a block; None: what suits the device.

    Raises:
        ValueError: an embedding is no vector.
    """
    check("vector", images, captions)
    side = side or (SIDE if images.device.type == "cpu" else SIDE_ON_GPU)

    def of_block(rows: Tensor, columns: Tensor, own: Pairs, others: Pairs) -> Any:
        return loss.of_block(rows @ columns.T, own, others)

    with torch.autocast(images.device.type, enabled=False):
        # Split and not sliced: the gradient of each slice would be as large as that of all.
        rows, columns = (loss.factor() * unit(images)).split(side), unit(captions).split(side)
        positives, own = _by_block(positives, side, len(rows), len(columns))
        _, others = _by_block(ignored, side, len(rows), len(columns))
        blocks = [
            [
                checkpoint(
                    of_block,
                    row,
                    column,
                    own[i * len(columns) + j],
                    others[i * len(columns) + j],
                    use_reentrant=False,
                    preserve_rng_state=False,  # nothing is drawn
                )
                for j, column in enumerate(columns)
            ]
            for i, row in enumerate(rows)
        ]
        return loss.total(blocks, positives, len(captions))


def _by_block(pairs: Pairs, side: int, down: int, across: int) -> tuple[Pairs, list[Pairs]]:
    """Return the pairs in the order of their blocks, and those of each block, counted from its corner."""
    block = pairs.rows // side * across + pairs.columns // side
    order = block.argsort(stable=True)
    rows, columns = pairs.rows[order], pairs.columns[order]
    counts = block.bincount(minlength=down * across).tolist()
    parts = zip((rows % side).split(counts), (columns % side).split(counts), strict=True)
    return Pairs(rows, columns), [Pairs(*part) for part in parts]
