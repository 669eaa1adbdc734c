"""From the store to batches: usable samples of a split, shuffled, in the order that training or evaluation wants."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import islice
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor

from ..data.texts import ranges
from ..device import on_host, send
from ..store import CaptionSet, ImageSet
from ..wording import counted
from .features import Draws, Features, FeatureSource, Joined, SideBySide, Stored
from .joined_sets import Captions, Images, parts_of
from .placement import Placement, Resident, choose_placement
from .prefetch import block_order, opened_ahead, read_ahead, shuffled
from .split import Ascending, Split, range_of, texts_of

Unit = Literal["image", "caption"]
Fields = set[str] | tuple[set[str], ...]  # of a feature set, or of each of several


@dataclass
class Batch:
    """Images and captions that belong to them."""

    images: Features  # of B images
    captions: Features  # of M captions
    caption_image: Tensor  # the image of each caption, an index into the batch, int64 [M]
    caption_index: Tensor  # each caption's place among the captions of the split, int64 [M], on the CPU

    @property
    def positives(self) -> Tensor:
        """Which caption belongs to which image, bool [B,M]."""
        mine = torch.arange(len(self.images.length))[:, None] == on_host(self.caption_image)
        return send(mine, self.caption_image.device)


@dataclass(frozen=True)
class _Plan:
    """What a batch holds: images and captions of the split, and the image of each caption among the batch's."""

    images: np.ndarray
    captions: np.ndarray
    caption_image: np.ndarray


class Batches:
    """The usable samples of a split, of one data set or of several, with a source of features for each modality.

    `stored_batches`, `joined_batches` and `end_to_end.end_to_end_batches` make them. Samples are counted on from part
    to part, a part a data set; two sources give their features. `Split` explains the attributes; sets and rows are
    those of the first part, and the others of all.
    """

    def __init__(
        self, parts: Sequence[Split], image_source: FeatureSource, caption_source: FeatureSource, device: torch.device
    ) -> None:
        first, self.parts, self.device = parts[0], tuple(parts), device
        self.image_source, self.caption_source = image_source, caption_source
        self.image_set, self.caption_set = first.image_set, first.caption_set
        images, captions = [len(part.images) for part in parts], [len(part.captions) for part in parts]
        self.images, self.captions, self.skipped = sum(images), sum(captions), sum(part.skipped for part in parts)
        self.placement = "stream" if any(part.placement == "stream" for part in parts) else first.placement
        self.shuffled = " and ".join(dict.fromkeys(part.shuffled for part in parts))
        self._blocks = _counted_on([part.blocks() for part in parts])
        self._by_chunk = any(part.by_chunk for part in parts)
        self._first_caption = _counted_on([part.first_caption for part in parts])
        self._part_ends = {"image": np.cumsum(images), "caption": np.cumsum(captions)}

    @property
    def image_rows(self) -> np.ndarray:
        """Image rows of the first part."""
        return self.parts[0].image_rows

    @property
    def caption_rows(self) -> np.ndarray:
        """Caption rows of the first part."""
        return self.parts[0].caption_rows

    @cached_property
    def caption_image(self) -> np.ndarray:
        """The image of each caption, int64."""
        return np.repeat(np.arange(self.images), np.diff(self._first_caption))

    def ids(self) -> list[str]:
        """Return the ids of the images."""
        return [found for part in self.parts for found in texts_of(part.image_set.cache.ids, part.image_rows)]

    def file_names(self) -> list[str]:
        """Return the images' file names, below their manifest's folder."""
        return [found for part in self.parts for found in texts_of(part.image_set.cache.file_names, part.image_rows)]

    def texts(self) -> list[str]:
        """Return the texts of the captions."""
        return [
            found for part in self.parts for found in texts_of(part.image_set.cache.caption_texts, part.caption_rows)
        ]

    def text_hashes(self, captions: np.ndarray) -> np.ndarray:
        """Return a number for the text of each of these captions, equal for equal texts, int64."""
        ends, out = self._part_ends["caption"], np.empty(len(captions), np.int64)
        of_part = np.searchsorted(ends, captions, side="right")
        for number in np.unique(of_part).tolist():
            part, here = self.parts[number], of_part == number
            rows = part.captions[captions[here] - ends[number] + len(part.captions)]
            out[here] = part.image_set.cache.text_hashes(rows)
        return out

    def steps(self, unit: Unit, batch_size: int) -> int:
        """Return how many batches an epoch has."""
        return sum(1 for _ in cut(range(len(self.units(unit))), batch_size))

    def epoch(
        self, *, unit: Unit, batch_size: int, seed: int, epoch: int, captions: int | None = None, first: int = 0
    ) -> Iterator[Batch]:
        """Yield the batches of an epoch, an order that depends on seed and epoch alone, reading the next ones ahead.

        Every unit comes once, but for images without a caption, and a last one that would be a batch by itself. Its
        place is drawn from all places; in ``stream`` from those of a group of blocks.

        Args:
            unit: ``image``: a batch is `batch_size` images with all their captions (SetDiv, section 4.2), or with so
                many `captions`, drawn; ``caption``: `batch_size` captions with their images, an image once (VSE++).
            first: the batch to begin with; of those before it nothing is read.
        """
        rng = np.random.default_rng([seed, epoch])
        groups: list[np.ndarray] = []
        units = self.units(unit)
        if self.placement == "stream":
            edges = self._blocks if unit == "image" else self._first_caption[self._blocks]
            order, groups = block_order(np.diff(units.places(edges)), rng)
        else:
            order = shuffled(len(units), rng)
        drawn = (units[places] for places in cut(order, batch_size))
        plans: Iterator[_Plan] = islice(self._plans(unit, drawn, captions, rng), first, None)
        if groups and self._by_chunk:
            plans = opened_ahead(self._open, plans, self._blocks_of, groups)
        return read_ahead(lambda plan: self._read(plan, (seed, epoch)), plans, self.device)

    def image_features(self, batch_size: int, most: int | None = None) -> Iterator[Features]:
        """Yield the features of all images, in their order; of about `most` where they are more, evenly between."""
        return self._in_order(self.image_source, self.images, batch_size, most)

    def caption_features(self, batch_size: int, most: int | None = None) -> Iterator[Features]:
        """Yield the features of all captions, in their order; `most` as of `image_features`."""
        return self._in_order(self.caption_source, self.captions, batch_size, most)

    def _in_order(self, source: FeatureSource, samples: int, batch_size: int, most: int | None) -> Iterator[Features]:
        every = -(-samples // (most or samples))
        firsts = range(0, samples, batch_size * every)
        items = (np.arange(first, min(first + batch_size, samples)) for first in firsts)
        return read_ahead(source.fetch, items, self.device)

    def units(self, unit: Unit) -> Ascending:
        """Return what an epoch has, in order: the images that have captions, or the captions."""
        first = self._first_caption
        return Ascending(0, first[1:] > first[:-1] if unit == "image" else np.ones(self.captions, bool))

    def _plans(
        self, unit: Unit, batches: Iterable[np.ndarray], captions: int | None, rng: np.random.Generator
    ) -> Iterator[_Plan]:
        first = self._first_caption
        for drawn in batches:
            part = np.searchsorted(self._part_ends[unit], drawn, side="right")
            units = drawn[np.argsort(part, kind="stable")]  # joined data sets one after the other
            if unit == "caption":
                images, caption_image = np.unique(range_of(first, units), return_inverse=True)
                yield _Plan(images, units, caption_image)
                continue
            count = first[units + 1] - first[units]
            chosen = ranges(first[units], count)
            image = np.repeat(np.arange(len(units)), count)
            if captions is not None:  # the captions of each image in an order that is drawn, and of these the first
                order = np.argsort(image + rng.random(len(image)))
                place = np.arange(len(chosen)) - np.repeat(np.cumsum(count) - count, count)
                chosen, image = chosen[order[place < captions]], image[place < captions]
            yield _Plan(units, chosen, image)

    def _read(self, plan: _Plan, draws: Draws) -> Callable[[], Batch]:
        images = self.image_source.fetch(plan.images, draws)
        captions = self.caption_source.fetch(plan.captions, draws)
        return lambda: Batch(
            images(),
            captions(),
            send(torch.from_numpy(plan.caption_image), self.device),
            torch.from_numpy(plan.captions),
        )

    def _blocks_of(self, plan: _Plan) -> np.ndarray:
        return np.searchsorted(self._blocks, plan.images, side="right") - 1

    def _open(self, blocks: np.ndarray) -> None:
        """Read one sample of each block, whereby its chunks are fetched."""
        images = self._blocks[np.sort(blocks)]
        self.image_source.fetch(images)
        self.caption_source.fetch(np.unique(self._first_caption[images].clip(max=self.captions - 1)))


def stored_batches(
    image_set: Images,
    caption_set: Captions,
    split: str | Sequence[str],
    *,
    device: str | torch.device = "cpu",
    image_fields: Fields,
    caption_fields: Fields,
    placement: Placement = "stream",
    resident: Resident | None = None,
    views: Sequence[int] = (0,),
    share: float = 1.0,
) -> Batches:
    """Return the usable samples of a split, or of several, with what sets of a store hold, as batches on `device`.

    Fields are of ``local``, ``global`` and ``token``; of several sets some for each. `placement` is that of
    `choose_placement`, `share` that of `Split.drawn`, and `resident` what lies in memory already. Of several `views` an
    epoch draws one for each image, which follows from seed, epoch and image alone; `Batches.image_features` gives the
    first. CacheError: the split is missing or incomplete, or has no usable sample. RunError: it does not fit where
    `placement` puts it.
    """
    names = [split] if isinstance(split, str) else split
    samples, cache = Split.of(image_set, caption_set, *names).drawn(share), image_set.cache
    device = torch.device(device)
    images = _stored(image_set, samples.images, image_fields, views)
    captions = _stored(caption_set, samples.captions, caption_fields, (0,))
    resident = Resident() if resident is None else resident
    columns = [column for part in (*images, *captions) for column in part.columns.values()]
    if not columns:
        placement = "stream"
    counts = f"{counted(len(samples.images), 'image')} and {counted(len(samples.captions), 'caption')}"
    what = f"the features of {counts} ({cache.dataset}, {', '.join(names)})"
    place, where = choose_placement(placement, columns, device, cache.folder.is_local, what, resident)
    for part in (*images, *captions):
        part.place(where, device, resident)
    image_source, caption_source = (one[0] if len(one) == 1 else SideBySide(one) for one in (images, captions))
    return Batches([replace(samples, placement=place)], image_source, caption_source, device)


def _stored(features: Images | Captions, rows: Ascending, fields: Fields, views: Sequence[int]) -> list[Stored]:
    parts: Sequence[ImageSet | CaptionSet] = parts_of(features)
    of_each = fields if isinstance(fields, tuple) else (fields,) * len(parts)
    return [Stored(part, rows, own, views) for part, own in zip(parts, of_each, strict=True)]


def joined_batches(batches: Sequence[Batches]) -> Batches:
    """Return the same split of several data sets, with the same fields on the same device, as one for training.

    CacheError if the features are not of the same encoders, or the words not of the same vocabulary.
    """
    parts = [part for one in batches for part in one.parts]
    for part in parts[1:]:
        parts[0].require_joinable(part)
    if len(batches) == 1:
        return batches[0]
    images = Joined([one.image_source for one in batches], [one.images for one in batches])
    captions = Joined([one.caption_source for one in batches], [one.captions for one in batches])
    return Batches(parts, images, captions, batches[0].device)


def _counted_on(edges: Sequence[np.ndarray]) -> np.ndarray:
    """Return the edges of all parts, each of which begins with 0, one part after the other."""
    whole = edges[0]
    for more in edges[1:]:
        whole = np.concatenate([whole, np.int64(whole[-1]) + more[1:]])
    return whole


def cut(order: Any, batch_size: int) -> Iterator[Any]:
    """Cut `order` into batches; a last batch of one unit, which has no negative, is left out."""
    for start in range(0, len(order), batch_size):
        units = order[start : start + batch_size]
        if len(units) > 1:
            yield units
