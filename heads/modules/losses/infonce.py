"""InfoNCE: cross-entropy over a batch's similarities.

Source: van den Oord et al., *Representation Learning with Contrastive Predictive Coding*, eq. 4, in both directions
as CLIP has it. MaxMatch eq. 5 adds it as its contrastive term. Label smoothing: Szegedy et al., *Rethinking the
Inception Architecture*, section 7.
"""

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from ..parameters import Positive, Share
from .blocks import BlockLoss, Pairs, joined

LARGEST_SCALE = 100.0  # of a scale that is learned by its logarithm, as in CLIP
SPREAD = 70.0  # exp(-87) is float32's smallest: what is lost of a row is below exp(-17) of it, its rounding


class InfoNce(BlockLoss):
    """The mean over positive pairs of -log softmax(scale * similarity), both directions averaged.

    A positive pair is compared with the negatives alone: other positives of its row or column are left out of its sum,
    and so are pairs whose similarity is -inf.

    Args:
        scale: what similarities are multiplied with at first; a temperature that they are divided by is its inverse.
        learned: train the scale.
        logarithm: train the scale's logarithm, up to a scale of 100, as CLIP does. A step then changes the scale by a
            share of itself.
        smoothing: the share of the target that is spread evenly over a positive pair and its negatives.
    """

    def __init__(
        self, *, scale: Positive = 1.0, learned: bool = True, logarithm: bool = False, smoothing: Share = 0.0
    ) -> None:
        super().__init__()
        self.logarithm, self.smoothing = logarithm, smoothing
        begun = math.log(scale) if logarithm else float(scale)
        self.scale = nn.Parameter(torch.tensor(begun)) if learned else torch.tensor(begun)

    def factor(self) -> Tensor:
        """Return the scale."""
        return self.scale.exp().clamp(max=LARGEST_SCALE) if self.logarithm else self.scale

    def of_block(self, logits: Tensor, positives: Pairs, ignored: Pairs) -> "_Block":
        """Return the positives of a block of logits `[R, C]`, which is overwritten, and what becomes of the others."""
        own = logits[positives]
        left_out = joined(positives, ignored)
        sums = [logits.new_zeros(2, size) for size in logits.shape]  # nobody asks for them
        if self.smoothing:
            kept = torch.ones_like(logits).index_put(left_out, logits.new_zeros(()))
            sums = [torch.stack([(logits * kept).sum(axis), kept.sum(axis)]) for axis in (1, 0)]
        # The lowest number instead of -inf: a row without negatives has a gradient of zero, not NaN.
        negatives = logits.index_put_(left_out, logits.new_tensor(torch.finfo(logits.dtype).min))
        of_images, of_captions = _LogSumExps.apply(negatives)
        return _Block(own, _Negatives(of_images, sums[0]), _Negatives(of_captions, sums[1]))

    def total(self, blocks: Sequence[Sequence["_Block"]], positives: Pairs, captions: int) -> Tensor:
        """Return the loss, a scalar; zero without a positive."""
        own = torch.cat([block.own for row in blocks for block in row])
        of_images = [[block.images for block in row] for row in blocks]
        of_captions = [[block.captions for block in column] for column in zip(*blocks, strict=True)]
        terms = self._terms(own, of_images, positives.rows) + self._terms(own, of_captions, positives.columns)
        return terms.sum() / (2 * max(len(own), 1))

    def _terms(self, own: Tensor, parts: list[list["_Negatives"]], anchor: Tensor) -> Tensor:
        """Return each positive's term in one direction, `[P]`; each list has all parts of its anchors' negatives."""
        negatives = torch.cat([torch.stack([part.lse for part in some]).logsumexp(0) for some in parts])[anchor]
        target = own
        if self.smoothing:
            sum_, count = torch.cat([torch.stack([part.sums for part in some]).sum(0) for some in parts], 1)[:, anchor]
            target = torch.lerp(own, (own + sum_) / (1 + count), self.smoothing)
        return torch.logaddexp(own, negatives) - target


class _Negatives(NamedTuple):
    """The negatives of R anchors: the logarithm of their summed exponentials `[R]`, their sum and number `[2, R]`."""

    lse: Tensor
    sums: Tensor


class _Block(NamedTuple):
    """What a block gives: the logits of its positives `[P]`, and the negatives of its images and of its captions."""

    own: Tensor
    images: _Negatives
    captions: _Negatives


class _LogSumExps(torch.autograd.Function):
    """The logarithm of the summed exponentials of a matrix's rows and of its columns, as `logsumexp` gives them.

    Where no row and no column lies far below the rest, which the scale and cosines bound, one exponential serves both
    and their gradients: it costs most of the time that a block takes beside its products.
    """

    @staticmethod
    def forward(ctx: Any, matrix: Tensor) -> tuple[Tensor, Tensor]:
        rows, columns = matrix.amax(1), matrix.amax(0)
        top = rows.amax()
        ctx.shared = bool(torch.minimum(rows.amin(), columns.amin()) >= top - SPREAD)
        if ctx.shared:
            powers = (matrix - top).exp_()
            rows, columns = powers.sum(1), powers.sum(0)
            ctx.save_for_backward(powers, rows, columns)
            return rows.log() + top, columns.log() + top
        rows, columns = matrix.logsumexp(1), matrix.logsumexp(0)
        ctx.save_for_backward(matrix, rows, columns)
        return rows, columns

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, of_rows: Tensor, of_columns: Tensor) -> Tensor:
        matrix, rows, columns = ctx.saved_tensors
        if ctx.shared:
            gradient: Tensor = (of_rows / rows)[:, None] + of_columns / columns
            return gradient.mul_(matrix)
        gradient = (matrix - rows[:, None]).exp_().mul_(of_rows[:, None])
        return gradient.add_((matrix - columns).exp_().mul_(of_columns))
