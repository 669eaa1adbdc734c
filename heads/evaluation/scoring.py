"""Scoring: embed a split and compare all its images with all its captions.

Everything is computed in float32. Captions of identical text and features are scored once, so that their ties are
exact.
"""

from collections.abc import Callable, Iterable
from collections.abc import Sequence as Several
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from ...pipeline.device import within_memory
from ...pipeline.errors import RunError
from ...pipeline.reading.batches import Batches
from ...pipeline.reading.features import Features
from ..model import Model
from ..modules.aggregators import Aggregated
from ..modules.embedding import Embedding, Sequence, concatenate, each
from ..modules.padding import zero_padding
from ..modules.similarity import in_blocks
from ..runs.features import Sets, batches_of
from . import metrics

BATCH = 256  # samples embedded in one go


@dataclass(frozen=True)
class Scores:
    """How a run compares the usable images and captions of a split.

    Attributes:
        similarity: ``[I, C]``; larger is closer.
        caption_image: the image (its row here) of each caption, int64 ``[C]`` on the CPU.
        ids: of the images, as the store has them.
        cocoid: the images' numbers in COCO, int64 ``[I]``; -1 where there is none.
        sentid: the captions' numbers, int64 ``[C]``.
        file_names: of the images, below the manifest's image folder.
        texts: the captions.
        skipped: samples that could not be read when the features were extracted.
        log_circular_variance: of the embedding sets, of images in their first view; None where they are vectors.
    """

    similarity: Tensor
    caption_image: Tensor
    ids: list[str]
    cocoid: np.ndarray
    sentid: np.ndarray
    file_names: list[str]
    texts: list[str]
    skipped: int
    log_circular_variance: float | None


def score_sets(model: Model, sets: Sets, split: str, device: torch.device, views: int = 1) -> Scores:
    """Return how a model compares the images and captions of a split of two feature sets.

    Similarities are the mean over the first `views` views of an image. This is right for whatever an embedding is: the
    slots of sets may change places from view to view, so that their mean would blend what does not belong together. Of
    vectors that are compared by cosine it is the product with the mean of the images' normalised embeddings.

    Raises:
        RunError: a similarity is not finite, or memory does not suffice.
        CacheError: the split is unknown, empty or not complete.
    """
    with within_memory(device):
        batches = batches_of(sets, model, split, device)
        images, captions = embed(model, batches)
        scores = score_embedded(model, batches, images, captions)
        for view in range(1, views):
            of_view = batches_of(sets, model, split, device, views=(view,))
            images = embed_all(model.embed_images, of_view.image_features(BATCH))
            scores.similarity.add_(compare(model, images, captions, scores.texts))
        scores.similarity.div_(views)
        return scores


def score_embedded(model: Model, batches: Batches, images: Embedding, captions: Embedding) -> Scores:
    """Return how a model compares the samples of a split that it has embedded as `images` and `captions`."""
    cache, texts = batches.image_set.cache, batches.texts()
    sets = [one for one in (images, captions) if isinstance(one, Tensor) and one.ndim == 3 and one.shape[1] > 1]
    return Scores(
        similarity=compare(model, images, captions, texts),
        caption_image=torch.as_tensor(batches.caption_image),
        ids=batches.ids(),
        cocoid=cache.sample_array("cocoid")[batches.image_rows],
        sentid=cache.sentids(0, cache.captions)[batches.caption_rows],
        file_names=batches.file_names(),
        texts=texts,
        skipped=batches.skipped,
        log_circular_variance=metrics.log_circular_variance(*sets) if len(sets) == 2 else None,
    )


@torch.no_grad()
def embed(model: Model, batches: Batches) -> tuple[Embedding, Embedding]:
    """Return the embeddings of a split's images and captions, in the order of their rows, float32.

    The model is put into evaluation mode and stays in it.
    """
    model.eval()
    return (
        embed_all(model.embed_images, batches.image_features(BATCH)),
        embed_all(model.embed_captions, batches.caption_features(BATCH)),
    )


@torch.no_grad()
def embed_all(embed: Callable[[Features], Aggregated], parts: Iterable[Features]) -> Embedding:
    """Return the embeddings of all samples of `parts`, float32, by `Model.embed_images` or `Model.embed_captions`."""
    made = (embed(features).embedding for features in parts)
    return concatenate([each(lambda t: t.float() if t.is_floating_point() else t, part) for part in made])


@torch.no_grad()
def compare(model: Model, images: Embedding, captions: Embedding, texts: Several[str]) -> Tensor:
    """Return the similarity of all images and captions, ``[I, C]``, computed in blocks.

    Args:
        images: embeddings of I images.
        captions: embeddings of C captions.
        texts: the C captions; equal ones share their column.

    Raises:
        RunError: a similarity is not finite.
    """
    unique, inverse = torch.unique(representatives(captions, texts), return_inverse=True)
    some = len(unique) < len(texts)
    scored = in_blocks(model.similarity, images, each(lambda t: t[unique], captions) if some else captions)
    if not scored.isfinite().all():
        raise RunError("the model gives similarities that are not finite: its weights are damaged, train it again")
    return scored[:, inverse] if some else scored


def representatives(embeddings: Embedding, texts: Several[str]) -> Tensor:
    """Return for each caption the first one with the same text and the same embedding, up to rounding, int64 [C].

    Captions of one text are embedded in different batches, where equal features may give embeddings that differ in the
    last digits. Other features of the same text (another image's, in an end-to-end model) stay apart.
    """
    seen: dict[str, int] = {}
    flat = _flat(embeddings)
    first = torch.tensor([seen.setdefault(text, row) for row, text in enumerate(texts)], device=flat.device)
    close = (flat - flat[first]).norm(dim=1) <= 1e-3 * flat[first].norm(dim=1)
    return torch.where(close, first, torch.arange(len(texts), device=first.device))


def _flat(embedding: Embedding) -> Tensor:
    """Return an embedding as one row of numbers a sample, ``[B, F]``."""
    if isinstance(embedding, Sequence):
        return zero_padding(*embedding).flatten(1)
    return torch.cat([t.flatten(1) for t in ([embedding] if isinstance(embedding, Tensor) else embedding)], 1)
