"""Cross-attention between the regions of an image and the words of a caption.

Source: SCAN (Lee et al., *Stacked Cross Attention for Image-Text Matching*, ECCV 2018, section 3.1). Each query row
attends to the rows of the other side, the context, and is compared with what it saw.

A vector attended to is a weighted mean of context rows, sum_m w_m v_m. Its product with a query is the weighted mean
of cosines that are there already, and its square is w G w with the context's products G: no `[I, C, rows, D]` arises.
"""

from typing import Literal

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from ..checks import above, one_of
from ..embedding import Sequence
from ..padding import softmax, valid_rows, zero_padding
from .shared import check_sequences, unit

Direction = Literal["t-i", "i-t"]
Pooling = Literal["lse", "average"]

CELLS = 1 << 22  # pairs of rows compared in one go: 16 MiB a temporary in float32


def cross_attention(
    images: Sequence,
    captions: Sequence,
    *,
    direction: Direction = "t-i",
    pooling: Pooling = "lse",
    lambda_softmax: float = 9.0,
    lambda_lse: float = 6.0,
    negative_slope: float = 0.0,
) -> Tensor:
    """Return the cross-attention similarity of every pair (SCAN section 3.1).

    Rows are normalised here. A sample without any row gets zero.

    Args:
        images: regions `[I, N, D]` with lengths `[I]`.
        captions: words `[C, L, D]` with lengths `[C]`.
        direction: `t-i`: words attend to regions; `i-t`: regions attend to words.
        pooling: of the relevance of the query rows: `lse`, log-sum-exp over them, or `average`.
        lambda_softmax: inverse temperature of the attention (the paper's lambda_1).
        lambda_lse: scale of the relevance inside log-sum-exp (lambda_2).
        negative_slope: how much of a negative cosine is left before the attention is normalised: 0 in the paper,
            0.1 in its published code.

    Returns:
        `[I, C]`.
    """
    check_sequences(images, captions)
    images, captions = _prepared(images), _prepared(captions)

    def part(begin: int, end: int) -> Tensor:
        some = Sequence(captions.rows[begin:end], captions.length[begin:end])
        query, context = (some, images) if direction == "t-i" else (images, some)
        relevance = _relevance(query, context, lambda_softmax, negative_slope)
        pooled = _pooled(relevance, query, lambda_lse if pooling == "lse" else None)
        return pooled if direction == "t-i" else pooled.T

    count = len(captions.rows)
    step = max(1, CELLS // max(1, images.rows[..., 0].numel() * captions.rows.shape[1]))
    with torch.autocast(images.rows.device.type, enabled=False):
        if count <= step:
            return part(0, count)
        blocks = [(begin, min(begin + step, count)) for begin in range(0, count, step)]
        if torch.is_grad_enabled():  # what a block computes is computed again for its gradient, not kept
            return torch.cat([checkpoint(part, *block, use_reentrant=False) for block in blocks], 1)
        return torch.cat([part(*block) for block in blocks], 1)


class CrossAttention(nn.Module):
    """`cross_attention` of sequences.

    Args:
        direction: see `cross_attention`.
        pooling: see `cross_attention`.
        lambda_softmax: the paper takes 9 for t-i, 4 for i-t.
        lambda_lse: the paper takes 6 for t-i; for i-t 5 on Flickr30K, 20 on COCO.
        negative_slope: see `cross_attention`.
    """

    embedding = "sequence"

    def __init__(
        self,
        direction: Direction = "t-i",
        pooling: Pooling = "lse",
        lambda_softmax: float = 9.0,
        lambda_lse: float = 6.0,
        negative_slope: float = 0.0,
    ) -> None:
        super().__init__()
        one_of("cross-attention", Direction, direction=direction)
        one_of("cross-attention", Pooling, pooling=pooling)
        above("cross-attention", 0, lambda_softmax=lambda_softmax, lambda_lse=lambda_lse)
        self.direction: Direction = direction
        self.pooling: Pooling = pooling
        self.lambda_softmax = lambda_softmax
        self.lambda_lse = lambda_lse
        self.negative_slope = negative_slope

    def forward(self, images: Sequence, captions: Sequence) -> Tensor:
        """Compare I with C sequences: `[I, C]`."""
        return cross_attention(
            images,
            captions,
            direction=self.direction,
            pooling=self.pooling,
            lambda_softmax=self.lambda_softmax,
            lambda_lse=self.lambda_lse,
            negative_slope=self.negative_slope,
        )

    def weights(self, images: Sequence, captions: Sequence) -> Tensor:
        """Return the attention between I images of N regions and C captions of L words, `[I, C, N, L]`.

        Those of a query row add up to one over the context's rows: with `t-i` those of a word over the regions, with
        `i-t` those of a region over the words. What stands behind a length means nothing.
        """
        check_sequences(images, captions)
        images, captions = _prepared(images), _prepared(captions)
        query, context = (captions, images) if self.direction == "t-i" else (images, captions)
        with torch.autocast(images.rows.device.type, enabled=False):
            weight, _ = _attention(query, context, self.lambda_softmax, self.negative_slope)
        return weight.permute(0, 2, 1, 3) if self.direction == "t-i" else weight.permute(2, 0, 3, 1)


def _prepared(sequence: Sequence) -> Sequence:
    """Return unit rows, with zeros after every length."""
    return Sequence(unit(zero_padding(*sequence)), sequence.length.to(sequence.rows.device))


def _attention(
    query: Sequence, context: Sequence, lambda_softmax: float, negative_slope: float
) -> tuple[Tensor, Tensor]:
    """Return what each of T query rows attends to of each context's M rows, and the cosines, both `[X, M, Q, T]`."""
    count, rows = context.rows.shape[:2]
    samples, width = query.rows.shape[:2]
    cosines = (context.rows.flatten(0, 1) @ query.rows.flatten(0, 1).T).view(count, rows, samples, width)
    # Padded query rows are zero and weigh nothing in the norm.
    weight = functional.normalize(functional.leaky_relu(cosines, negative_slope), dim=3, eps=1e-8)
    return softmax(lambda_softmax * weight, valid_rows(*context)[:, :, None, None], 1), cosines


def _relevance(query: Sequence, context: Sequence, lambda_softmax: float, negative_slope: float) -> Tensor:
    """Return the cosine of each of T query rows with what it attends to in each context, `[X, Q, T]`."""
    weight, cosines = _attention(query, context, lambda_softmax, negative_slope)
    gram = context.rows @ context.rows.transpose(1, 2)
    squares = (weight * (gram @ weight.flatten(2)).view_as(weight)).sum(1)
    return (weight * cosines).sum(1) / squares.clamp(min=1e-16).sqrt()


def _pooled(relevance: Tensor, query: Sequence, lambda_lse: float | None) -> Tensor:
    """Pool `relevance [X, Q, T]` over the valid rows of each query, by log-sum-exp or on average: `[X, Q]`."""
    if lambda_lse is None:
        return relevance.sum(2) / query.length.clamp(min=1)  # that of a padded row is zero
    padding = ~valid_rows(*query)
    scaled = (lambda_lse * relevance).masked_fill(padding, torch.finfo(relevance.dtype).min)
    return (scaled.logsumexp(2) / lambda_lse).masked_fill(padding.all(1), 0)
