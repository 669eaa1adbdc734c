"""A run and the split that it has embedded, for those who look into it."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import torch
from torch import Tensor
from torch.nn import functional

from ...pipeline.device import pick_device, within_memory
from ...pipeline.reading.batches import Batches
from ...pipeline.reading.features import Features
from ..model import Model
from ..modules.aggregators import Aggregated
from ..modules.embedding import Embedding, Gaussian, Sequence
from ..modules.padding import mean_rows
from ..runs.features import batches_of
from ..runs.run import Run
from .rankers import Ranker, open_rankers
from .scoring import BATCH, Scores, embed_all, score_embedded


@dataclass(frozen=True)
class Side:
    """One modality of a split.

    Attributes:
        embedding: of B samples, float32.
        uncertainty: the log-determinant of each sample's covariance, ``[B]``; None without Gaussians.
        length: valid local rows, or tokens, of each sample, int64 ``[B]`` on the CPU.
    """

    embedding: Embedding
    uncertainty: Tensor | None
    length: Tensor

    @cached_property
    def elements(self) -> Tensor:
        """Unit elements, ``[B, K, D]``: a vector, a Gaussian's mean and the mean of a sequence's unit rows are one."""
        embedding = self.embedding
        if isinstance(embedding, Gaussian):
            embedding = embedding.mean
        elif isinstance(embedding, Sequence):
            embedding = mean_rows(functional.normalize(embedding.rows, dim=-1), embedding.length)
        return functional.normalize(embedding if embedding.ndim == 3 else embedding[:, None], dim=-1)


@dataclass(frozen=True)
class EmbeddedRun:
    """A run on a split.

    Attributes:
        run: the run.
        ranker: the run on its store.
        model: with the weights of the best epoch.
        split: which images and captions.
        batches: their features.
        image, text: as the run embeds them.
        scores: how they compare.
    """

    run: Run
    ranker: Ranker
    model: Model
    split: str
    batches: Batches
    image: Side
    text: Side
    scores: Scores

    @property
    def device(self) -> torch.device:
        """Where the model is."""
        return self.scores.similarity.device

    @property
    def is_set(self) -> bool:
        """Whether a sample is several elements."""
        return self.image.elements.shape[1] > 1 or self.text.elements.shape[1] > 1


def embed_run(path: str | Path, store: str | None, split: str, device: str) -> EmbeddedRun:
    """Open a run, embed a split with it and compare its images and captions.

    Args:
        path: the run folder.
        store: the feature cache to look at it on; None: the one that it was trained on.
        split: which images and captions.
        device: ``auto``, ``cpu`` or ``cuda``.

    Raises:
        RunError: the run, the store's feature sets or the split do not fit.
        CacheError: the store is missing or cannot be used.
    """
    target, run = pick_device(device), Run(path)
    (ranker,) = open_rankers([path], store)
    with within_memory(target):
        model = run.model(target)
        batches = batches_of(ranker.sets, model, split, target)
        image = embed_side(model.embed_images, batches.image_features(BATCH))
        text = embed_side(model.embed_captions, batches.caption_features(BATCH))
        scores = score_embedded(model, batches, image.embedding, text.embedding)
    return EmbeddedRun(run, ranker, model, split, batches, image, text, scores)


def embed_side(embed: Callable[[Features], Aggregated], parts: Iterable[Features]) -> Side:
    """Return the samples of all `parts`, embedded by `Model.embed_images` or `Model.embed_captions`."""
    uncertainties, lengths = [], []

    def noted(features: Features) -> Aggregated:
        made = embed(features)
        # That of sets drawn from a Gaussian is the Gaussian's.
        gaussian = made.embedding if isinstance(made.embedding, Gaussian) else made.gaussian
        if gaussian is not None:
            uncertainties.append(gaussian.log_determinant())
        lengths.append(features.rows.cpu())
        return made

    embedding = embed_all(noted, parts)
    return Side(embedding, torch.cat(uncertainties) if uncertainties else None, torch.cat(lengths))
