"""The gallery of a run: the images and captions of a split of a store, embedded when they are first asked for."""

from abc import ABC, abstractmethod
from collections.abc import Iterator
from functools import cached_property
from operator import itemgetter
from pathlib import Path

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from ...pipeline.data.images import PictureFile
from ...pipeline.data.sources import PictureReader
from ...pipeline.device import within_memory
from ...pipeline.reading.reattachment import find_pictures
from ...pipeline.store import FeatureCache
from ..evaluation.scoring import BATCH, embed_all
from ..model import Model
from ..modules.embedding import Embedding, concatenate, each
from ..runs.features import split_of_run
from ..runs.run import Run
from .hits import Hit, Modality, best, hits_of


class Searched(ABC):
    """Samples that a run searches."""

    @abstractmethod
    def of(self, modality: Modality) -> Embedding:
        """Return the embeddings of a modality."""

    @abstractmethod
    def names(self, modality: Modality) -> tuple[list[str], list[str]]:
        """Return the ids of a modality, and its file names or texts."""

    @abstractmethod
    def picture(self, row: int) -> PictureFile | Path:
        """Return the content of the image in a row; of a folder of frames, or a missing file, the path."""

    def hits(self, modality: Modality, rows: np.ndarray, scores: np.ndarray, items: Embedding) -> list[Hit]:
        """Return samples of a modality, best first, as hits; `items` are their embeddings."""
        ids, labels = ([texts[row] for row in rows] for texts in self.names(modality))
        return hits_of(modality, ids, labels, scores, items)

    def best(self, modality: Modality, scores: Tensor, k: int) -> list[Hit]:
        """Return the k samples of a modality with the largest `scores` [N], best first; see `hits.best`."""
        rows, highest = best(np.arange(len(scores)), scores.cpu().numpy(), k)
        return self.hits(modality, rows, highest, each(itemgetter(torch.from_numpy(rows)), self.of(modality)))

    def best_of_elements(self, modality: Modality, elements: Tensor, k: int) -> list[list[Hit]]:
        """Return for each of K elements [K, D] the samples, which are sets, that have the element nearest to it.

        The score is the largest cosine of the element with those of the sample.
        """
        items, elements = self.of(modality), functional.normalize(elements, dim=-1)
        assert isinstance(items, Tensor)
        slots = functional.normalize(items, dim=-1).unbind(1)
        scores = torch.stack([torch.einsum("kd,nd->nk", elements, slot) for slot in slots]).amax(0)
        return [self.best(modality, column, k) for column in scores.unbind(1)]


class Gallery(Searched):
    """The usable images and captions of a split, I and C of them, in the order of the store.

    Args:
        run: the run.
        model: its model, on `device`.
        cache: the store.
        split: whose samples.
        device: where the embeddings are.
        data_root: finds the image files, see `reattachment.find_pictures`; needed for `picture` only.

    Attributes:
        dataset: the name of the data set.
        split: as given.
        image_ids: as the store has them, I.
        file_names: of the images below their folder, I.
        caption_ids: the captions' numbers, as text, C; their rows in the store where numbers stand twice.
        texts: the captions, C.
        caption_image: the row of each caption's image, int64 [C].

    Raises:
        RunError: the store has no features of the run's encoders.
        CacheError: the split is unknown, empty or not complete.
    """

    def __init__(
        self, run: Run, model: Model, cache: FeatureCache, split: str, device: torch.device, data_root: Path | None
    ) -> None:
        self._model, self._cache, self._device, self._data_root = model, cache, device, data_root
        self._batches = batches = split_of_run(run, cache, split, model, device)
        self.dataset, self.split = cache.dataset, split
        self.image_ids, self.file_names, self.texts = batches.ids(), batches.file_names(), batches.texts()
        begin, end = int(batches.caption_rows[0]), int(batches.caption_rows[-1]) + 1
        numbers = cache.sentids(begin, end)[batches.caption_rows - begin]
        if len(np.unique(numbers)) < len(numbers):  # a source that numbers the captions of each image separately
            numbers = batches.caption_rows
        self.caption_ids = [str(number) for number in numbers]
        self.caption_image: np.ndarray = batches.caption_image

    @cached_property
    def images(self) -> Embedding:
        """The images' embeddings, float32: [I, D], [I, K, D], or a Gaussian or Sequence of I."""
        return concatenate(list(self.embedded("images")))

    @cached_property
    def captions(self) -> Embedding:
        """The captions' embeddings, float32: [C, D], [C, K, D], or a Gaussian or Sequence of C."""
        return concatenate(list(self.embedded("captions")))

    def of(self, modality: Modality) -> Embedding:
        """Return the embeddings of a modality."""
        return self.images if modality == "images" else self.captions

    def embedded(self, modality: Modality) -> Iterator[Embedding]:
        """Yield the embeddings of a modality batch by batch, for galleries that do not fit in memory."""
        if modality == "images":
            embed, parts = self._model.embed_images, self._batches.image_features(BATCH)
        else:
            embed, parts = self._model.embed_captions, self._batches.caption_features(BATCH)
        for features in parts:
            with within_memory(self._device):
                yield embed_all(embed, [features])

    def names(self, modality: Modality) -> tuple[list[str], list[str]]:
        """Return the ids of a modality, and its file names or texts."""
        return (self.image_ids, self.file_names) if modality == "images" else (self.caption_ids, self.texts)

    @cached_property
    def pictures(self) -> PictureReader:
        """What opens the images by their file names; CacheError or ManifestError where they are missing."""
        return find_pictures(self._cache, self._data_root)

    def picture(self, row: int) -> PictureFile | Path:
        """Return the content of the image in a row; errors as of `pictures`."""
        return self.pictures.open(self.file_names[row])
