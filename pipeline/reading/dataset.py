"""The features of a split as a torch Dataset, for a training loop of your own."""

from collections.abc import Iterator, Sequence
from functools import cached_property, partial
from itertools import chain
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import Dataset, Sampler, default_collate

from ..data.texts import ranges
from ..errors import CacheError
from ..store import FeatureCache, FeatureSet
from .batches import Unit, cut
from .features import Stored
from .joined_sets import Captions, Images, parts_of
from .placement import Resident
from .prefetch import block_order
from .split import Split, texts_of

Field = Literal["local", "global", "token"]
FIELDS: tuple[Field, ...] = ("local", "global", "token")


class FeatureDataset(Dataset[dict[str, Any]]):
    """The samples of a split that can be used, for a DataLoader.

    With ``unit="caption"``, item i is caption i with its image. An item holds what the feature sets have, of
    ``image_local`` [N, C], ``image_global`` [C], ``text_local`` [M, E], ``text_global`` [E] and ``text_token`` [M]
    (word ids, int64), and ``image_index`` and ``caption_index``, places in `ids` and `texts`. Hand `collate` to a
    DataLoader: it pads rows with zeros and adds ``image_length`` and ``text_length`` [B]. Which caption of a batch is
    which image's: ``image_index[:, None] == image_index``.

    With ``unit="image"``, item i is an image with all its captions: lists of what there is of texts, and of
    ``caption_index``. `collate` puts the captions of all images one after the other, and adds the image of each,
    ``caption_image``, a place in the batch: ``torch.arange(B)[:, None] == caption_image``.

    Of several cached views it reads the first. It can be pickled, and read by worker processes. `batch_sampler` gives
    the order that a disk is read in fastest; training itself reads faster still, see `xret.batches`.

    Args:
        store: a local path or an fsspec URL.
        split: one of the store's.
        image, text: prefix of a feature set's name; ``auto``: the only one there.
        fields: what to read, of ``local``, ``global`` and ``token``; None: all there is.
        unit: what an item is: a ``caption``, or an ``image``, of which a batch then has each once.
        dtype: of features; None: that of the store, which takes half the memory of float32 where it is float16.

    Raises:
        CacheError: there is no such store, set, field or unit, or the split is missing, incomplete or empty.
    """

    def __init__(
        self,
        store: str | Path,
        split: str = "train",
        *,
        image: str = "auto",
        text: str = "auto",
        fields: Field | Sequence[Field] | None = None,
        unit: Unit = "caption",
        dtype: torch.dtype | None = torch.float32,
    ) -> None:
        if unit not in ("caption", "image"):
            raise CacheError(f"unit is '{unit}'; give caption or image")
        cache, self.unit, self.dtype = FeatureCache.open(store), unit, dtype
        again = partial(FeatureDataset, image=image, text=text, fields=fields, unit=unit, dtype=dtype)
        self._again = partial(again, cache.absolute_url, split)
        images, captions = cache.image_set(image), cache.caption_set(text)
        self._split = Split.of(images, captions, split)
        self._count = np.diff(self._split.first_caption)  # captions of each image
        self._with_captions = np.flatnonzero(self._count)
        (of_images,), (of_captions,) = fields_there(images, captions, fields)
        self._images = Stored(images, self._split.images, of_images)
        self._captions = Stored(captions, self._split.captions, of_captions)
        for source in (self._images, self._captions):
            source.place("store", torch.device("cpu"), Resident())

    def __reduce__(self) -> tuple[Any, ...]:
        return self._again, ()

    def __len__(self) -> int:
        return len(self._with_captions if self.unit == "image" else self._split.captions)

    def __getitem__(self, item: int) -> dict[str, Any]:
        return self.__getitems__([item])[0]

    def __getitems__(self, items: Sequence[int]) -> Sequence[dict[str, Any]]:
        """Return several items, which are read together; a DataLoader calls it."""
        numbers = np.asarray(items, dtype=np.int64)
        if len(wrong := numbers[(numbers < -len(self)) | (numbers >= len(self))]):
            raise IndexError(f"item {wrong[0]} of {len(self)}")
        numbers = np.where(numbers < 0, numbers + len(self), numbers)
        if self.unit == "caption":
            images, captions = self._split.caption_image[numbers], numbers
        else:
            images = self._with_captions[numbers]
            captions = ranges(self._split.first_caption[images], self._count[images])
        batch = {"image_index": torch.from_numpy(images), "caption_index": torch.from_numpy(captions)}
        batch |= self._padded("image", self._images, images) | self._padded("text", self._captions, captions)
        if self.unit == "image":
            owner = np.repeat(np.arange(len(images)), self._count[images])
            batch["caption_image"] = torch.from_numpy(owner)
        return _Items(batch)

    def _padded(self, side: str, source: Stored, samples: np.ndarray) -> dict[str, Tensor]:
        features = source.fetch(samples)()
        there = {"local": features.local, "global": features.global_, "token": features.token}
        batch, longest = {}, int(features.length.max()) if len(samples) else 0
        for name, values in there.items():
            if values is not None:
                values = values.to(self.dtype) if values.is_floating_point() and self.dtype else values
                batch[f"{side}_{name}"] = values if name == "global" else values[:, :longest]
                if name != "global":
                    batch[f"{side}_length"] = features.length
        return batch

    @staticmethod
    def collate(items: Sequence[dict[str, Any]]) -> dict[str, Tensor]:
        """Return items as a batch; see the class."""
        if isinstance(items, _Items):
            return items.batch
        batch: dict[str, Tensor] = {}
        for key in items[0]:
            values = [item[key] for item in items]
            side, _, field = key.partition("_")
            if isinstance(values[0], list):
                batch["caption_image"] = torch.arange(len(items)).repeat_interleave(torch.tensor([*map(len, values)]))
                values = [*chain(*values)]
            if field in ("local", "token"):
                batch[key] = pad_sequence(values, batch_first=True)
                batch[f"{side}_length"] = torch.tensor([len(value) for value in values])
            else:
                batch[key] = default_collate(values)
        return batch

    def batch_sampler(self, batch_size: int, *, seed: int = 0) -> "BlockSampler":
        """Return batches of items for ``DataLoader(dataset, batch_sampler=…, collate_fn=dataset.collate)``.

        Blocks of neighbours in the store are drawn, some thousand samples at a time, and of these the items, so that a
        store that is larger than the memory is read once an epoch, and not in many small pieces.
        """
        edges = self._split.blocks()
        by_item = self._with_captions if self.unit == "image" else self._split.caption_image
        return BlockSampler(np.diff(np.searchsorted(by_item, edges)), batch_size, seed)

    @cached_property
    def ids(self) -> list[str]:
        """The ids of the images, by ``image_index``."""
        return texts_of(self._split.image_set.cache.ids, self._split.image_rows)

    @cached_property
    def texts(self) -> list[str]:
        """The captions, by ``caption_index``."""
        return texts_of(self._split.image_set.cache.caption_texts, self._split.caption_rows)


def fields_there(
    images: Images, captions: Captions, fields: Field | Sequence[Field] | None = None
) -> list[tuple[set[str], ...]]:
    """Return which of the fields each set of images has, and each of captions; None: all.

    CacheError: no set has a field that is named.
    """
    sides: tuple[Sequence[FeatureSet], ...] = parts_of(images), parts_of(captions)
    fields = [fields] if isinstance(fields, str) else fields
    there = [tuple(set[str](FIELDS).intersection(part.array_names) for part in side) for side in sides]
    for field in fields or ():
        if not any(field in names for side in there for names in side):
            raise CacheError(
                f"neither {images.name} nor {captions.name} of {images.cache.url} has the field '{field}'; of local,"
                " global and token name what they have"
            )
    return [tuple(names & set(fields or FIELDS) for names in side) for side in there]


class _Items(Sequence[dict[str, Any]]):
    """Items that were read together: `batch` is what `FeatureDataset.collate` returns of them."""

    def __init__(self, batch: dict[str, Tensor]) -> None:
        self.batch = batch

    def __len__(self) -> int:
        return len(self.batch["image_index"])

    def __getitem__(self, at: Any) -> Any:
        if isinstance(at, slice):
            return [self[number] for number in range(len(self))[at]]
        at, owner = range(len(self))[at], self.batch.get("caption_image")
        item: dict[str, Any] = {}
        for key, values in self.batch.items():
            side, _, field = key.partition("_")
            if field == "length" or key == "caption_image":
                continue
            several = owner is not None and side != "image"
            samples = (owner == at).nonzero()[:, 0].tolist() if several else [at]
            read: list[Any] = [int(values[sample]) if field == "index" else values[sample] for sample in samples]
            if field in ("local", "token"):
                lengths = self.batch[f"{side}_length"]
                read = [rows[: lengths[sample]] for rows, sample in zip(read, samples, strict=True)]
            item[key] = read if several else read[0]
        return item


class BlockSampler(Sampler[list[int]]):
    """Batches of items from shuffled blocks, in an order that follows from seed and epoch; each pass is an epoch.

    A last batch of one item, which has no negative, is left out.
    """

    def __init__(self, sizes: np.ndarray, batch_size: int, seed: int) -> None:
        """Take the items in each block, which follow one another."""
        if batch_size < 2:
            raise CacheError(f"batch_size is {batch_size}; give at least 2, because one item has no negative")
        self.sizes, self.batch_size, self.seed, self.epoch = sizes, batch_size, seed, 0

    def set_epoch(self, epoch: int) -> None:
        """Let the next pass be this epoch."""
        self.epoch = epoch

    def __len__(self) -> int:
        return sum(1 for _ in cut(range(self.sizes.sum()), self.batch_size))

    def __iter__(self) -> Iterator[list[int]]:
        order, _ = block_order(self.sizes, np.random.default_rng([self.seed, self.epoch]))
        self.epoch += 1
        return (items.tolist() for items in cut(order, self.batch_size))
