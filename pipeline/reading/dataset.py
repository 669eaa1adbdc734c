"""The features of a split as a map-style torch Dataset, for a training loop of one's own."""

from collections.abc import Sequence
from functools import cached_property, partial
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import Dataset, default_collate

from ..errors import CacheError
from ..store import FeatureCache, FeatureSet
from .features import Features, Stored
from .joined_sets import Captions, Images, parts_of
from .placement import Resident
from .split import Split, texts_of

Field = Literal["local", "global", "token"]
FIELDS: tuple[Field, ...] = ("local", "global", "token")


class FeatureDataset(Dataset[dict[str, Any]]):
    """The pairs of a split that can be used: item i is caption i with its image.

    An item holds what the feature sets have, of ``image_local`` [N, C], ``image_global`` [C], ``text_local`` [M, E],
    ``text_global`` [E] (float32) and ``text_token`` [M] (word ids, int64), and ``image_index`` and ``caption_index``,
    places in `ids` and `texts`. Hand `collate` to a DataLoader: it pads rows with zeros and adds ``image_length`` and
    ``text_length`` [B]. Which caption of a batch is which image's: ``image_index[:, None] == image_index``. Of several
    cached views it reads the first.

    It can be pickled, and read by worker processes. Training itself reads faster, see `xret.batches`.

    Args:
        store: a local path or an fsspec URL.
        split: one of the store's.
        image, text: prefix of a feature set's name; ``auto``: the only one there.
        fields: what to read, of ``local``, ``global`` and ``token``; None: all there is.

    Raises:
        CacheError: there is no such store, set or field, or the split is missing, incomplete or empty.
    """

    def __init__(
        self,
        store: str | Path,
        split: str = "train",
        *,
        image: str = "auto",
        text: str = "auto",
        fields: Sequence[Field] | None = None,
    ) -> None:
        cache = FeatureCache.open(store)
        self._again = partial(FeatureDataset, cache.absolute_url, split, image=image, text=text, fields=fields)
        images, captions = cache.image_set(image), cache.caption_set(text)
        self._split = Split.of(images, captions, split)
        (of_images,), (of_captions,) = fields_there(images, captions, fields)
        self._images = Stored(images, self._split.image_rows, of_images)
        self._captions = Stored(captions, self._split.caption_rows, of_captions)
        for source in (self._images, self._captions):
            source.place("store", torch.device("cpu"), Resident())

    def __reduce__(self) -> tuple[Any, ...]:
        return self._again, ()

    def __len__(self) -> int:
        return len(self._split.caption_rows)

    def __getitem__(self, item: int) -> dict[str, Any]:
        if not -len(self) <= item < len(self):
            raise IndexError(f"item {item} of {len(self)}")
        return self.__getitems__([item % len(self)])[0]

    def __getitems__(self, items: Sequence[int]) -> list[dict[str, Any]]:
        """Return several items, which are read together; a DataLoader calls it."""
        captions = np.asarray(items, dtype=np.int64)
        images = self._split.caption_image[captions]
        read = {"image": self._images.fetch(images)(), "text": self._captions.fetch(captions)()}
        numbers = zip(images.tolist(), captions.tolist(), strict=True)
        found = [{"image_index": image, "caption_index": caption} for image, caption in numbers]
        for side, features in read.items():
            for at, item in enumerate(found):
                item.update(_of_sample(side, features, at))
        return found

    @staticmethod
    def collate(items: Sequence[dict[str, Any]]) -> dict[str, Tensor]:
        """Return items as a batch; see the class."""
        batch: dict[str, Tensor] = {}
        for key in items[0]:
            values = [item[key] for item in items]
            side, _, field = key.partition("_")
            if field in ("local", "token"):
                batch[key] = pad_sequence(values, batch_first=True)
                batch[f"{side}_length"] = torch.tensor([len(value) for value in values])
            else:
                batch[key] = default_collate(values)
        return batch

    @cached_property
    def ids(self) -> list[str]:
        """The ids of the images, by ``image_index``."""
        return texts_of(self._split.image_set.cache.ids, self._split.image_rows)

    @cached_property
    def texts(self) -> list[str]:
        """The captions, by ``caption_index``."""
        return texts_of(self._split.image_set.cache.caption_texts, self._split.caption_rows)


def fields_there(
    images: Images, captions: Captions, fields: Sequence[Field] | None = None
) -> list[tuple[set[str], ...]]:
    """Return which of the fields each set of images has, and each of captions; None: all.

    CacheError: no set has a field that is named.
    """
    sides: tuple[Sequence[FeatureSet], ...] = parts_of(images), parts_of(captions)
    there = [tuple(set[str](FIELDS).intersection(part.array_names) for part in side) for side in sides]
    for field in fields or ():
        if not any(field in names for side in there for names in side):
            raise CacheError(
                f"neither {images.name} nor {captions.name} of {images.cache.url} has the field '{field}'; of local,"
                " global and token name what they have"
            )
    return [tuple(names & set(fields or FIELDS) for names in side) for side in there]


def _of_sample(side: str, features: Features, at: int) -> dict[str, Tensor]:
    length = int(features.length[at])
    fields = {"local": features.local, "global": features.global_, "token": features.token}
    found = {f"{side}_{name}": values[at] for name, values in fields.items() if values is not None}
    found = {key: values[:length] if not key.endswith("global") else values for key, values in found.items()}
    return {key: values.float() if values.is_floating_point() else values for key, values in found.items()}
