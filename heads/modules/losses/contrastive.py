"""Losses over all pairs of a batch: InfoNCE, the sigmoid loss, whether a pair matches, and distillation.

Sources: van den Oord et al., *Representation Learning with Contrastive Predictive Coding*, eq. 4, in both directions as
CLIP has it (MaxMatch eq. 5 adds it as its contrastive term); Zhai et al., *Sigmoid Loss for Language Image
Pre-Training* (SigLIP, ICCV 2023), eq. 1 and algorithm 1; Chun et al., *Probabilistic Embeddings for Cross-Modal
Retrieval* (PCME) and Chun, *Improved Probabilistic Image-Text Representations* (PCME++), each section 3.2, sums and
means those of their public code; Hinton et al., *Distilling the Knowledge in a Neural Network*, eq. 1 and section 2,
the divergence of softened distributions: here over the captions of an image, and over the images of a caption.
"""

import math
from typing import Annotated, Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn.functional import binary_cross_entropy_with_logits, logsigmoid, softplus

from ..aggregators.aggregated import Aggregated
from ..parts import Positive, at_least
from .blocks import BlockLoss, Pairs, Parts, joined
from .common import LOSSES, Loss

LARGEST_SCALE = 100.0  # of a scale that is learned by its logarithm, as in CLIP
SPREAD = 70.0  # exp(-87) is float32's smallest: what is lost of a row is below exp(-17) of it, its rounding
BIAS = -10.0  # what the sigmoid loss adds at first, as published: most pairs are negative
SCALE, SHIFT = 5.0, 5.0  # a and b of `MatchingBCE` at first, as in public code


@LOSSES.register("infonce", "large batches, and strong frozen encoders")
class InfoNCE(BlockLoss):
    """The mean over positive pairs of -log softmax(scale * similarity), both directions averaged.

    A positive pair is compared with the negatives alone: other positives of its row or column are left out of its sum,
    and so are pairs whose similarity is -inf.

        >>> InfoNCE(scale=20)(torch.eye(2), torch.eye(2) > 0) < 1e-6
        tensor(True)

    Args:
        scale: what similarities are multiplied with at first; a temperature that they are divided by is its inverse.
        learned: train the scale.
        logarithm: train the scale's logarithm, up to a scale of 100, as CLIP does. A step then changes the scale by a
            share of itself.

    Raises:
        ValueError: the scale of a logarithm begins above 100.
    """

    scale: Tensor

    def __init__(self, *, scale: Positive = 1.0, learned: bool = True, logarithm: bool = False) -> None:
        super().__init__()
        if logarithm and scale > LARGEST_SCALE:
            raise ValueError(f"with logarithm, scale is at most {LARGEST_SCALE:g}, not {scale:g}")
        self.logarithm = logarithm
        begun = torch.tensor(math.log(scale) if logarithm else float(scale))
        if learned:
            self.scale = nn.Parameter(begun)
        else:
            self.register_buffer("scale", begun, persistent=False)

    def factor(self) -> Tensor:
        """Return the scale."""
        if not self.logarithm:
            return self.scale
        # The logarithm itself is kept below the bound, as CLIP does: a bounded scale would have no gradient to fall by.
        with torch.no_grad():
            self.scale.copy_(self.scale.clamp(max=math.log(LARGEST_SCALE)))
        return self.scale.exp()

    def of_block(self, logits: Tensor, positives: Pairs, ignored: Pairs) -> Parts:
        """Return, of a block of logits `[R, C]`, which is overwritten, what positives and negatives give.

        For each image and each caption this is the logarithm of its negatives' summed exponentials.
        """
        return Parts(*_LogSumExps.apply(logits, positives, joined(positives, ignored)))

    def total(self, parts: Parts, positives: Pairs) -> Tensor:
        """Return the loss, a scalar; zero without a positive."""
        images, captions = (t.squeeze(0) if len(t) == 1 else t.logsumexp(0) for t in (parts.images, parts.captions))
        negatives = torch.stack([images[positives.rows], captions[positives.columns]])
        return softplus(negatives - parts.own).sum() / (2 * max(len(parts.own), 1))

    def of_matrix(self, logits: Tensor, positives: Tensor) -> Tensor:
        """Return the loss of the logits `[I, C]` of all pairs."""
        others = logits.masked_fill(positives, torch.finfo(logits.dtype).min)
        terms = softplus(others.logsumexp(1, keepdim=True) - logits) + softplus(others.logsumexp(0) - logits)
        return terms.masked_fill(~positives, 0).sum() / (2 * positives.sum().clamp(min=1))


class _LogSumExps(torch.autograd.Function):
    """Some numbers of a matrix, and the logarithm of the summed exponentials of its rows and columns without others.

    The matrix is overwritten.

    Where on a CPU no row and no column lies far below the rest, which the scale and cosines bound, one exponential
    serves both and their gradients: it costs most of the time that a block takes beside its products.
    """

    @staticmethod
    def forward(ctx: Any, matrix: Tensor, some: Pairs, others: Pairs) -> tuple[Tensor, Tensor, Tensor]:
        own, ctx.some = matrix[some], some
        # The lowest number instead of -inf: a row without negatives has a gradient of zero, not NaN.
        matrix.index_put_(others, matrix.new_full((), torch.finfo(matrix.dtype).min))
        # A GPU is not asked: an exponential costs it less than waiting.
        ctx.shared = False
        if matrix.device.type == "cpu":
            rows, columns = matrix.amax(1), matrix.amax(0)
            top = rows.amax()
            ctx.shared = bool(torch.minimum(rows.amin(), columns.amin()) >= top - SPREAD)
        if ctx.shared:
            powers = (matrix - top).exp_()
            rows, columns = powers.sum(1), powers.sum(0)
            ctx.save_for_backward(powers, rows, columns)
            return own, rows.log() + top, columns.log() + top
        rows, columns = matrix.logsumexp(1), matrix.logsumexp(0)
        ctx.save_for_backward(matrix, rows, columns)
        return own, rows, columns

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, of_own: Tensor, of_rows: Tensor, of_columns: Tensor) -> tuple[Tensor, None, None]:
        matrix, rows, columns = ctx.saved_tensors
        if ctx.shared:
            gradient = ((of_rows / rows)[:, None] + of_columns / columns).mul_(matrix)
        else:
            gradient = (matrix - rows[:, None]).exp_().mul_(of_rows[:, None])
            gradient.add_((matrix - columns).exp_().mul_(of_columns))
        return gradient.index_put_(ctx.some, of_own), None, None


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


@LOSSES.register("soft-contrastive", "samples of Gaussians, as PCME has them")
class SoftContrastive(Loss):
    """Twice the sum of -log p over positive and -log(1 - p) over negative pairs (PCME, both directions).

    It takes the log-odds of the match probability p: p itself vanishes in float32 for samples as far apart as PCME's
    are at first, and would have no gradient.
    """

    log_odds = True

    def forward(self, similarity: Tensor, positives: Tensor, *_: Aggregated) -> Tensor:
        """Return the loss of log-odds `similarity [I, C]` under `positives [I, C]`, a scalar."""
        ignored = similarity == -torch.inf
        x = similarity.masked_fill(ignored, 0)
        match, no_match = logsigmoid(x), logsigmoid(-x)
        return -2 * torch.where(positives, match, no_match).masked_fill(ignored, 0).sum()


@LOSSES.register("matching-bce", "Gaussians, as PCME++ has them")
class MatchingBCE(Loss):
    """The binary cross-entropy of matching, the mean over all pairs, once for each direction (PCME++).

    A pair's logit is a * similarity + b, where the similarity is minus a distance; a and b are learned.

    Args:
        pseudo_positives: the weight of the same loss where every pair that is at least as close as its row's (text to
            image: column's) closest positive counts as positive too.
    """

    def __init__(self, *, pseudo_positives: Annotated[float, at_least(0)] = 0.0) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.tensor(SCALE))
        self.shift = nn.Parameter(torch.tensor(SHIFT))
        self.pseudo_positives = pseudo_positives

    def forward(self, similarity: Tensor, positives: Tensor, *_: Aggregated) -> Tensor:
        """Return the loss of `similarity [I, C]` under `positives [I, C]`, a scalar."""
        counted = similarity > -torch.inf
        # Filled before they are scaled: 0 * inf would reach the gradient of the scale.
        logits = self.scale * similarity.masked_fill(~counted, 0) + self.shift
        loss = 2 * _mean_bce(logits, positives, counted)
        if self.pseudo_positives:
            image_to_text = _mean_bce(logits, _with_pseudo(similarity, positives, 1), counted)
            text_to_image = _mean_bce(logits, _with_pseudo(similarity, positives, 0), counted)
            loss = loss + self.pseudo_positives * (image_to_text + text_to_image)
        return loss


def _mean_bce(logits: Tensor, labels: Tensor, counted: Tensor) -> Tensor:
    terms = binary_cross_entropy_with_logits(logits, labels.to(logits.dtype), reduction="none")
    return terms.masked_fill(~counted, 0).sum() / counted.sum().clamp(min=1)


def _with_pseudo(similarity: Tensor, positives: Tensor, axis: int) -> Tensor:
    """Return the positives and what is as close as the closest of them along `axis`."""
    closest = similarity.masked_fill(~positives, -torch.inf).amax(axis, keepdim=True)
    return positives | ((similarity >= closest) & positives.any(axis, keepdim=True))


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
