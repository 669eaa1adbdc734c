"""Hubness: items near to many queries are held back by how well they answer a bank of training queries.

The inverted softmax of QB-Norm (Bogolin et al., *Cross Modal Retrieval with Querybank Normalisation*, CVPR 2022,
section 3.2) divides exp(scale · score) of an item by its sum over a bank of queries. The log of that, over the scale,
is the score and a bias of the item alone. The biases of images change no order of captions, and those of captions no
order of images: one matrix with both has the rankings of both directions.
"""

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from ...pipeline.errors import RunError
from ...pipeline.reading.prefetch import read_ahead
from ...pipeline.store import FeatureCache
from ...pipeline.wording import option
from ..model import Model
from ..modules.embedding import Embedding
from ..modules.similarity import in_blocks
from ..runs.features import Sets, batches_of
from .metrics import BLOCK
from .scoring import BATCH, Ranker, Scored, embed_all, representatives

LEARN, CHOOSE = "train", "val"  # the splits that the bank comes from, and that the scale is chosen on
BANK = 10_000  # captions drawn for the bank, which has all images; small banks hurt
MULTIPLES = (0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)  # scales that are tried, times one over the similarities' deviation
Change = Callable[[Embedding], Embedding]


def unchanged(embedding: Embedding) -> Embedding:
    """Return an embedding as it is."""
    return embedding


@dataclass(frozen=True)
class Biases:
    """What is added to the similarities, with each of T scales."""

    images: Tensor  # float64 [T, I]
    captions: Tensor  # float64 [T, C]

    def added(self, scores: Scored, number: int) -> Scored:
        """Return scores with the biases of one of the scales."""
        return scores.biased(self.images[number], self.captions[number])


def item_bias(bank: Iterable[Tensor], scales: Sequence[float]) -> Tensor:
    """Return the bias of N items with each of T scales, float64 `[T, N]`: -log(mean of exp(scale · score)) / scale.

    `bank` gives blocks `[B, N]` of the scores that queries of the bank have with the items, -inf where one does not
    count. The mean in the place of QB-Norm's sum shifts all by one number, so that scores keep their size.
    """
    each = torch.tensor(list(scales), dtype=torch.float64)
    total, count = torch.tensor(-math.inf).double(), torch.tensor(0.0).double()
    for block in bank:
        part = torch.stack([(scale * block).logsumexp(0) for scale in scales]).double()
        total, count = torch.logaddexp(total, part), count + (block > -math.inf).sum(0)
    biases: Tensor = (count.log() - total) / each.to(total)[:, None]
    return biases


def inverted_softmax(scores: Tensor, bank: Tensor, scale: float) -> Tensor:
    """Return the scores `[Q, N]` of queries normalised by those of a bank `[B, N]`; see the module."""
    return scores + item_bias([bank], [scale])[0].to(scores)


def skewness(similarity: Tensor, k: int = 10) -> float:
    """Return the skewness of how often each of N items is among the first k of Q queries, of scores `[Q, N]`.

    It is 0 where all items are found alike, and grows with hubs (Radovanović et al., *Hubs in Space*, JMLR 2010).
    """
    items = similarity.shape[1]
    counts = torch.zeros(items, dtype=torch.float64, device=similarity.device)
    step = max(1, BLOCK // items)
    for block in similarity.split(step):
        counts += torch.bincount(block.topk(min(k, items)).indices.flatten(), minlength=items)
    apart = counts - counts.mean()
    spread = apart.square().mean().sqrt()
    return 0.0 if spread == 0 else float((apart**3).mean() / spread**3)


def require_bank(cache: FeatureCache, split: str | None = None) -> None:
    """Raise RunError where a store has no training queries or nothing to choose on, or `split` is theirs."""
    takes = f"{option('hubness')} takes its queries from split '{LEARN}' and its scale from split '{CHOOSE}'"
    if split in (LEARN, CHOOSE):
        raise RunError(f"{takes}, which cannot show what it brings; evaluate another split, or without")
    if missing := [name for name in (LEARN, CHOOSE) if name not in cache.splits]:
        raise RunError(f"{takes}, and {cache.url} has no '{missing[0]}'; leave it out")


def bank_biases(ranker: Ranker, scored: Scored, scales: Sequence[float], views: int = 1) -> Biases:
    """Return the biases of a split's images by training captions, and of its captions by training images.

    Images are compared in the mean of their first `views` views.
    """
    model, device = scored.model, scored.similarity.device
    images = [scored.image.embedding]
    for view in range(1, views):
        of_view = batches_of(ranker.sets, model, scored.split, device, views=(view,))
        images.append(embed_all(model.embed_images, of_view.image_features(BATCH)))
    of_captions = caption_bias(ranker.sets, model, device, scored.text.embedding, scales)
    same = representatives(scored.text.embedding, scored.texts)  # whose ties are exact, and stay so
    return Biases(image_bias(ranker.sets, model, device, images, scales), of_captions[:, same])


@torch.no_grad()
def image_bias(
    sets: Sets,
    model: Model,
    device: torch.device,
    views: Sequence[Embedding],
    scales: Sequence[float],
    change: Change = unchanged,
    owners: np.ndarray | None = None,
) -> Tensor:
    """Return the bias of images, in the mean of some views, with each scale, by captions that are read bit by bit.

    Where the images' embeddings were changed, the captions' must `change` likewise. Where images may be of the bank,
    too, `owners` are their rows in the store, int64 [N]: their own captions, which the head has learned, do not count.
    """
    bank = batches_of(sets, model, LEARN, device)
    chosen = np.sort(np.random.default_rng(0).permutation(bank.captions)[:BANK])
    parts = read_ahead(bank.caption_source.fetch, np.split(chosen, range(BATCH, len(chosen), BATCH)), device)
    embedded = (change(embed_all(model.embed_captions, [part])) for part in parts)
    several = (torch.stack([in_blocks(model.similarity, one, captions) for one in views]) for captions in embedded)
    rows = bank.image_rows[bank.caption_image[chosen]]
    return item_bias(_without_own((one.mean(0).T for one in several), rows, owners), scales)


@torch.no_grad()
def caption_bias(
    sets: Sets,
    model: Model,
    device: torch.device,
    captions: Embedding,
    scales: Sequence[float],
    change: Change = unchanged,
    owners: np.ndarray | None = None,
) -> Tensor:
    """Return the bias of captions with each scale, by images that are read batch by batch; `change` as above.

    `owners` are the rows in the store of the captions' images.
    """
    bank = batches_of(sets, model, LEARN, device)
    embedded = (change(embed_all(model.embed_images, [part])) for part in bank.image_features(BATCH))
    scored = (in_blocks(model.similarity, one, captions) for one in embedded)
    return item_bias(_without_own(scored, bank.image_rows, owners), scales)


def _without_own(blocks: Iterable[Tensor], rows: np.ndarray, owners: np.ndarray | None) -> Iterator[Tensor]:
    """Yield blocks [B, N] of scores, -inf where a query of the bank, which has `rows`, and an item have one owner."""
    first = 0
    for block in blocks:
        if owners is not None:
            own = rows[first : first + len(block), None] == owners
            block = block.masked_fill(torch.from_numpy(own).to(block.device), -math.inf)
        first += len(block)
        yield block
