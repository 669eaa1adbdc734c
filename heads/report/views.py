"""What the page shows of a run: its split as it embeds it, and how it compares what is there."""

from collections.abc import Sequence as Several
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import torch
from torch import Tensor
from torch.nn import functional

from ...pipeline.cache import CaptionSet, FeatureCache, ImageSet
from ...pipeline.device import pick_device, within_memory
from ..evaluation.scoring import Scores, score_embedded
from ..model import Model
from ..modules.embedding import Embedding, Gaussian, Sequence
from ..modules.padding import zero_padding
from ..runs.features import caption_set_of_run, open_store, split_of_run
from ..runs.run import Run
from .embedded import Embedded, embed_split


@dataclass(frozen=True)
class View:
    """A run on a split.

    Attributes:
        name: of the run, on the page.
        run: the run.
        cache: the store that it is looked at on.
        model: with the weights of the best epoch.
        split: which images and captions.
        embedded: the split.
        scores: how its images and captions compare.
    """

    name: str
    run: Run
    cache: FeatureCache
    model: Model
    split: str
    embedded: Embedded
    scores: Scores

    @property
    def device(self) -> torch.device:
        """Where the model is."""
        return next(self.model.parameters()).device

    @property
    def similarity(self) -> Tensor:
        """Of its images and captions, ``[I, C]``; larger is closer."""
        return self.scores.similarity

    @cached_property
    def image_elements(self) -> Tensor:
        """Unit elements of the images, ``[I, K, D]``; see `elements`."""
        return elements(self.embedded.image.embedding)

    @cached_property
    def caption_elements(self) -> Tensor:
        """Unit elements of the captions, ``[C, K, D]``; see `elements`."""
        return elements(self.embedded.text.embedding)

    @property
    def is_set(self) -> bool:
        """Whether a sample is several elements."""
        return self.image_elements.shape[1] > 1 or self.caption_elements.shape[1] > 1

    @cached_property
    def image_set(self) -> ImageSet:
        """The image features that the run reads."""
        return self.cache.image_set(self.run.info["image_set"])

    @cached_property
    def caption_set(self) -> CaptionSet:
        """The caption features that the run reads."""
        return caption_set_of_run(self.run, self.cache)

    @cached_property
    def found_captions(self) -> Tensor:
        """The best caption of each image, int64 ``[I]``."""
        return self.similarity.argmax(1).cpu()

    @cached_property
    def found_images(self) -> Tensor:
        """The best image of each caption, int64 ``[C]``."""
        return self.similarity.argmax(0).cpu()

    @cached_property
    def image_hits(self) -> Tensor:
        """Whether the best caption of each image is one of its own, bool ``[I]``."""
        return self.embedded.caption_image[self.found_captions] == torch.arange(len(self.found_captions))

    @cached_property
    def caption_hits(self) -> Tensor:
        """Whether the best image of each caption is its own, bool ``[C]``."""
        return self.found_images == self.embedded.caption_image

    def first_caption(self, image: int) -> str:
        """Return the first caption of an image; an empty text where it has none."""
        own = (self.embedded.caption_image == image).nonzero()[:, 0]
        return self.embedded.texts[int(own[0])] if len(own) else ""


def open_views(paths: Several[str | Path], store: str | None, split: str, device: str) -> list[View]:
    """Open runs, embed the split with each and compare its images and captions.

    Args:
        paths: the run folders.
        store: the feature cache to look at all of them on; None: each on the one that it was trained on.
        split: which images and captions.
        device: ``auto``, ``cpu`` or ``cuda``.

    Raises:
        RunError: a run, a store's feature sets or the split do not fit.
        CacheError: there is no store, or it cannot be used.
    """
    target = pick_device(device)
    runs = [Run(path) for path in paths]
    caches = [open_store(run, store) for run in runs]  # before anything takes its time
    views = []
    for run, cache, name in zip(runs, caches, names([run.path for run in runs]), strict=True):
        with within_memory(target):
            model = run.model(target)
            batches = split_of_run(run, cache, split, model, target)
            embedded = embed_split(model, batches)
            scores = score_embedded(model, batches, embedded.image.embedding, embedded.text.embedding)
        views.append(View(name, run, cache, model, split, embedded, scores))
    return views


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
        embedding = functional.normalize(zero_padding(*embedding), dim=-1).sum(1)
    rows = embedding if embedding.ndim == 3 else embedding[:, None]
    return functional.normalize(rows, dim=-1)


def same_samples(views: Several[View]) -> bool:
    """Return whether all runs see the same images and captions, in the same order."""
    seen = [(view.embedded.ids, view.embedded.texts) for view in views]
    return all(one == seen[0] for one in seen)
