"""InfoNCE: cross-entropy over a batch's similarities.

Source: van den Oord et al., *Representation Learning with Contrastive Predictive Coding*, eq. 4, in both directions
as CLIP has it. MaxMatch eq. 5 adds it as its contrastive term.
"""

import torch
from torch import Tensor, nn

from ..aggregators.aggregated import Aggregated
from ..parameters import Positive
from .common import Loss


def infonce(similarity: Tensor, positives: Tensor, scale: float | Tensor = 1.0) -> Tensor:
    """Return the mean over positive pairs of -log softmax(scale * similarity), both directions averaged.

    A positive pair is compared with the negatives alone: other positives of its row or column are left out of its sum,
    and so are pairs whose similarity is -inf.

    Args:
        similarity: `[I, C]`, larger is closer.
        positives: `[I, C]`, True where caption and image belong together.
        scale: what similarities are multiplied with; a temperature that they are divided by is its inverse.

    Returns:
        A scalar; zero without a positive.
    """
    ignored = similarity == -torch.inf
    # Filled before they are scaled: 0 * inf would reach the gradient of the scale.
    logits = scale * similarity.masked_fill(ignored, 0)
    return (_one_way(logits, positives, ignored) + _one_way(logits.T, positives.T, ignored.T)) / 2


class InfoNce(Loss):
    """`infonce` with a learned scale.

    Args:
        scale: what similarities are multiplied with at first.
        learned: train the scale.
    """

    def __init__(self, *, scale: Positive = 1.0, learned: bool = True) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.tensor(float(scale))) if learned else scale

    def forward(self, similarity: Tensor, positives: Tensor, *_: Aggregated) -> Tensor:
        """Return the loss of `similarity [I, C]` under `positives [I, C]`."""
        return infonce(similarity, positives, self.scale)


def _one_way(logits: Tensor, positives: Tensor, ignored: Tensor) -> Tensor:
    """One direction: anchors are rows."""
    # The lowest number instead of -inf: a row without negatives has a gradient of zero, not NaN.
    lowest = torch.finfo(logits.dtype).min
    negatives = logits.masked_fill(positives | ignored, lowest).logsumexp(1, keepdim=True)
    terms = torch.logaddexp(logits, negatives) - logits
    return terms.masked_fill(~positives, 0).sum() / positives.sum().clamp(min=1)
