"""What a run searches: images and captions of a store, embedded when they are first asked for; and the answers."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import chain
from operator import eq, itemgetter
from pathlib import Path
from typing import Any, TypeVar, overload

import numpy as np
import torch
from torch import Tensor

from ...pipeline.data.images import PictureFile
from ...pipeline.data.sources import PictureReader
from ...pipeline.device import within_memory
from ...pipeline.errors import RunError
from ...pipeline.reading.pictures import find_pictures
from ...pipeline.reading.split import begun_splits, texts_of
from ..evaluation.calibration import Calibration
from ..evaluation.pairs import NOT_FINITE
from ..evaluation.scoring import BATCH, Modality, Ranker, embed_all
from ..modules.embedding import Embedding, Gaussian, concatenate, each

T = TypeVar("T")
_LOOKED_UP = 1 << 14  # texts that are looked up together


@dataclass(frozen=True)
class Hit:
    """One result of a search: an image with its `file_name` below the image folder, or a `caption`, the text.

    `rank` counts from 1, `id` is the image's or the caption's, `score` the run's similarity (larger is closer),
    `probability` that the answer fits, see the module `calibration`, and `uncertainty` that of a Gaussian, see
    `Gaussian.log_determinant`.
    """

    rank: int
    id: str
    score: float
    probability: float | None = None
    file_name: str | None = None
    caption: str | None = None
    uncertainty: float | None = None

    def to_dict(self) -> dict[str, Any]:
        """Return what is known, ready for JSON."""
        return {key: value for key, value in vars(self).items() if value is not None}


def best(rows: np.ndarray, scores: np.ndarray, k: int) -> tuple[np.ndarray, np.ndarray]:
    """Return the k highest of `scores` [N] and their `rows` [N], best first, ties by row; all where N < k.

    RunError where a score is not finite.
    """
    if not np.isfinite(scores).all():
        raise RunError(NOT_FINITE)
    if len(scores) > k:
        kept = scores >= np.partition(scores, -k)[-k]
        rows, scores = rows[kept], scores[kept]
    order = np.lexsort((rows, -scores))[:k]
    return rows[order], scores[order]


def uncertainty(embedding: Embedding) -> Tensor | None:
    """Return the uncertainty of B Gaussians, [B], see `Gaussian.log_determinant`; None for other embeddings."""
    return embedding.log_determinant() if isinstance(embedding, Gaussian) else None


class Searched(ABC):
    """Samples that a run searches, with their embeddings as `images` and, if there are any, `captions`."""

    @abstractmethod
    def names(self, modality: Modality) -> tuple[Sequence[str], Sequence[str]]:
        """Return the ids of a modality, and its file names or texts."""

    @abstractmethod
    def picture(self, row: int) -> PictureFile | Path:
        """Return the content of the image in a row; of a folder of frames, or a missing file, the path."""

    def owners(self, modality: Modality) -> np.ndarray | None:
        """Return the row in the store of the image that each of a modality is or describes; None without a store."""
        return None

    def of(self, modality: Modality) -> Embedding:
        """Return the embeddings of a modality, float32."""
        embedding: Embedding = getattr(self, modality)
        return embedding

    def hits(self, modality: Modality, rows: np.ndarray, scores: np.ndarray, items: Embedding) -> list[Hit]:
        """Return samples of a modality, best first, as hits; `items` are their embeddings."""
        ids, labels = self.names(modality)
        field, spread = "file_name" if modality == "images" else "caption", uncertainty(items)
        spreads = [None] * len(rows) if spread is None else spread.tolist()
        ranked = enumerate(zip(rows.tolist(), scores.tolist(), spreads, strict=True), 1)
        return [
            Hit(rank, ids[row], score, uncertainty=one, **{field: labels[row]}) for rank, (row, score, one) in ranked
        ]

    def best(self, modality: Modality, scores: Tensor, k: int, calibration: Calibration | None = None) -> list[Hit]:
        """Return the k samples of a modality with the largest `scores` [N], best first; see `best`."""
        rows, highest = best(np.arange(len(scores)), scores.cpu().numpy(), k)
        hits = self.hits(modality, rows, highest, each(itemgetter(torch.from_numpy(rows)), self.of(modality)))
        if calibration is None:
            return hits
        probabilities = calibration.probabilities(scores.cpu(), rows).tolist()
        return [replace(hit, probability=one) for hit, one in zip(hits, probabilities, strict=True)]


class Looked(Sequence[T]):
    """Texts, or rows of them, that are looked up when they are asked for; `look` takes ascending places."""

    def __init__(self, size: int, look: Callable[[np.ndarray], list[T]]) -> None:
        self._size, self.look = size, look

    def __len__(self) -> int:
        return self._size

    @overload
    def __getitem__(self, at: int) -> T: ...
    @overload
    def __getitem__(self, at: slice) -> list[T]: ...
    def __getitem__(self, at: int | slice) -> T | list[T]:
        if isinstance(at, slice):
            places = np.arange(*at.indices(self._size))
            return self.look(places) if at.step is None or at.step > 0 else self.look(places[::-1])[::-1]
        return self.look(np.array([range(self._size)[at]]))[0]

    def __iter__(self) -> Iterator[T]:
        return chain.from_iterable(self[first : first + _LOOKED_UP] for first in range(0, self._size, _LOOKED_UP))

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Sequence) and len(self) == len(other) and all(map(eq, self, other))

    __hash__ = None  # type: ignore[assignment]


class Gallery(Searched):
    """The usable images and captions of a store or a split of it, I and C of them, in their order there.

    Attributes:
        ranker: what embeds them.
        splits: whose they are; without a choice all those of which features are there.
        image_ids, file_names: of the images, I.
        caption_ids: the captions' numbers, C; if pictures go by their file names, or numbers stand twice, the id of the
            picture and the caption's place there, ``photo.jpg#0``. A store that grows keeps them.
        texts: the captions, C.
        image_of: gives the rows of the images of captions in some rows.

    Raises:
        RunError: the store has no features of the run's encoders.
        CacheError: the split is unknown, empty or not complete.
    """

    def __init__(self, ranker: Ranker, split: str | None, data_root: Path | None) -> None:
        self.ranker, self._data_root, cache = ranker, data_root, ranker.cache
        self.dataset, self.splits = cache.dataset, [split] if split else begun_splits(*ranker.sets)
        self._batches = batches = ranker.batches(self.splits)
        samples = batches.parts[0]
        images, captions, self.image_of = samples.images, samples.captions, samples.image_of
        self.image_ids, self.file_names = (
            Looked(len(images), lambda at, read=read: texts_of(read, images[at]))  # type: ignore[misc]
            for read in (cache.ids, cache.file_names)
        )
        self.texts = Looked(len(captions), lambda at: texts_of(cache.caption_texts, captions[at]))
        if self._named_by_place():
            (first_image, last_image), edges = (rows[np.array([0, len(rows) - 1])] for rows in (images, captions))
            start, stop = cache.captions_of(int(first_image), int(last_image) + 1)
            all_there = (*edges, len(captions)) == (start, stop - 1, stop - start)

            def numbered(at: np.ndarray) -> list[str]:
                owners = samples.image_of(at)
                rows = images[owners]
                places = at - samples.first_caption[owners] if all_there else captions[at] - cache.caption_start[rows]
                return [
                    f"{owner}#{place}" for owner, place in zip(texts_of(cache.ids, rows), places.tolist(), strict=True)
                ]

        else:

            def numbered(at: np.ndarray) -> list[str]:
                return texts_of(lambda first, last: [*map(str, cache.sentids(first, last).tolist())], captions[at])

        self.caption_ids = Looked(len(captions), numbered)

    def _named_by_place(self) -> bool:
        """Return whether captions have no numbers, each its own, that stay when the store grows."""
        rows, sentids = self._batches.parts[0].captions, self.ranker.cache.sentids
        some = rows[np.arange(min(len(rows), _LOOKED_UP))]
        if len(np.unique(sentids(int(some[0]), int(some[-1]) + 1)[some - some[0]])) < len(some):
            return True
        first, last = rows[np.array([0, len(rows) - 1])].tolist()
        numbers = sentids(first, last + 1)
        if len(rows) < len(numbers):
            numbers = numbers[rows.whole() - first]
        numbers.sort()  # `np.unique` would take 30 bytes a number for its table
        if (numbers[1:] == numbers[:-1]).any():
            return True
        return self.image_ids == self.file_names

    @property
    def caption_image(self) -> np.ndarray:
        """The row of each caption's image, int64 [C]."""
        return self._batches.caption_image

    def rows_of_splits(self) -> dict[str, tuple[int, int]]:
        """Return the rows of images [first, last) of each split."""
        edges, rows = self.ranker.cache.splits, self._batches.parts[0].images
        return {name: tuple(rows.places(np.array(edges[name])).tolist()) for name in self.splits}

    @property
    def part(self) -> str:
        """Which part of the store they are, to stand behind its name; empty where it is the whole."""
        if len(self.splits) == len(self.ranker.cache.splits):
            return ""
        return f", split{'s' * (len(self.splits) > 1)} {' and '.join(self.splits)}"

    @cached_property
    def images(self) -> Embedding:
        """The images' embeddings, float32: [I, D], [I, K, D], or a Gaussian or Sequence of I.

        They are of unit length where their similarity is of cosines, see `Similarity.normalised`.
        """
        return concatenate(list(self.embedded("images")))

    @cached_property
    def captions(self) -> Embedding:
        """The captions' embeddings, float32: [C, D], [C, K, D], or a Gaussian or Sequence of C."""
        return concatenate(list(self.embedded("captions")))

    def embedded(self, modality: Modality) -> Iterator[Embedding]:
        """Yield the embeddings of a modality batch by batch, for galleries that do not fit in memory."""
        model, batches, images = self.ranker.model, self._batches, modality == "images"
        embed = model.embed_images if images else model.embed_captions
        for features in batches.image_features(BATCH) if images else batches.caption_features(BATCH):
            with within_memory(self.ranker.device):
                yield model.compare.normalised(embed_all(embed, [features]))

    def names(self, modality: Modality) -> tuple[Sequence[str], Sequence[str]]:
        """Return the ids of a modality, and its file names or texts."""
        return (self.image_ids, self.file_names) if modality == "images" else (self.caption_ids, self.texts)

    def owners(self, modality: Modality) -> np.ndarray:
        """Return the row in the store of the image that each of a modality is or describes, int64 [I] or [C]."""
        samples = self._batches.parts[0]
        return samples.images.whole() if modality == "images" else samples.images[samples.caption_image]

    @cached_property
    def pictures(self) -> PictureReader:
        """What opens the images by their file names; CacheError or ManifestError where they are missing."""
        return find_pictures(self.ranker.cache, self._data_root)

    def picture(self, row: int) -> PictureFile | Path:
        """Return the content of the image in a row; errors as of `pictures`."""
        return self.pictures.open(self.file_names[row])
