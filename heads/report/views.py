"""What the page shows of a run: its split as it embeds it, and how it compares what is there."""

from collections.abc import Callable, Iterable
from collections.abc import Sequence as Several
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Literal

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from ...pipeline.device import pick_device, within_memory
from ...pipeline.reading.batches import Batches
from ...pipeline.reading.features import Features
from ...pipeline.reading.joined_sets import are_upright
from ...pipeline.store import FeatureCache
from ..evaluation.scoring import BATCH, Scores, embed_all, score_embedded
from ..model import Model
from ..modules.aggregators import Aggregated
from ..modules.embedding import Embedding, Gaussian, Sequence
from ..modules.padding import mean_rows
from ..runs.features import open_store, split_of_run
from ..runs.run import Run

Direction = Literal["image_to_text", "text_to_image"]


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


@dataclass(frozen=True)
class Way:
    """One direction of retrieval: Q samples ask, M samples are found.

    Attributes:
        similarity: ``[Q, M]``; larger is closer.
        query_image: the image that each query is or describes, int64 ``[Q]``.
        item_image: likewise of each item, int64 ``[M]``; an item of the query's image is right.
        query_elements: unit elements, ``[Q, K, D]``; see `elements`.
        item_elements: likewise.
    """

    similarity: Tensor
    query_image: np.ndarray
    item_image: np.ndarray
    query_elements: Tensor
    item_elements: Tensor

    @cached_property
    def queries(self) -> np.ndarray:
        """The queries that ask; images without a caption ask nothing."""
        return np.flatnonzero(np.isin(self.query_image, self.item_image))

    @cached_property
    def found(self) -> np.ndarray:
        """The best item of each query, int64 ``[Q]``."""
        return self.similarity.argmax(1).cpu().numpy()

    @cached_property
    def hits(self) -> np.ndarray:
        """Whether the best item of each query is right, bool ``[Q]``."""
        right: np.ndarray = self.query_image == self.item_image[self.found]
        return right

    def right(self, query: int) -> tuple[int, int]:
        """Return the best right item of a query, and its rank from 1, equal scores in the order of the store."""
        scores = self.similarity[query].cpu().numpy()
        own = np.flatnonzero(self.item_image == self.query_image[query])
        best = int(own[scores[own].argmax()])
        return best, 1 + int((scores > scores[best]).sum() + (scores[:best] == scores[best]).sum())


@dataclass(frozen=True)
class View:
    """A run on a split.

    Attributes:
        name: of the run, on the page.
        run: the run.
        cache: the store that it is looked at on.
        model: with the weights of the best epoch.
        split: which images and captions.
        batches: their features.
        image, text: as the run embeds them.
        scores: how they compare.
    """

    name: str
    run: Run
    cache: FeatureCache
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
    def upright(self) -> bool:
        """Whether its images were turned as their EXIF orientations say."""
        return are_upright(self.batches.image_set)

    @cached_property
    def image_elements(self) -> Tensor:
        """Unit elements of the images, ``[I, K, D]``; see `elements`."""
        return elements(self.image.embedding)

    @cached_property
    def caption_elements(self) -> Tensor:
        """Unit elements of the captions, ``[C, K, D]``; see `elements`."""
        return elements(self.text.embedding)

    @property
    def is_set(self) -> bool:
        """Whether a sample is several elements."""
        return self.image_elements.shape[1] > 1 or self.caption_elements.shape[1] > 1

    @cached_property
    def ways(self) -> dict[Direction, Way]:
        """Both directions."""
        owner, scores = self.scores.caption_image.numpy(), self.scores.similarity
        images, left, right = np.arange(len(scores)), self.image_elements, self.caption_elements
        return {
            "image_to_text": Way(scores, images, owner, left, right),
            "text_to_image": Way(scores.T, owner, images, right, left),
        }

    def first_caption(self, image: int) -> str:
        """Return the first caption of an image; an empty text where it has none."""
        own = (self.scores.caption_image == image).nonzero()[:, 0]
        return self.scores.texts[int(own[0])] if len(own) else ""


def open_views(paths: Several[str | Path], store: str | None, split: str, device: str) -> list[View]:
    """Open runs, embed the split with each and compare its images and captions.

    Args:
        paths: the run folders.
        store: the feature cache to look at all of them on; None: each on the one that it was trained on.
        split: which images and captions.
        device: ``auto``, ``cpu`` or ``cuda``.

    Raises:
        RunError: a run, a store's feature sets or the split do not fit.
        CacheError: a store is missing or cannot be used.
    """
    target = pick_device(device)
    runs = [Run(path) for path in paths]
    caches = [open_store(run, store) for run in runs]  # before anything takes its time
    views = []
    for run, cache, name in zip(runs, caches, names([run.path for run in runs]), strict=True):
        with within_memory(target):
            model = run.model(target)
            batches = split_of_run(run, cache, split, model, target)
            image = embed_side(model.embed_images, batches.image_features(BATCH))
            text = embed_side(model.embed_captions, batches.caption_features(BATCH))
            scores = score_embedded(model, batches, image.embedding, text.embedding)
        views.append(View(name, run, cache, model, split, batches, image, text, scores))
    return views


def embed_side(embed: Callable[[Features], Aggregated], parts: Iterable[Features]) -> Side:
    """Return the samples of all `parts`, embedded by `Model.embed_images` or `Model.embed_captions`."""
    uncertainties, lengths = [], []

    def noted(features: Features) -> Aggregated:
        made = embed(features)
        # Of sets drawn from a Gaussian it is the Gaussian's.
        gaussian = made.embedding if isinstance(made.embedding, Gaussian) else made.gaussian
        if gaussian is not None:
            uncertainties.append(gaussian.log_determinant())
        lengths.append(features.rows.cpu())
        return made

    embedding = embed_all(noted, parts)
    return Side(embedding, torch.cat(uncertainties) if uncertainties else None, torch.cat(lengths))


def names(paths: Several[Path]) -> list[str]:
    """Return short names that tell the runs apart: their folders', with as many parents as that takes."""
    whole = [path.resolve() for path in paths]
    for parts in range(1, 1 + max(len(path.parts) for path in whole)):
        short = ["/".join(path.parts[-parts:]) for path in whole]
        if len(set(short)) == len(set(whole)):
            break
    again = {path: whole.count(path) > 1 for path in whole}
    return [
        f"{name} ({n + 1})" if again[path] else name for n, (name, path) in enumerate(zip(short, whole, strict=True))
    ]


def elements(embedding: Embedding) -> Tensor:
    """Return the unit elements of B samples, ``[B, K, D]``.

    A vector is one element; so is the mean of a Gaussian, and the mean of the unit rows of a sequence.
    """
    if isinstance(embedding, Gaussian):
        embedding = embedding.mean
    elif isinstance(embedding, Sequence):
        embedding = mean_rows(functional.normalize(embedding.rows, dim=-1), embedding.length)
    rows = embedding if embedding.ndim == 3 else embedding[:, None]
    return functional.normalize(rows, dim=-1)


def same_samples(views: Several[View]) -> bool:
    """Return whether all runs see the same images and captions, in the same order."""
    seen = [(view.scores.ids, view.scores.texts) for view in views]
    return all(one == seen[0] for one in seen)
