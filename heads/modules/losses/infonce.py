"""InfoNCE: cross-entropy over a batch's similarities.

Source: van den Oord et al., *Representation Learning with Contrastive Predictive Coding*, eq. 4, in both directions
as CLIP has it. MaxMatch eq. 5 adds it as its contrastive term. Label smoothing: Szegedy et al., *Rethinking the
Inception Architecture*, section 7.
"""

import math

import torch
from torch import Tensor, nn

from ..aggregators.aggregated import Aggregated
from ..parameters import Positive, Share
from .common import Loss

LARGEST_SCALE = 100.0  # of a scale that is learned by its logarithm, as in CLIP


class InfoNce(Loss):
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

    def forward(self, similarity: Tensor, positives: Tensor, *_: Aggregated) -> Tensor:
        """Return the loss of `similarity [I, C]` under `positives [I, C]`, a scalar; zero without a positive."""
        ignored = similarity == -torch.inf
        scale = self.scale.exp().clamp(max=LARGEST_SCALE) if self.logarithm else self.scale
        # Filled before they are scaled: 0 * inf would reach the gradient of the scale.
        logits = scale * similarity.masked_fill(ignored, 0)
        image_to_text = _one_way(logits, positives, ignored, self.smoothing)
        return (image_to_text + _one_way(logits.T, positives.T, ignored.T, self.smoothing)) / 2


def _one_way(logits: Tensor, positives: Tensor, ignored: Tensor, smoothing: float) -> Tensor:
    """One direction: anchors are rows."""
    # The lowest number instead of -inf: a row without negatives has a gradient of zero, not NaN.
    lowest = torch.finfo(logits.dtype).min
    left_out = positives | ignored
    negatives = logits.masked_fill(left_out, lowest).logsumexp(1, keepdim=True)
    target = logits
    if smoothing:
        mean = (logits + logits.masked_fill(left_out, 0).sum(1, keepdim=True)) / (1 + (~left_out).sum(1, keepdim=True))
        target = torch.lerp(logits, mean, smoothing)
    terms = torch.logaddexp(logits, negatives) - target
    return terms.masked_fill(~positives, 0).sum() / positives.sum().clamp(min=1)
