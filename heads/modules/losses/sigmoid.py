"""The sigmoid loss: every pair of a batch is judged by itself, as belonging together or not.

Source: Zhai et al., *Sigmoid Loss for Language Image Pre-Training* (SigLIP, ICCV 2023), eq. 1 and algorithm 1.
"""

import math

import torch
from torch import Tensor, nn
from torch.nn.functional import softplus

from ..parameters import Positive
from .blocks import BlockLoss, Pairs, Parts, joined
from .common import LOSSES

BIAS = -10.0  # what is added at first, as published: most pairs are negative


@LOSSES.register("sigmoid", "very large batches: each pair is judged alone")
class Sigmoid(BlockLoss):
    """The sum over all pairs of -log sigmoid(+-(scale * similarity + bias)), divided by the number of captions.

    The sign is that of a positive or of a negative pair. Pairs whose similarity is -inf are left out.

    Args:
        scale: what similarities are multiplied with at first; its logarithm is learned.
    """

    def __init__(self, *, scale: Positive = 10.0) -> None:
        super().__init__()
        self.log_scale = nn.Parameter(torch.tensor(math.log(scale)))
        self.bias = nn.Parameter(torch.tensor(BIAS))

    def factor(self) -> Tensor:
        """Return the scale."""
        return self.log_scale.exp()

    def of_block(self, logits: Tensor, positives: Pairs, ignored: Pairs) -> Parts:
        """Return, of a block of scaled similarities `[R, C]`, which is overwritten, each image's sum over captions."""
        logits += self.bias
        # -log sigmoid(-x) is softplus(x): positives change their sign, and softplus of the lowest number is zero.
        lowest = logits.new_full(ignored.rows.shape, torch.finfo(logits.dtype).min)
        changed = torch.cat([-logits[positives], lowest])
        terms = softplus(logits.index_put_(joined(positives, ignored), changed))
        return Parts(logits.new_zeros(len(positives.rows)), terms.sum(1), logits.new_zeros(logits.shape[1]))

    def total(self, parts: Parts, positives: Pairs) -> Tensor:
        """Return the loss, a scalar."""
        return parts.images.sum() / parts.captions.shape[1]

    def of_matrix(self, logits: Tensor, positives: Tensor) -> Tensor:
        """Return the loss of the logits `[I, C]` of all pairs."""
        logits = logits + self.bias
        return softplus(torch.where(positives, -logits, logits)).sum() / logits.shape[1]
