"""What pairs of frozen encoders are worth before any training: how well their cached features fit each other.

Three measures of each image set with each caption set, on samples that all sets have:

- The *map* is linear: ridge regression in closed form from captions' features to whitened images', fitted on ``train``.
  Images and captions are ranked by the cosine of what it gives. The strength of the ridge is the one that ranks best on
  about a tenth of ``train`` that nothing is fitted on.
- *Mutual neighbours*: the share of an image's 10 nearest ones by image features that are its nearest by the mean
  feature of their captions, too (Huh et al., *The Platonic Representation Hypothesis*, section 2.2).
- *CKA*: linear centred kernel alignment of the same features (Kornblith et al., *Similarity of Neural Network
  Representations Revisited*, section 3), with the unbiased estimator of HSIC (Nguyen et al., *Do Wide and Deep Networks
  Learn the Same Things?*, section 2): the biased one nears 1 where features are wider than there are samples.
"""

from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from ...pipeline.errors import CacheError
from ...pipeline.reading.batches import Batches, stored_batches
from ...pipeline.reading.features import Features
from ...pipeline.reading.joined_sets import joined
from ...pipeline.store import CaptionSet, FeatureCache, FeatureSet, ImageSet
from ...pipeline.store.rows import ranges
from ...pipeline.wording import counted
from ..model import Model
from ..modules.padding import mean_rows
from .metrics import block_ranks, recall_table
from .number_table import NumberTable
from .pairs import Pairs, Part
from .scoring import Ranker, representatives

BATCH = 256  # images read in one go, with their captions
NEIGHBOURS = 10
STRENGTHS = (1e-3, 1e-2, 1e-1, 1.0, 10.0)  # of the ridge, in mean variances of the features
FIELDS = {"global": "global", "mean of rows": "local"}  # what is read for each feature
HELD = 1000  # training images that choose among them, at most, and a tenth


@dataclass(frozen=True)
class PairAlignment:
    """How well an image set and a caption set fit each other."""

    images: str  # name of the set
    image_feature: str  # ``global``, or ``mean of rows``
    captions: str
    caption_feature: str
    mean_recall: float  # of the map, the mean of its six recalls, percent
    rsum: float  # their sum
    strength: float  # of the ridge
    mutual_neighbours: float  # percent
    cka: float  # 1: equal but for rotation and scale; about 0: unrelated


@dataclass(frozen=True)
class Alignment:
    """What `align` finds; ``str`` shows it as a table."""

    store: str
    split: str
    images: int  # with a caption
    captions: int
    skipped: int  # samples that could not be read, by the encoder of any set
    pairs: tuple[PairAlignment, ...]  # the best mean recall first
    left_out: dict[str, str]  # sets that are not compared, and why

    def to_dict(self) -> dict[str, Any]:
        """Return it as JSON has it."""
        return asdict(self)

    def __str__(self) -> str:
        caption = (
            f"split {self.split}: {counted(self.images, 'image')}, {counted(self.captions, 'caption')},"
            f" {self.skipped:,} skipped; {100 * NEIGHBOURS / (self.images - 1):.2f}% of neighbours are mutual by chance"
        )
        header = ("images", "captions", "mR of the map", "RSUM", f"mutual {NEIGHBOURS}-NN", "CKA")
        rows = [
            (
                f"{pair.images} {pair.image_feature}",
                f"{pair.captions} {pair.caption_feature}",
                *(pair.mean_recall, pair.rsum, pair.mutual_neighbours, pair.cka),
            )
            for pair in self.pairs
        ]
        left_out = [f"{path} is left out: {why}" for path, why in self.left_out.items()]
        return "\n".join([str(NumberTable(caption, header, rows)), *left_out])


def align(store: str | Path, split: str = "val") -> Alignment:
    """Measure how well the image sets of a store fit its caption sets (``xret cache align``); no head is trained.

    The module says what is measured.

    Args:
        store: the feature cache. Sets of word ids, whose features are trained, are left out, and sets that are not
            complete.
        split: whose samples are compared.

    Raises:
        CacheError: the store or the split cannot be used, or there are no two sets to compare.
    """
    cache = FeatureCache.open(store)
    if split == "train":
        raise CacheError("the map is fitted on the split 'train'; compare on another one, as val")
    for name in ("train", split):
        if name not in cache.splits:
            raise CacheError(f"{cache.url} has no split '{name}'; it has {', '.join(cache.splits)}")
    sets = [cache.set_at(path) for path in cache.set_paths()]
    left_out = {one.path: why for one in sets if (why := _lacks(one, split))}
    images = [one for one in sets if isinstance(one, ImageSet) and one.path not in left_out]
    captions = [one for one in sets if isinstance(one, CaptionSet) and one.path not in left_out]
    if not (images and captions):
        reasons = "".join(f"; {path}: {why}" for path, why in left_out.items())
        raise CacheError(f"{cache.url} has no image set and caption set to compare{reasons}")
    sides = joined(images), joined(captions)
    fields: dict[str, Any] = {
        "image_fields": tuple({FIELDS[_feature(one)]} for one in images),
        "caption_fields": tuple({FIELDS[_feature(one)]} for one in captions),
    }
    train, other = (stored_batches(*sides, name, **fields) for name in ("train", split))
    learned = np.unique(train.caption_image)
    held = np.arange(len(learned)) % max(10, -(-len(learned) // HELD)) == 0
    sums = _Sums(_blocks(train, learned[~held]))
    choosing, shown = _Samples(train, learned[held]), _Samples(other, np.unique(other.caption_image))
    count = len(shown.images[0])
    if count <= NEIGHBOURS + 1:
        few = counted(count, "usable image")
        raise CacheError(f"{cache.url}: split '{split}' has {few}; {NEIGHBOURS} neighbours of each take more")
    cosine = Ranker(None, cache, sides).model(torch.device("cpu"))
    pairs = []
    for i, image in enumerate(images):
        for c, caption in enumerate(captions):
            maps = {strength: sums.linear_map(i, c, strength) for strength in STRENGTHS}
            best = max(STRENGTHS, key=lambda one: choosing.rsum(i, c, maps[one], cosine))
            rsum = shown.rsum(i, c, maps[best], cosine)
            x, y = shown.images[i], shown.mean_captions(c)
            found = rsum / 6, rsum, best, 100 * mutual_neighbours(x, y), linear_cka(x, y)
            pairs.append(PairAlignment(image.name, _feature(image), caption.name, _feature(caption), *found))
    pairs.sort(key=lambda pair: -pair.mean_recall)
    return Alignment(str(store), split, count, len(shown.owner), other.skipped, tuple(pairs), left_out)


def _lacks(features: FeatureSet, split: str) -> str:
    """Return why a set cannot be compared; empty where it can."""
    if features.kind == "words":
        return "its features are trained with a head"
    return ", ".join(f"split {name} is incomplete" for name in ("train", split) if not features.complete(name))


def _feature(features: FeatureSet) -> str:
    """Return what is compared of a set.

    The global feature; but where that is of the last layer and the rows are of another one, their mean.
    """
    inner = str(features.identity.get("layer")).startswith(("hidden_states.", "intermediates."))
    last = features.modality == "images" or features.identity.get("global") in ("projected", "pooled")
    return "mean of rows" if inner and last else "global"


def mutual_neighbours(x: Tensor, y: Tensor, k: int = NEIGHBOURS) -> float:
    """Return the mean share of the `k` nearest rows by cosine in ``x [N, D]`` that are nearest in ``y [N, E]`` too."""
    units, shared = [functional.normalize(one.double(), dim=1) for one in (x, y)], 0
    for rows in torch.arange(len(x)).split(BATCH):
        near = []
        for unit in units:
            cosine = unit[rows] @ unit.T
            cosine[torch.arange(len(rows)), rows] = -torch.inf
            near.append(cosine.topk(k).indices)
        shared += int((near[0][:, :, None] == near[1][:, None, :]).sum())
    return shared / (k * len(x))


def linear_cka(x: Tensor, y: Tensor) -> float:
    """Return the linear CKA of ``x [N, D]`` and ``y [N, E]`` with the unbiased estimator of HSIC; N is above 3.

    No ``[N, N]`` is made: the sum of squares of X'Y is that of products of Gram matrices, from which the samples'
    products with themselves are taken.
    """
    n, x, y = len(x), x.double() - x.double().mean(0), y.double() - y.double().mean(0)

    def hsic(x: Tensor, y: Tensor) -> Tensor:
        own = x.square().sum(1), y.square().sum(1)
        both = own[0].sum() * own[1].sum() / ((n - 1) * (n - 2))
        return (x.T @ y).square().sum() - n / (n - 2) * own[0] @ own[1] + both

    return float((hsic(x, y) / (hsic(x, x) * hsic(y, y)).sqrt()).nan_to_num())  # 0 where features are constant


class _Block(NamedTuple):
    """Images with their captions: of each set a vector a sample, float32, and the image of each caption among these."""

    images: list[Tensor]  # [I, D]
    captions: list[Tensor]  # [C, D]
    owner: Tensor  # int64 [C]


def _blocks(batches: Batches, chosen: np.ndarray) -> Iterator[_Block]:
    """Yield the chosen images, which have captions, some at a time."""
    first = np.searchsorted(batches.caption_image, np.arange(batches.images + 1))
    for images in np.split(chosen, range(BATCH, len(chosen), BATCH)):
        count = first[images + 1] - first[images]
        captions = batches.caption_source.fetch(ranges(first[images], count))()
        owner = torch.from_numpy(np.repeat(np.arange(len(images)), count))
        yield _Block(_vectors(batches.image_source.fetch(images)()), _vectors(captions), owner)


def _vectors(features: Features) -> list[Tensor]:
    """Return of each set what was read: the global feature, or the mean of the rows."""
    vectors = []
    for part in features.parts:
        vector = part.global_ if part.local is None else mean_rows(part.local.float(), part.length)
        assert vector is not None, "one of both is read"
        vectors.append(vector.float())
    return vectors


_Map = tuple[tuple[Tensor, Tensor], ...]  # of images and of captions: a mean to take off [D], and a matrix [D, E]


class _Samples:
    """Images with their captions, in memory."""

    def __init__(self, batches: Batches, chosen: np.ndarray) -> None:
        blocks = [*_blocks(batches, chosen)]
        self.images = [torch.cat(parts) for parts in zip(*(block.images for block in blocks), strict=True)]
        self.captions = [torch.cat(parts) for parts in zip(*(block.captions for block in blocks), strict=True)]
        rows = np.flatnonzero(np.isin(batches.caption_image, chosen))
        self.owner = torch.from_numpy(np.searchsorted(chosen, batches.caption_image[rows]))
        texts = batches.texts()
        self.texts = [texts[row] for row in rows.tolist()]

    def mean_captions(self, c: int) -> Tensor:
        """Return the mean feature of each image's captions ``[I, D]``, of one set."""
        return _by_image(self.captions[c], self.owner) / self.owner.bincount()[:, None]

    def rsum(self, i: int, c: int, linear: _Map, cosine: Model) -> float:
        """Return how a map ranks an image set and a caption set."""
        sides = zip((self.images[i], self.captions[c]), linear, strict=True)
        images, captions = (((one.double() - mean) @ matrix).float() for one, (mean, matrix) in sides)
        pairs = Pairs((Part(cosine, (images,), captions),), self.owner, representatives(captions, self.texts))
        return recall_table(*block_ranks(pairs.blocks, len(images), self.owner)).rsum


class _Spread(NamedTuple):
    """How vectors spread around their mean: eigenvalues [D] and eigenvectors [D, D] of their covariance; float64."""

    mean: Tensor
    values: Tensor
    vectors: Tensor

    def to_power(self, power: float, strength: float) -> Tensor:
        """Return the eigenvectors times a power of their values, to which `strength` mean values are added."""
        return self.vectors * (self.values + strength * self.values.mean()).clamp(min=1e-30) ** power


class _Sums:
    """Means and covariances of captions, and of the image of each, from which every map follows; float64."""

    def __init__(self, blocks: Iterable[_Block]) -> None:
        totals: dict[tuple[str, int, int], Tensor] = {}
        for block in blocks:
            # With a 1 at the end of each vector, sums of products hold the sums of the vectors and their number, too.
            images, captions = ([functional.pad(one.double(), (0, 1), value=1) for one in side] for side in block[:2])
            times = block.owner.bincount()[:, None]
            products = {("image", i, i): x.T @ (times * x) for i, x in enumerate(images)}
            for c, y in enumerate(captions):
                products["caption", c, c] = y.T @ y
                summed = _by_image(y, block.owner)
                products |= {("cross", i, c): summed.T @ x for i, x in enumerate(images)}
            totals = {key: product + totals.get(key, 0) for key, product in products.items()}
        self._count = totals["image", 0, 0][-1, -1]
        self._spread = {(side, i): self._spread_of(one) for (side, i, _), one in totals.items() if side != "cross"}
        self._cross = {(i, c): one[:-1, :-1] / self._count for (side, i, c), one in totals.items() if side == "cross"}

    def _spread_of(self, products: Tensor) -> _Spread:
        mean = products[-1, :-1] / self._count
        values, vectors = torch.linalg.eigh(products[:-1, :-1] / self._count - mean.outer(mean))
        return _Spread(mean, values.clamp(min=0), vectors)

    def linear_map(self, i: int, c: int, strength: float) -> _Map:
        """Return the map between an image set and a caption set, with a ridge of this strength."""
        image, caption = self._spread["image", i], self._spread["caption", c]
        between = self._cross[i, c] - caption.mean.outer(image.mean)
        of_images = image.to_power(-0.5, strength)
        of_captions = caption.to_power(-1, strength) @ (caption.vectors.T @ between @ of_images)
        return (image.mean, of_images), (caption.mean, of_captions)


def _by_image(captions: Tensor, owner: Tensor) -> Tensor:
    """Return the sum of each image's captions ``[I, D]``; every image has one."""
    return captions.new_zeros(int(owner[-1]) + 1, captions.shape[1]).index_add_(0, owner, captions)
