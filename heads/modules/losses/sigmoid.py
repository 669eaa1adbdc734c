"""The sigmoid loss: every pair of a batch is judged by itself, as belonging together or not.

Source: Zhai et al., *Sigmoid Loss for Language Image Pre-Training* (SigLIP, ICCV 2023), eq. 1 and algorithm 1.
"""

import math

import torch
from torch import Tensor, nn
from torch.nn.functional import logsigmoid

from ..aggregators.aggregated import Aggregated
from ..parameters import Positive
from .common import Loss


class Sigmoid(Loss):
    """The sum over all pairs of -log sigmoid(+-(scale * similarity + bias)), divided by the number of captions.

    The sign is that of a positive or of a negative pair. Pairs whose similarity is -inf are left out.

    Args:
        scale: what similarities are multiplied with at first; its logarithm is learned.
        bias: what is added at first, learned; very negative, since most pairs are.
    """

    def __init__(self, *, scale: Positive = 10.0, bias: float = -10.0) -> None:
        super().__init__()
        self.log_scale = nn.Parameter(torch.tensor(math.log(scale)))
        self.bias = nn.Parameter(torch.tensor(float(bias)))

    def forward(self, similarity: Tensor, positives: Tensor, *_: Aggregated) -> Tensor:
        """Return the loss of `similarity [I, C]` under `positives [I, C]`, a scalar."""
        ignored = similarity == -torch.inf
        logits = self.log_scale.exp() * similarity.masked_fill(ignored, 0) + self.bias
        terms = -logsigmoid(torch.where(positives, logits, -logits))
        return terms.masked_fill(ignored, 0).sum() / similarity.shape[1]
