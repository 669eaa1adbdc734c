"""A split as a run embeds it: what all diagnostics look at."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from ...pipeline.reading.batches import Batches, Features
from ..evaluation.scoring import BATCH
from ..model import Model
from ..modules.aggregators import Aggregated
from ..modules.embedding import Embedding, Gaussian, concatenate, each


@dataclass(frozen=True)
class Side:
    """One modality of a split.

    Attributes:
        embedding: of B samples, float32.
        uncertainty: the log-determinant of each sample's covariance, ``[B]``; None where there is no Gaussian.
        length: valid local rows, or tokens, of each sample, int64 ``[B]`` on the CPU.
    """

    embedding: Embedding
    uncertainty: Tensor | None
    length: Tensor


@dataclass(frozen=True)
class Embedded:
    """The usable images and captions of a split.

    Attributes:
        image: I images.
        text: C captions.
        caption_image: the image (its row here) of each caption, int64 ``[C]``.
        image_rows: the images' rows in the store, int64 ``[I]``.
        caption_rows: the captions' rows in the store, int64 ``[C]``.
        ids: of the images.
        file_names: of the images, below the image folder.
        sentids: the captions' numbers.
        texts: the captions.
    """

    image: Side
    text: Side
    caption_image: Tensor
    image_rows: np.ndarray
    caption_rows: np.ndarray
    ids: list[str]
    file_names: list[str]
    sentids: list[int]
    texts: list[str]


def embed_split(model: Model, batches: Batches) -> Embedded:
    """Embed the images and captions of a split, in the order of their rows."""
    cache = batches.image_set.cache
    return Embedded(
        image=embed_side(model.embed_images, batches.image_features(BATCH)),
        text=embed_side(model.embed_captions, batches.caption_features(BATCH)),
        caption_image=torch.as_tensor(batches.caption_image),
        image_rows=batches.image_rows,
        caption_rows=batches.caption_rows,
        ids=batches.ids(),
        file_names=batches.file_names(),
        sentids=cache.sentids(0, cache.captions)[batches.caption_rows].tolist(),
        texts=batches.texts(),
    )


def uncertainty(made: Aggregated) -> Tensor | None:
    """Return log det of each sample's covariance, ``[B]`` (*Uncertainty-based Cross-Modal Retrieval*, section 3.3).

    The covariance is that of the embedding, or of the Gaussian that its elements were drawn from; None without one.
    """
    gaussian = made.embedding if isinstance(made.embedding, Gaussian) else made.gaussian
    return None if gaussian is None else gaussian.log_determinant()


@torch.no_grad()
def embed_side(embed: Callable[[Features], Aggregated], parts: Iterable[Features]) -> Side:
    """Return the samples of all `parts`, embedded by one of the two functions of a model."""
    embeddings, uncertainties, lengths = [], [], []
    for features in parts:
        made = embed(features)
        embeddings.append(each(lambda t: t.float() if t.is_floating_point() else t, made.embedding))
        if (values := uncertainty(made)) is not None:
            uncertainties.append(values)
        lengths.append(features.length.cpu())
    return Side(concatenate(embeddings), torch.cat(uncertainties) if uncertainties else None, torch.cat(lengths))
