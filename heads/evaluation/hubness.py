"""Hubness: items near to many queries are held back by how well they answer a bank of training queries.

The inverted softmax of QB-Norm (Bogolin et al., *Cross Modal Retrieval with Querybank Normalisation*, CVPR 2022,
section 3.2) divides exp(scale · score) of an item by its sum over a bank of queries. The log of that, over the scale,
is the score and a bias of the item alone. The biases of images change no order of captions, and those of captions no
order of images: one matrix with both has the rankings of both directions.
"""

import math
from collections.abc import Callable, Iterable, Iterator, Sequence

import numpy as np
import torch
from torch import Tensor

from ...pipeline.errors import RunError
from ...pipeline.reading.prefetch import read_ahead
from ...pipeline.store import FeatureCache
from ..modules.embedding import Embedding
from ..modules.similarity import in_blocks
from .metrics import BLOCK
from .scoring import BATCH, Modality, Ranker, Scored, embed_all, representatives

LEARN, CHOOSE = "train", "val"  # the splits that the bank comes from, and that the scale is chosen on
BANK = 10_000  # captions drawn for the bank, which has all images; small banks hurt
MULTIPLES = (0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)  # scales that are tried, times one over the similarities' deviation


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
    takes = f"--hubness takes its queries from split '{LEARN}' and its scale from split '{CHOOSE}'"
    if split in (LEARN, CHOOSE):
        raise RunError(f"{takes}, which cannot show what it brings; evaluate another split, or without")
    if missing := [name for name in (LEARN, CHOOSE) if name not in cache.splits]:
        raise RunError(f"{takes}, and {cache.url} has no '{missing[0]}'; leave it out")


def biases_of(scored: Scored, scales: Sequence[float]) -> tuple[Tensor, Tensor]:
    """Return the biases of a split's images and captions with each of T scales, float64 `[T, I]` and `[T, C]`."""
    ranker, texts = scored.ranker, scored.text.embedding
    views = [scored.image.embedding, *ranker.further_views(scored.split)]
    of_captions = learned_bias(ranker, "captions", [texts], scales)
    same = representatives(texts, scored.texts)  # whose ties are exact, and stay so
    return learned_bias(ranker, "images", views, scales), of_captions[:, same]


@torch.no_grad()
def learned_bias(
    ranker: Ranker,
    modality: Modality,
    views: Sequence[Embedding],
    scales: Sequence[float],
    change: Callable[[Embedding], Embedding] | None = None,
    owners: np.ndarray | None = None,
) -> Tensor:
    """Return the bias of items with each scale, float64 `[T, N]`: of images by captions of training, and vice versa.

    The bank is read batch by batch.

    Args:
        ranker: whose scores are corrected.
        modality: what the items are.
        views: their embeddings; of images those of some views, in whose mean they are compared.
        scales: T of them.
        change: where the embeddings of the items were changed, those of the bank must be likewise.
        owners: where items may be of the bank, too, the rows in the store of the images that they are or describe,
            int64 [N]: their own captions or image, which the head has learned, do not count.
    """
    model, images, bank = ranker.model, modality == "images", ranker.batches(LEARN)
    if images:
        chosen = np.sort(np.random.default_rng(0).permutation(bank.captions)[:BANK])
        chunks = np.split(chosen, range(BATCH, len(chosen), BATCH))
        embed, parts = model.embed_captions, read_ahead(bank.caption_source.fetch, chunks, ranker.device)
        rows = bank.image_rows[bank.caption_image[chosen]]
    else:
        embed, parts, rows = model.embed_images, bank.image_features(BATCH), bank.image_rows

    def blocks() -> Iterator[Tensor]:
        first = 0
        for part in parts:
            queries = embed_all(embed, [part])
            queries = change(queries) if change else queries
            pairs = ((items, queries) if images else (queries, items) for items in views)
            block = torch.stack([in_blocks(model.similarity, *pair) for pair in pairs]).mean(0)
            block = block.T if images else block
            if owners is not None:
                alike = rows[first : first + len(block), None] == owners
                block = block.masked_fill(torch.from_numpy(alike).to(block.device), -math.inf)
            first += len(block)
            yield block

    return item_bias(blocks(), scales)
