"""Cross-attention between the regions of an image and the words of a caption.

Source: SCAN (Lee et al., *Stacked Cross Attention for Image-Text Matching*, ECCV 2018, section 3.1). Each query row
attends to the rows of the other side, the context, and is compared with what it saw.

A vector attended to is a weighted mean of context rows, sum_m w_m v_m. Its product with a query is the weighted mean
of cosines that are there already, and its square is w G w with the context's products G: no `[I, C, rows, D]` arises.
"""

from typing import Literal

import torch
from torch import Tensor
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from ..embedding import Embedding, Sequence
from ..padding import valid_rows, zero_padding
from ..parts import Positive
from .shared import SIMILARITIES, PaperCost, Similarity, check, unit

Direction = Literal["t-i", "i-t"]
Pooling = Literal["lse", "average"]

# Pairs of rows compared in one go: 4 MiB a temporary in float32, which a processor's cache holds; a GPU gets four times
# as many.
CELLS = 1 << 20
# Pairs of rows of a batch up to which what its gradient needs is kept, about 0.3 GiB. Of more it is computed again.
KEPT = 1 << 24


@SIMILARITIES.register("cross-attention", "rows against words: slow, and it shows which word looks where")
class CrossAttention(Similarity):
    """The cross-attention similarity of sequences (SCAN section 3.1).

    Rows are normalised here. A sample without any row gets zero.

    Args:
        direction: `t-i`: words attend to regions; `i-t`: regions attend to words.
        pooling: of the relevance of the query rows: `lse`, log-sum-exp over them, or `average`.
        lambda_softmax: inverse temperature of the attention (the paper's lambda_1): 9 for t-i, 4 for i-t.
        lambda_lse: scale of the relevance inside log-sum-exp (lambda_2): 6 for t-i; for i-t 5 on Flickr30K, 20 on COCO.
        negative_slope: how much of a negative cosine is left before the attention is normalised: 0 in the paper,
            0.1 in its published code.
    """

    embedding = "sequence"
    score = "the cosines of words or regions with what they attend to, pooled over all of them"
    of_cosines = True

    def __init__(
        self,
        direction: Direction = "t-i",
        pooling: Pooling = "lse",
        lambda_softmax: Positive = 9.0,
        lambda_lse: Positive = 6.0,
        negative_slope: float = 0.0,
    ) -> None:
        super().__init__()
        self.direction = self.attends = direction
        self.pooling, self.lambda_softmax, self.lambda_lse = pooling, lambda_softmax, lambda_lse
        self.negative_slope = negative_slope

    def forward(self, images: Sequence, captions: Sequence) -> Tensor:
        """Compare I images of N regions `[I, N, D]` with C captions of L words `[C, L, D]`: `[I, C]`."""
        check("sequence", images, captions)
        images, captions = _prepared(images), _prepared(captions)

        def part(begin: int, end: int) -> Tensor:
            return self._compared(images, Sequence(captions.rows[begin:end], captions.length[begin:end]))

        device = images.rows.device.type
        count = len(captions.rows)
        cells = max(1, images.rows[..., 0].numel() * captions.rows.shape[1])  # of one caption
        step = max(1, (CELLS if device == "cpu" else 4 * CELLS) // cells)
        with torch.autocast(device, enabled=False):
            if count <= step:
                return part(0, count)
            blocks = [(begin, min(begin + step, count)) for begin in range(0, count, step)]
            if torch.is_grad_enabled() and cells * count > KEPT:
                return torch.cat([checkpoint(part, *block, use_reentrant=False) for block in blocks], 1)
            return torch.cat([part(*block) for block in blocks], 1)

    def attention(self, images: Embedding, captions: Embedding) -> Tensor:
        """Return the attention between I images of N regions and C captions of L words, `[I, C, N, L]`.

        Those of a query row add up to one over the context's rows: with `t-i` those of a word over the regions, with
        `i-t` those of a region over the words. Values after a length mean nothing.
        """
        check("sequence", images, captions)
        images, captions = (_prepared(Sequence(*side)) for side in (images, captions))
        query, context = (captions, images) if self.direction == "t-i" else (images, captions)
        weight, _ = self._attention(query, context)
        return weight.permute(0, 2, 1, 3) if self.direction == "t-i" else weight.permute(2, 0, 3, 1)

    def paper_cost(self, image: list[int], caption: list[int]) -> PaperCost:
        """Return N L D for the cosines, N L D for the vectors that are attended to, D for each one's product."""
        (regions, width), (words, _) = image, caption
        queries = words if self.direction == "t-i" else regions
        why = (
            "Here no attended vector is made: its products follow from those of the rows (Gram matrix), which are made"
            " once. SCAN's equations make one for each query row. SetDiv, section 4.4, prints 1.24 M for SCAN, which is"
            " near its equations with 36 regions and 16 words, and 16.4 K for sets of 4."
        )
        return PaperCost((2 * regions * words + queries) * width, "SCAN", why)

    def _compared(self, images: Sequence, captions: Sequence) -> Tensor:
        if self.direction == "t-i":
            return self._pooled(self._relevance(captions, images), captions)
        return self._pooled(self._relevance(images, captions), images).T

    def _attention(self, query: Sequence, context: Sequence) -> tuple[Tensor, Tensor]:
        """Return what each of T query rows attends to of each context's M rows, and the cosines, `[X, M, Q, T]`."""
        count, rows = context.rows.shape[:2]
        samples, width = query.rows.shape[:2]
        cosines = (context.rows.flatten(0, 1) @ query.rows.flatten(0, 1).T).view(count, rows, samples, width)
        seen = functional.leaky_relu(cosines, self.negative_slope)
        # Padded query rows are zero and weigh nothing in the norm.
        scale = self.lambda_softmax / torch.linalg.vector_norm(seen, dim=3, keepdim=True).clamp(min=1e-8)
        # Padded context rows get no weight; in a sample of padding alone all weigh the same, but are zeros.
        padding = cosines.new_zeros(count, rows).masked_fill(~valid_rows(*context), torch.finfo(cosines.dtype).min / 2)
        return torch.addcmul(padding[:, :, None, None], seen, scale).softmax(1), cosines

    def _relevance(self, query: Sequence, context: Sequence) -> Tensor:
        """Return the cosine of each of T query rows with what it attends to in each context, `[X, Q, T]`."""
        weight, cosines = self._attention(query, context)
        gram = context.rows @ context.rows.transpose(1, 2)
        squares = (weight * (gram @ weight.flatten(2)).view_as(weight)).sum(1)
        return (weight * cosines).sum(1) / squares.clamp(min=1e-16).sqrt()

    def _pooled(self, relevance: Tensor, query: Sequence) -> Tensor:
        """Pool `relevance [X, Q, T]` over the valid rows of each query: `[X, Q]`."""
        if self.pooling == "average":
            return relevance.sum(2) / query.length.clamp(min=1)  # that of a padded row is zero
        padding = ~valid_rows(*query)
        scaled = (self.lambda_lse * relevance).masked_fill(padding, torch.finfo(relevance.dtype).min)
        return (scaled.logsumexp(2) / self.lambda_lse).masked_fill(padding.all(1), 0)


def _prepared(sequence: Sequence) -> Sequence:
    return Sequence(unit(zero_padding(*sequence)), sequence.length.to(sequence.rows.device))
