"""The relations among a batch's samples: embeddings that have seen each other are matched, too.

Source: Fu, Mao, Song, Zhang: *Learning Semantic Relationship among Instances for Image-Text Matching* (HREM, CVPR
2023), its instance-level relations by one layer over both sides ("fusion"), with the sums and means of the public code.
A query is embedded without them.

That code lets the padding of regions take part, whatever their layers make of zeros; here no padding does. It draws
the same image once for each of its captions in a batch; here an image is there once. Where one anchor finds no negative
within reach, it drops a whole direction; here that anchor alone. It guides the relevances across sides by
`KL(relevance || guide)` and stops the gradients of the guide and of all rows.
"""

from typing import Annotated

import torch
from torch import Tensor, nn
from torch.nn import functional

from ..aggregators.aggregated import Aggregated
from ..aggregators.relations import TransformerLayer
from ..embedding import Sequence
from ..padding import valid_rows, zero_padding
from ..parts import Factor, Few, Rate, Width, between
from ..similarity.shared import unit
from .blocks import Pairs
from .common import LOSSES, Loss
from .triplet import Negatives, Reduction, Triplet

SLOPE = 0.1  # of the cosines of words and regions below zero, as in SCAN


@LOSSES.register("embedding-graph", "beside triplet: samples of a batch see each other")
class EmbeddingGraph(Loss):
    """Triplet losses of embeddings that have seen the batch, against each other and against the plain ones.

    Samples are the nodes of a graph. Each is connected with a share of either side: the closest by cosine within its
    side, those of the highest mean similarity of words and regions across. Relevances, added to the scores of a
    transformer's layer, are exp(-distance) within a side; across, a small perceptron reads the strongest similarities
    of words and regions. Their divergence from the embeddings' own closeness is added. Zero during the warm-up.

    Args:
        dim: width of the embeddings.
        margin, negatives, reduction, farthest: of the triplet losses, see `Triplet`.
        threshold: the share of each side that a sample is connected with.
        strongest: how many similarities of words and regions the perceptrons read; fewer are completed by zeros.
        scale: what the relevances are multiplied with.
        divergence: weight of the divergence.
        head_dim, dropout: of the layer, see `TransformerLayer`.
        warmup_epochs: after this many epochs, or parts of one, it begins.
    """

    used_with = Triplet.used_with
    uses_local = True
    uses_pairs = True

    def __init__(
        self,
        dim: int,
        *,
        margin: float = 0.2,
        negatives: Negatives = "hardest",
        reduction: Reduction = "sum",
        farthest: Annotated[float, between(0.5, 2)] = 1.7,
        threshold: Annotated[float, between(0, 1)] = 0.5,
        strongest: Few = 10,
        scale: Factor = 1.0,
        divergence: Factor = 10.0,
        head_dim: Width = 64,
        dropout: Rate = 0.1,
        warmup_epochs: Factor = 0.0,
    ) -> None:
        super().__init__()
        self.matching = Triplet(margin=margin, negatives=negatives, reduction=reduction, farthest=farthest)
        self.threshold, self.strongest = threshold, strongest
        self.scale, self.divergence = scale, divergence
        self.warmup_epochs = warmup_epochs
        self.alone = "a loss that begins later" if warmup_epochs else self.matching.alone
        self.epoch: float = 0
        self.layer = TransformerLayer(dim, head_dim, dropout)
        self.image_to_text, self.text_to_image = (
            nn.Sequential(nn.Linear(strongest, strongest), nn.ReLU(), nn.Linear(strongest, 1)) for _ in range(2)
        )

    def begin(self, now: float) -> bool:
        """Note that `now` epochs are trained; return whether the warm-up is over."""
        self.epoch = now
        return now >= self.warmup_epochs

    def forward(
        self,
        similarity: Tensor,
        positives: Tensor,
        images: Aggregated,
        captions: Aggregated,
        *,
        pairs: Pairs | None = None,
    ) -> Tensor:
        """Return the loss under `positives [I, C]`, a scalar; of `similarity [I, C]` only what is -inf matters.

        Both sides give vectors of width `dim`, and local rows of one width; else ValueError.
        """
        sides = (("image", images), ("text", captions))
        image, text = (self._vectors(*side) for side in sides)
        regions, words = (self.needed(given.local, "local rows", side, "one that reads them") for side, given in sides)
        if self.epoch < self.warmup_epochs:
            return 0 * torch.cat([image, text]).sum()
        with torch.autocast(image.device.type, enabled=False):
            bias, divergence = self._graph(image, text, regions, words)
            related = unit(self.layer(torch.cat([image, text]), bias[None]))
            related_image, related_text = related.split([len(image), len(text)])
            matched = [
                self.matching((one @ other.T).masked_fill(similarity == -torch.inf, -torch.inf), positives, pairs=pairs)
                for one, other in ((image, related_text), (related_image, text), (related_image, related_text))
            ]
            return torch.stack(matched).sum() + self.divergence * divergence

    def _vectors(self, side: str, aggregated: Aggregated) -> Tensor:
        embedding, dim = aggregated.embedding, self.layer.out.in_features
        vectors = embedding if isinstance(embedding, Tensor) and embedding.shape[1:] == (dim,) else None
        return unit(self.needed(vectors, f"vectors of width {dim}", side, "another aggregator"))

    def _graph(self, image: Tensor, text: Tensor, regions: Sequence, words: Sequence) -> tuple[Tensor, Tensor]:
        """Return what is added to the scores of all samples, `[I + C, I + C]`, and the divergence, a scalar."""
        of_images, of_texts = _similarities(regions, words, self.strongest)
        image_to_text = self.image_to_text(of_images[0])[..., 0] + of_images[1]
        text_to_image = self.text_to_image(of_texts[0])[..., 0] + of_texts[1]
        guide = (-_distances(image, text)).exp().detach()
        divergence = _divergence(image_to_text, guide) + _divergence(text_to_image, guide.T)
        within = [self._edges((-_distances(side, side)).exp(), side @ side.T) for side in (image, text)]
        of_image = torch.cat([within[0], self._edges(image_to_text, of_images[1])], 1)
        of_text = torch.cat([self._edges(text_to_image, of_texts[1]), within[1]], 1)
        return torch.cat([of_image, of_text]), divergence

    def _edges(self, relevance: Tensor, strength: Tensor) -> Tensor:
        """Return the scaled relevances of the connections, the strongest of each row; -inf elsewhere."""
        number = max(1, int(strength.shape[1] * self.threshold))
        weakest = strength.topk(number, 1).values[:, -1:]
        return (self.scale * relevance).masked_fill(strength < weakest, -torch.inf)


def _distances(x: Tensor, y: Tensor) -> Tensor:
    """Return the distances of unit rows; those within rounding are 0 and have no gradient, as the root has none."""
    squared = 2 - 2 * (x @ y.T)
    return squared.masked_fill(squared < 16 * torch.finfo(squared.dtype).eps, 0).sqrt()


def _divergence(relevance: Tensor, guide: Tensor) -> Tensor:
    """Return the divergence of the rows' softmax from that of the `guide`, their mean."""
    ours = relevance.log_softmax(1)
    return (ours.exp() * (ours - guide.log_softmax(1))).sum(1).mean()


@torch.no_grad()
def _similarities(regions: Sequence, words: Sequence, number: int) -> tuple[tuple[Tensor, Tensor], ...]:
    """Return of each image the strongest similarities of its regions to captions, `[I, C, number]`, and their mean.

    Then of each caption the same of its words to images, `[C, I, number]` and `[C, I]`. A region has the largest of all
    words, whose similarities are normalised over the regions; a word that of all regions, normalised over the words.
    """
    of_regions, of_words = (valid_rows(*side) for side in (regions, words))
    both = [unit(zero_padding(*side)) for side in (regions, words)]
    cosines = (both[0].flatten(0, 1) @ both[1].flatten(0, 1).T).view(*of_regions.shape, *of_words.shape)
    cosines = functional.leaky_relu(cosines.transpose(1, 2), SLOPE)  # [I, C, R, W]
    best_word = functional.normalize(cosines, dim=2).masked_fill(~of_words[:, None], -torch.inf).amax(3)
    best_region = functional.normalize(cosines, dim=3).masked_fill(~of_regions[:, None, :, None], -torch.inf).amax(2)
    return (
        _strongest(best_word, of_regions[:, None], number),
        _strongest(best_region.transpose(0, 1), of_words[:, None], number),
    )


def _strongest(scores: Tensor, valid: Tensor, number: int) -> tuple[Tensor, Tensor]:
    """Return the largest of the valid scores `[A, B, N]`, zeros among them where there are fewer, and their mean."""
    missing = max(0, number - scores.shape[2])
    scores = functional.pad(scores.masked_fill(~valid | (scores == -torch.inf), 0), (0, missing))
    count = valid.sum(2, keepdim=True)
    beyond = torch.arange(scores.shape[2], device=scores.device) >= count.clamp(min=number)
    return scores.masked_fill(beyond, -torch.inf).topk(number, 2).values, scores.sum(2) / count.clamp(min=1)[..., 0]
