"""From the cache to batches: usable samples of a split, shuffled, packed on the host and padded on the device."""

import itertools
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

import numpy as np
import torch
from torch import Tensor

from .cache import OK, CaptionSet, FeatureCache, FeatureSet, ImageSet
from .errors import CacheError

Unit = Literal["image", "caption"]


@dataclass
class Features:
    """Features of one modality, padded, on one device. What was not asked for is None.

    Attributes:
        length: valid local rows, int64 [B].
        local: [B,N,C] in the cache's dtype; padding rows are zero.
        global_: [B,C].
        token: token ids, int64 [B,N].
    """

    length: Tensor
    local: Tensor | None = None
    global_: Tensor | None = None
    token: Tensor | None = None


@dataclass
class Batch:
    """Images and captions that belong to them.

    Attributes:
        images: features of B images.
        captions: features of M captions.
        caption_image: the image of each caption, an index into the batch, int64 [M].
        caption_index: each caption's place in the split's `Batches.caption_rows`, int64 [M], on the CPU.
    """

    images: Features
    captions: Features
    caption_image: Tensor
    caption_index: Tensor

    @property
    def positives(self) -> Tensor:
        """Which caption belongs to which image, bool [B,M]."""
        images = torch.arange(len(self.images.length), device=self.caption_image.device)
        return images[:, None] == self.caption_image[None, :]


class Batches:
    """The usable samples of one split: images and captions that could be read.

    Args:
        cache: the cache.
        image_set: its image features.
        caption_set: its caption features.
        split: which split.
        device: where batches are put.
        image_fields: which of ``local`` and ``global`` to read.
        caption_fields: which of ``local``, ``global`` and ``token`` to read.

    Attributes:
        images: usable images.
        captions: usable captions.
        skipped: failed images and failed captions of good images.
        image_rows: image rows of the cache, int64.
        caption_rows: caption rows of the cache, int64.
        caption_image: index into `image_rows` of each of `caption_rows`, int64.

    Raises:
        CacheError: the split is not there, is not complete, or has no usable sample.
    """

    def __init__(
        self,
        cache: FeatureCache,
        image_set: ImageSet,
        caption_set: CaptionSet,
        split: str,
        *,
        device: str = "cpu",
        image_fields: set[str],
        caption_fields: set[str],
    ) -> None:
        if split not in cache.splits:
            raise CacheError(f"{cache.url} has no split '{split}'; it has {', '.join(cache.splits)}")
        self.image_set, self.caption_set, self.device = image_set, caption_set, device
        self.image_fields, self.caption_fields = image_fields, caption_fields
        for features in (image_set, caption_set):
            _require_complete(features, split)
        images = np.arange(*cache.splits[split])
        self.image_rows = images[image_set.status[images] == OK]
        rows = np.arange(cache.captions)[caption_set.rows_of(split)]
        image_is_good = image_set.status[cache.caption_image[rows]] == OK
        self.caption_rows = rows[image_is_good & (caption_set.status[rows] == OK)]
        self.caption_image = np.searchsorted(self.image_rows, cache.caption_image[self.caption_rows])
        self.images, self.captions = len(self.image_rows), len(self.caption_rows)
        self.skipped = len(images) - self.images + int(image_is_good.sum()) - self.captions
        if not self.captions:
            raise CacheError(f"{cache.url}: split '{split}' has no usable image with a caption")

    def steps(self, unit: Unit, batch_size: int) -> int:
        """Return how many batches an epoch has."""
        return sum(1 for _ in self._orders(unit, batch_size, np.arange(self._items(unit))))

    def epoch(
        self, *, unit: Unit, batch_size: int, seed: int, epoch: int, captions: int | None = None
    ) -> Iterator[Batch]:
        """Yield an epoch's batches in an order that depends on seed and epoch alone.

        Args:
            unit: ``image``: a batch is `batch_size` images with all their captions (SetDiv, section 4.2);
                ``caption``: `batch_size` captions with their images, an image once (VSE++).
            batch_size: how many units.
            seed: of the run.
            epoch: counted from 0.
            captions: with the unit ``image``, how many of an image's captions are drawn; None: all.
        """
        rng = np.random.default_rng([seed, epoch])
        order = rng.permutation(self._items(unit))
        by_image = _ragged(self.caption_image, self.images)
        for units in self._orders(unit, batch_size, order):
            if unit == "image":
                images = units
                chosen = np.concatenate(
                    [
                        by_image[image] if captions is None else rng.permutation(by_image[image])[:captions]
                        for image in units
                    ]
                )
            else:
                images, chosen = np.unique(self.caption_image[units]), units
            index = {image: position for position, image in enumerate(images.tolist())}
            caption_image = torch.tensor([index[i] for i in self.caption_image[chosen].tolist()])
            yield Batch(
                self._images(self.image_rows[images]),
                self._captions(self.caption_rows[chosen]),
                caption_image.to(self.device),
                torch.from_numpy(np.ascontiguousarray(chosen)),
            )

    def image_features(self, batch_size: int) -> Iterator[Features]:
        """Yield the features of all images, in the order of `image_rows`."""
        for start in range(0, self.images, batch_size):
            yield self._images(self.image_rows[start : start + batch_size])

    def caption_features(self, batch_size: int) -> Iterator[Features]:
        """Yield the features of all captions, in the order of `caption_rows`."""
        for start in range(0, self.captions, batch_size):
            yield self._captions(self.caption_rows[start : start + batch_size])

    def _items(self, unit: Unit) -> int:
        return self.images if unit == "image" else self.captions

    def _orders(self, unit: Unit, batch_size: int, order: np.ndarray) -> Iterator[np.ndarray]:
        """Cut `order` into batches; a last batch of one unit, which has no negative, is left out."""
        for start in range(0, len(order), batch_size):
            units = order[start : start + batch_size]
            if len(units) > 1:
                yield units

    def _images(self, rows: np.ndarray) -> Features:
        features = Features(self._put(self.image_set.length[rows].astype(np.int64)))
        if "local" in self.image_fields:
            features.local = self._put(self.image_set.local(rows))
        if "global" in self.image_fields:
            features.global_ = self._put(self.image_set.global_(rows))
        return features

    def _captions(self, rows: np.ndarray) -> Features:
        length = self._put(self.caption_set.length[rows].astype(np.int64))
        features = Features(length)
        if "local" in self.caption_fields:
            features.local = pad(self._put(self.caption_set.local(rows)), length)
        if "token" in self.caption_fields:
            features.token = pad(self._put(self.caption_set.token(rows).astype(np.int64)), length)
        if "global" in self.caption_fields:
            features.global_ = self._put(self.caption_set.global_(rows))
        return features

    def _put(self, values: np.ndarray) -> Tensor:
        return torch.from_numpy(values).to(self.device, non_blocking=True)


def pad(packed: Tensor, length: Tensor) -> Tensor:
    """Lay packed rows out with zeros behind each sample's own.

    Args:
        packed: [sum of lengths, ...].
        length: int64 [B].

    Returns:
        [B, longest, ...].
    """
    longest = int(length.max())
    inside = torch.arange(longest, device=packed.device)[None, :] < length[:, None]
    padded = packed.new_zeros((len(length), longest, *packed.shape[1:]))
    padded[inside] = packed
    return padded


def _ragged(owner: np.ndarray, owners: int) -> list[np.ndarray]:
    """Return the positions in `owner` of each of 0 … owners - 1; `owner` is sorted."""
    bounds = np.searchsorted(owner, np.arange(owners + 1))
    return [np.arange(a, b) for a, b in itertools.pairwise(bounds)]


def _require_complete(features: FeatureSet, split: str) -> None:
    done = features.done()[features.blocks.of_split(split)]
    if not done.all():
        raise CacheError(
            f"{features.cache.url}: split '{split}' of '{features.name}' lacks {int((~done).sum())} of {len(done)}"
            " shards; run the same `xret extract` again"
        )
