"""Losses over all pairs of a large batch without its similarity matrix: block by block, computed again going back.

A loss of this kind takes what it needs out of a block of the matrix, and makes its value of what all blocks gave. Going
forward a block is then forgotten; going back it is computed a second time. So memory holds the embeddings, their
gradients and one block, and the value and all gradients are those of the whole matrix, but for rounding.

Sources: the idea is that of Gao et al., *Scaling Deep Contrastive Learning Batch Size under Memory Limited Setup*,
which `training.large_batches` has for embeddings. Zhai et al., *Sigmoid Loss for Language Image Pre-Training*, section
3.3, sum their loss over blocks.
"""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from itertools import product
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from ..aggregators.aggregated import Aggregated
from ..similarity.shared import check, unit
from .common import Loss

# Images and captions in a block. On a CPU it stays in the cache; a GPU wants few and large products.
SIDE, SIDE_ON_GPU = 1024, 4096


class Pairs(NamedTuple):
    """Some pairs of an image and a caption, each at most once: their rows and columns, int64 `[P]` each."""

    rows: Tensor
    columns: Tensor


class Parts(NamedTuple):
    """What a loss takes out of a block of R images and C captions, or of all blocks.

    Attributes:
        own: a number for each positive, `[P]`.
        images: some numbers for each image, `[K, R]`; of all blocks `[blocks across, K, I]`.
        captions: some for each caption, `[L, C]`; of all blocks `[blocks down, L, C]`.
    """

    own: Tensor
    images: Tensor
    captions: Tensor


class BlockLoss(Loss, ABC):
    """Base of losses that can be computed block by block.

    One block is the whole matrix, so that both ways have one formula.
    """

    @abstractmethod
    def factor(self) -> Tensor:
        """Return what similarities are multiplied with; their products are called logits here."""

    @abstractmethod
    def of_block(self, logits: Tensor, positives: Pairs, ignored: Pairs) -> Parts:
        """Return what the loss needs of a block of logits `[R, C]`, which it may overwrite.

        Args:
            logits: of R images and C captions.
            positives: those of the block.
            ignored: others that take no part.
        """

    @abstractmethod
    def total(self, parts: Parts, positives: Pairs) -> Tensor:
        """Return the loss, a scalar.

        Args:
            parts: of all blocks.
            positives: of the batch, in the order of the blocks.
        """

    def forward(self, similarity: Tensor, positives: Tensor, *_: Aggregated) -> Tensor:
        """Return the loss of `similarity [I, C]` under `positives [I, C]`, a scalar."""
        infinite = similarity == -torch.inf
        # Filled before they are multiplied: 0 * inf would reach the gradient of the factor.
        logits = self.factor() * similarity.masked_fill(infinite, 0)
        own = pairs_of(positives)
        parts = self.of_block(logits, own, pairs_of(infinite & ~positives))
        return self.total(Parts(parts.own, parts.images[None], parts.captions[None]), own)


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
    with torch.autocast(images.device.type, enabled=False):
        rows, columns = loss.factor() * unit(images), unit(captions)
        grid = _Grid(side, len(rows), len(columns))
        positives, own = grid.sorted(positives)
        _, others = grid.sorted(ignored)
        parts = _Recomputed.apply(loss, grid, own, others, rows, columns, *loss.parameters())
        return loss.total(Parts(*parts), positives)


class _Grid(NamedTuple):
    """How a matrix is cut into blocks of so many rows and columns."""

    side: int
    rows: int
    columns: int

    @property
    def across(self) -> int:
        return -(-self.columns // self.side)

    @property
    def down(self) -> int:
        return -(-self.rows // self.side)

    def sorted(self, pairs: Pairs) -> tuple[Pairs, list[Pairs]]:
        """Return pairs in the order of their blocks, and those of each block, counted from its corner."""
        block = pairs.rows // self.side * self.across + pairs.columns // self.side
        order = block.argsort(stable=True)
        rows, columns = pairs.rows[order], pairs.columns[order]
        counts = block.bincount(minlength=self.down * self.across).tolist()
        parts = zip((rows % self.side).split(counts), (columns % self.side).split(counts), strict=True)
        return Pairs(rows, columns), [Pairs(*part) for part in parts]

    def places(self, wholes: Sequence[Tensor], counts: list[int]) -> list[tuple[Tensor, Tensor, Tensor]]:
        """Return where the parts of each block, which has so many positives, lie in those of all blocks."""
        own, images, captions = wholes
        of_rows = [images[:, :, first : first + self.side] for first in range(0, self.rows, self.side)]
        of_columns = [captions[:, :, first : first + self.side] for first in range(0, self.columns, self.side)]
        blocks = product(range(self.down), range(self.across))
        return [(part, of_rows[i][j], of_columns[j][i]) for part, (i, j) in zip(own.split(counts), blocks, strict=True)]


class _Recomputed(torch.autograd.Function):
    """The parts of all blocks, of which each is computed a second time going back.

    `torch.utils.checkpoint` a block does the same, but what it allocates between blocks leaves the memory full of holes
    that no block fits into.
    """

    @staticmethod
    def forward(
        ctx: Any,
        loss: BlockLoss,
        grid: _Grid,
        own: list[Pairs],
        others: list[Pairs],
        rows: Tensor,
        columns: Tensor,
        *parameters: Tensor,
    ) -> tuple[Tensor, ...]:
        ctx.loss, ctx.grid, ctx.own, ctx.others = loss, grid, own, others
        ctx.save_for_backward(rows, columns, *parameters)
        counts = [len(pairs.rows) for pairs in own]
        made: list[Tensor] = []
        for number, (row, column) in enumerate(product(rows.split(grid.side), columns.split(grid.side))):
            parts = loss.of_block(row @ column.T, own[number], others[number])
            if not made:  # all at once, so that nothing small is left between the blocks
                made = [
                    rows.new_empty(sum(counts)),
                    rows.new_empty(grid.across, len(parts.images), grid.rows),
                    rows.new_empty(grid.down, len(parts.captions), grid.columns),
                ]
                places = grid.places(made, counts)
            for place, part in zip(places[number], parts, strict=True):
                place.copy_(part)
        return tuple(made)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        rows, columns, *parameters = ctx.saved_tensors
        grid: _Grid = ctx.grid
        sums = [torch.zeros_like(tensor) for tensor in (rows, columns, *parameters)]
        places = grid.places(gradients, [len(pairs.rows) for pairs in ctx.own])
        sides = product(
            *(
                zip(side.split(grid.side), sum_.split(grid.side), strict=True)
                for side, sum_ in zip((rows, columns), sums, strict=False)
            )
        )
        for number, ((row, by_row), (column, by_column)) in enumerate(sides):
            leaves = [row.detach().requires_grad_(), column.detach().requires_grad_(), *parameters]
            with torch.enable_grad():
                parts = ctx.loss.of_block(leaves[0] @ leaves[1].T, ctx.own[number], ctx.others[number])
            depend = [at for at, part in enumerate(parts) if part.requires_grad]
            outputs, given = ([some[at] for at in depend] for some in (parts, places[number]))
            found = torch.autograd.grad(outputs, leaves, given, allow_unused=True)
            for sum_, gradient in zip((by_row, by_column, *sums[2:]), found, strict=True):
                if gradient is not None:
                    sum_ += gradient
        return None, None, None, None, *sums
