"""From the cache to batches: usable samples of a split, shuffled, in the order that training or evaluation wants."""

import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Literal

import numpy as np
import torch
from torch import Tensor

from ..cache import OK, CaptionSet, FeatureCache, FeatureSet, ImageSet
from ..cache.rows import ranges
from ..errors import CacheError
from ..wording import counted
from .columns import Placement, Resident, choose
from .features import Features, Fetched, JoinedSide, Side, StoredSide
from .prefetch import RUN, block_order, opened_ahead, read_ahead

Unit = Literal["image", "caption"]


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


@dataclass(frozen=True)
class _Plan:
    """What a batch holds: images and captions of the split, and the image of each caption among the batch's."""

    images: np.ndarray
    captions: np.ndarray
    caption_image: np.ndarray


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
        placement: where the features lie meanwhile, see `placement.choose`. What is read once and in order had best
            stay ``mapped``.
        resident: what others have put into memory already, and what is put there now.

    Attributes:
        images: usable images.
        captions: usable captions.
        skipped: failed images and failed captions of good images.
        image_rows: image rows of the cache, int64.
        caption_rows: caption rows of the cache, int64.
        caption_image: index into `image_rows` of each of `caption_rows`, int64.
        placement: where the features lie; never ``auto``.
        shuffled: how an epoch mixes its samples, in words.
        waited: seconds that the host waited for the batches of the latest epoch.

    Raises:
        CacheError: the split is not there, is not complete, or has no usable sample.
        RunError: it does not fit where `placement` puts it.
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
        placement: Placement = "mapped",
        resident: Resident | None = None,
    ) -> None:
        if split not in cache.splits:
            raise CacheError(f"{cache.url} has no split '{split}'; it has {', '.join(cache.splits)}")
        self.image_set, self.caption_set, self.device = image_set, caption_set, torch.device(device)
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

        sides = self._stored = (
            StoredSide(image_set, self.image_rows, image_fields, self.device),
            StoredSide(caption_set, self.caption_rows, caption_fields, self.device),
        )
        counts = f"{counted(self.images, 'image')} and {counted(self.captions, 'caption')}"
        what = f"the features of {counts} ({cache.dataset}, {split})"
        size = 0 if placement in ("mapped", "stream") else sum(side.nbytes for side in sides)
        shared = Resident() if resident is None else resident

        def there(place: Placement) -> int:
            return sum(side.there(place, shared) for side in sides)

        self.placement = choose(placement, size, self.device, cache.store.is_local, what, there)
        for side in sides:
            side.place(self.placement, shared)
        self._images: Side = sides[0]
        self._captions: Side = sides[1]
        self._by_shard = not cache.store.is_local  # which are read whole, and so had best be finished with
        blocks = f"shards of {image_set.blocks.length} images" if self._by_shard else f"runs of {RUN} neighbours"
        self.shuffled = f"in groups of {blocks}" if self.placement == "stream" else "as a whole"
        self._block = image_set.blocks.shard_of(self.image_rows) if self._by_shard else np.arange(self.images) // RUN
        self._prepare([self])

    @property
    def parts(self) -> "tuple[Batches, ...]":
        """The data sets that these samples come from, one after the other."""
        return (self,)

    def ids(self) -> list[str]:
        """Return the ids of the images."""
        return [found for part in self.parts for found in _some(part.image_set.cache.ids, part.image_rows)]

    def file_names(self) -> list[str]:
        """Return the images' file names, below their manifest's folder."""
        return [found for part in self.parts for found in _some(part.image_set.cache.file_names, part.image_rows)]

    def texts(self) -> list[str]:
        """Return the texts of the captions."""
        return [found for part in self.parts for found in _some(part.image_set.cache.caption_texts, part.caption_rows)]

    def _prepare(self, parts: "Sequence[Batches]") -> None:
        """Note where the captions of each image begin, and the samples of each of `parts`."""
        self.waited = 0.0
        self._first_caption = np.searchsorted(self.caption_image, np.arange(self.images + 1))
        self._part_starts = {
            "image": np.cumsum([0] + [part.images for part in parts]),
            "caption": np.cumsum([0] + [part.captions for part in parts]),
        }

    def steps(self, unit: Unit, batch_size: int) -> int:
        """Return how many batches an epoch has."""
        return sum(1 for _ in _cut(np.arange(self._units(unit)), batch_size))

    def epoch(
        self, *, unit: Unit, batch_size: int, seed: int, epoch: int, captions: int | None = None, first: int = 0
    ) -> Iterator[Batch]:
        """Yield an epoch's batches in an order that depends on seed and epoch alone, and read the next ones meanwhile.

        Every unit comes once. Its place is drawn from all places; in ``stream`` from those of a group of blocks.
        Elsewhere the batches are the same, number by number, wherever the features lie. A last batch of a single unit,
        which has no negative, is left out.

        Args:
            unit: ``image``: a batch is `batch_size` images with all their captions (SetDiv, section 4.2);
                ``caption``: `batch_size` captions with their images, an image once (VSE++).
            batch_size: how many units.
            seed: of the run.
            epoch: counted from 0.
            captions: with the unit ``image``, how many of an image's captions are drawn; None: all.
            first: the batch to begin with; of those before it nothing is read.
        """
        rng = np.random.default_rng([seed, epoch])
        groups: list[np.ndarray] = []
        if self.placement == "stream":
            order, groups = block_order(self._block if unit == "image" else self._block[self.caption_image], rng)
        else:
            order = rng.permutation(self._units(unit))
        plans: Iterator[_Plan] = islice(self._plans(unit, order, batch_size, captions, rng), first, None)
        if groups and self._by_shard:
            plans = opened_ahead(self._open, plans, lambda plan: self._block[plan.images], groups)
        batches = read_ahead(self._fetch, self._finish, plans, self.device)
        self.waited = 0.0
        while True:
            began = time.perf_counter()
            batch = next(batches, None)
            self.waited += time.perf_counter() - began
            if batch is None:
                return
            yield batch

    def image_features(self, batch_size: int) -> Iterator[Features]:
        """Yield the features of all images, in the order of `image_rows`."""
        parts = (np.arange(self.images)[start : start + batch_size] for start in range(0, self.images, batch_size))
        return read_ahead(self._images.fetch, lambda _, fetched: self._images.finish(fetched), parts, self.device)

    def caption_features(self, batch_size: int) -> Iterator[Features]:
        """Yield the features of all captions, in the order of `caption_rows`."""
        parts = (np.arange(self.captions)[start : start + batch_size] for start in range(0, self.captions, batch_size))
        return read_ahead(self._captions.fetch, lambda _, fetched: self._captions.finish(fetched), parts, self.device)

    def _units(self, unit: Unit) -> int:
        return self.images if unit == "image" else self.captions

    def _plans(
        self, unit: Unit, order: np.ndarray, batch_size: int, captions: int | None, rng: np.random.Generator
    ) -> Iterator[_Plan]:
        first = self._first_caption
        for drawn in _cut(order, batch_size):
            part = np.searchsorted(self._part_starts[unit], drawn, side="right")
            units = drawn[np.argsort(part, kind="stable")]  # joined data sets one after the other
            if unit == "caption":
                images, caption_image = np.unique(self.caption_image[units], return_inverse=True)
                yield _Plan(images, units, caption_image)
                continue
            count = first[units + 1] - first[units]
            chosen = ranges(first[units], count)
            if captions is not None:
                bounds = np.cumsum(count)[:-1]
                chosen = np.concatenate([rng.permutation(own)[:captions] for own in np.split(chosen, bounds)])
                count = np.minimum(count, captions)
            yield _Plan(units, chosen, np.repeat(np.arange(len(units)), count))

    def _fetch(self, plan: _Plan) -> tuple[list[Fetched], list[Fetched]]:
        return self._images.fetch(plan.images), self._captions.fetch(plan.captions)

    def _finish(self, plan: _Plan, fetched: tuple[list[Fetched], list[Fetched]]) -> Batch:
        return Batch(
            self._images.finish(fetched[0]),
            self._captions.finish(fetched[1]),
            torch.from_numpy(plan.caption_image).to(self.device, non_blocking=True),
            torch.from_numpy(plan.captions),
        )

    def _open(self, shards: np.ndarray) -> None:
        """Read one sample of each shard, whereby its objects are fetched."""
        images = np.searchsorted(self._block, np.sort(shards))
        captions = np.unique(self._first_caption[images].clip(max=self.captions - 1))
        for side, items in ((self._images, images), (self._captions, captions)):
            if isinstance(side, StoredSide | JoinedSide):
                side.fetch(items)


class JoinedBatches(Batches):
    """The same split of several data sets as one, for training; its samples are counted on from part to part.

    Args:
        parts: of the same fields on the same device, with equal feature sets.

    Attributes:
        image_set, caption_set: of the first part. `image_rows` and `caption_rows` only the parts have.

    Raises:
        CacheError: the parts' features are not of the same encoders, or their words not of the same vocabulary.
    """

    def __init__(self, parts: Sequence[Batches]) -> None:
        for part in parts[1:]:
            _require_equal(parts[0], part)
        self._parts = tuple(parts)
        self.image_set, self.caption_set, self.device = parts[0].image_set, parts[0].caption_set, parts[0].device
        self.images, self.captions, self.skipped = (
            sum(getattr(part, name) for part in parts) for name in ("images", "captions", "skipped")
        )
        self.placement = "stream" if any(part.placement == "stream" for part in parts) else parts[0].placement
        self._images = JoinedSide([part._stored[0] for part in parts])
        self._captions = JoinedSide([part._stored[1] for part in parts])
        self.caption_image = _counted_on([part.caption_image for part in parts], [part.images for part in parts])
        self._by_shard = any(part._by_shard for part in parts)
        self.shuffled = " and ".join(dict.fromkeys(part.shuffled for part in parts))
        self._block = _counted_on([part._block for part in parts], [int(part._block.max()) + 1 for part in parts])
        self._prepare(parts)

    @property
    def parts(self) -> tuple[Batches, ...]:
        """The data sets that these samples come from, one after the other."""
        return self._parts


def _some(read: Callable[[int, int], list[str]], rows: np.ndarray) -> list[str]:
    """Return what `read` has for some ascending rows; it reads from a first row to a last."""
    first = int(rows[0])
    found = read(first, int(rows[-1]) + 1)
    return [found[row - first] for row in rows.tolist()]


def _counted_on(numbers: Iterable[np.ndarray], sizes: Sequence[int]) -> np.ndarray:
    """Return all numbers behind one another, each part's raised by the sizes of the parts before."""
    starts = np.cumsum([0, *sizes[:-1]])
    return np.concatenate([part + start for part, start in zip(numbers, starts, strict=True)])


def _cut(order: np.ndarray, batch_size: int) -> Iterator[np.ndarray]:
    """Cut `order` into batches; a last batch of one unit, which has no negative, is left out."""
    for start in range(0, len(order), batch_size):
        units = order[start : start + batch_size]
        if len(units) > 1:
            yield units


def _require_equal(first: Batches, other: Batches) -> None:
    where = f"{other.image_set.cache.url} cannot be joined to {first.image_set.cache.url}:"
    if other.image_set.fingerprint != first.image_set.fingerprint:
        raise CacheError(
            f"{where} its images '{other.image_set.name}' are not of the encoder of '{first.image_set.name}';"
            " extract them with the same options"
        )
    one, two = first.caption_set, other.caption_set
    if one.vocabulary is not None and one.vocabulary != two.vocabulary:
        raise CacheError(f"{where} its captions '{two.name}' have another vocabulary; tokenise them with the first's")
    if one.vocabulary is None and (two.vocabulary is not None or one.fingerprint != two.fingerprint):
        raise CacheError(
            f"{where} its captions '{two.name}' are not of the encoder of '{one.name}'; extract them with the same"
            " options"
        )


def _require_complete(features: FeatureSet, split: str) -> None:
    done = features.done()[features.blocks.of_split(split)]
    if not done.all():
        raise CacheError(
            f"{features.cache.url}: split '{split}' of '{features.name}' lacks {int((~done).sum())} of"
            f" {counted(len(done), 'shard')}; run the same `xret extract` again"
        )
