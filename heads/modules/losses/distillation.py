"""Distillation: a batch's scores learn the order, and the distances, that a teacher's have.

Source: Hinton et al., *Distilling the Knowledge in a Neural Network*, eq. 1 and section 2: the divergence of softened
distributions. Here they are over the captions of an image, and over the images of a caption.
"""

import torch
from torch import Tensor

from ..aggregators.aggregated import Aggregated
from ..parameters import Positive
from .common import LOSSES, Loss


@LOSSES.register("distillation", "the scores of a better run: --distil")
class Distillation(Loss):
    """The Kullback-Leibler divergence of softmax(scale * similarity) from the teacher's, both directions averaged.

    Pairs whose similarity is -inf are left out of both. Where there is no teacher, all positives of a row or column are
    equally likely, and nothing else is.

    Args:
        scale: what similarities, ours and the teacher's, are multiplied with: the inverse of a temperature.
    """

    uses_teacher = True

    def __init__(self, *, scale: Positive = 30.0) -> None:
        super().__init__()
        self.scale = scale

    def forward(
        self,
        similarity: Tensor,
        positives: Tensor,
        images: Aggregated,
        captions: Aggregated,
        *,
        taught: Tensor | None = None,
    ) -> Tensor:
        """Return the loss, a scalar, in nats; `taught [I, C]` are the teacher's similarities."""
        ignored = similarity == -torch.inf
        if taught is None:
            logits = torch.zeros_like(similarity).masked_fill(~positives, -torch.inf)
        else:
            logits = (self.scale * taught.to(similarity)).masked_fill(ignored, -torch.inf)
        ours = self.scale * similarity
        return (_divergence(ours, logits, ignored) + _divergence(ours.T, logits.T, ignored.T)) / 2


def _divergence(ours: Tensor, theirs: Tensor, ignored: Tensor) -> Tensor:
    """Return the mean over rows of the divergence of our distributions from theirs; rows that have none count zero."""
    empty = theirs.amax(1, keepdim=True) == -torch.inf
    teacher = theirs.masked_fill(empty, 0.0).log_softmax(1)
    student = ours.log_softmax(1).masked_fill(ignored, 0.0)
    shares = teacher.exp().masked_fill(empty, 0.0)
    return (shares * (teacher.masked_fill(shares == 0, 0.0) - student)).sum(1).mean()
