"""What pairs of frozen encoders are worth before any training: how well their cached features fit each other.

Three measures of each image set with each caption set, on samples that all sets have:

- The *map* is that of recipe ``cca``: canonical correlation analysis (`modules.canonical`), fitted on ``train``. Images
  and captions are ranked by the cosine of what it gives. Its ridge and power are those that rank best on about a tenth
  of ``train`` that nothing is fitted on.
- *Mutual neighbours*: the share of an image's 10 nearest ones by image features that are its nearest by the mean
  feature of their captions, too (Huh et al., *The Platonic Representation Hypothesis*, section 2.2).
- *CKA*: linear centred kernel alignment of the same features (Kornblith et al., *Similarity of Neural Network
  Representations Revisited*, section 3), with the unbiased estimator of HSIC (Nguyen et al., *Do Wide and Deep Networks
  Learn the Same Things?*, section 2): the biased one nears 1 where features are wider than there are samples.
"""

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from ...pipeline.errors import CacheError
from ...pipeline.reading.batches import stored_batches
from ...pipeline.reading.features import Features
from ...pipeline.reading.joined_sets import joined
from ...pipeline.store import CaptionSet, FeatureCache, FeatureSet, ImageSet
from ...pipeline.wording import counted
from ..modules.padding import mean_rows
from .closed_form import BATCH, HELD, Held, blocks, moments_of, with_captions
from .number_table import NumberTable

NEIGHBOURS = 10
FIELDS = {"global": "global", "mean of rows": "local"}  # what is read for each feature


@dataclass(frozen=True)
class PairAlignment:
    """How well an image set and a caption set fit each other."""

    images: str  # name of the set
    image_feature: str  # ``global``, or ``mean of rows``
    captions: str
    caption_feature: str
    mean_recall: float  # of the map, the mean of its six recalls, percent
    rsum: float  # their sum
    ridge: float  # in mean eigenvalues
    power: float  # of the correlations
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
    images, captions, left_out = _compared(cache, split)
    sides = joined(images), joined(captions)
    fields: dict[str, Any] = {
        "image_fields": tuple({FIELDS[_feature(features)]} for features in images),
        "caption_fields": tuple({FIELDS[_feature(features)]} for features in captions),
    }
    train, other = (stored_batches(*sides, name, **fields) for name in ("train", split))
    learned, read = with_captions(train), (_vectors, _vectors)
    held = np.arange(len(learned)) % max(10, -(-len(learned) // HELD)) == 0
    moments = moments_of(blocks(train, learned[~held], *read))
    choosing, shown = Held(train, learned[held], *read), Held(other, with_captions(other), *read)
    count = len(shown.images[0])
    if count <= NEIGHBOURS + 1:
        few = counted(count, "usable image")
        raise CacheError(f"{cache.url}: split '{split}' has {few}; {NEIGHBOURS} neighbours of each take more")
    pairs = []
    for i, image in enumerate(images):
        for c, caption in enumerate(captions):
            best = choosing.best(moments, i, c)
            rsum = shown.rsum(best.maps, i, c)
            x, y = shown.images[i], _mean_captions(shown, c)
            measured = rsum / 6, rsum, best.ridge, best.power, 100 * mutual_neighbours(x, y), linear_cka(x, y)
            pairs.append(PairAlignment(image.name, _feature(image), caption.name, _feature(caption), *measured))
    pairs.sort(key=lambda pair: -pair.mean_recall)
    return Alignment(str(store), split, count, len(shown.owner), other.skipped, tuple(pairs), left_out)


def _compared(cache: FeatureCache, split: str) -> tuple[list[ImageSet], list[CaptionSet], dict[str, str]]:
    if split == "train":
        raise CacheError("the map is fitted on the split 'train'; compare on another one, as val")
    for name in ("train", split):
        if name not in cache.splits:
            raise CacheError(f"{cache.url} has no split '{name}'; it has {', '.join(cache.splits)}")
    images, captions, left_out = list[ImageSet](), list[CaptionSet](), dict[str, str]()
    for features in map(cache.set_at, cache.set_paths()):
        if why := _lacks(features, split):
            left_out[features.path] = why
        elif isinstance(features, ImageSet):
            images.append(features)
        elif isinstance(features, CaptionSet):
            captions.append(features)
    if not (images and captions):
        reasons = "".join(f"; {path}: {why}" for path, why in left_out.items())
        raise CacheError(f"{cache.url} has no image set and caption set to compare{reasons}")
    return images, captions, left_out


def _lacks(features: FeatureSet, split: str) -> str:
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


def _mean_captions(samples: Held, c: int) -> Tensor:
    """Return the mean feature of each image's captions ``[I, D]``, of one set."""
    captions, owner = samples.captions[c], samples.owner
    summed = captions.new_zeros(len(samples.images[0]), captions.shape[1]).index_add_(0, owner, captions)
    return summed / owner.bincount()[:, None]


def mutual_neighbours(x: Tensor, y: Tensor, k: int = NEIGHBOURS) -> float:
    """Return the mean share of the `k` nearest rows by cosine in ``x [N, D]`` that are nearest in ``y [N, E]`` too."""
    units, shared = [functional.normalize(rows.double(), dim=1) for rows in (x, y)], 0
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
        squares = x.square().sum(1), y.square().sum(1)
        both = squares[0].sum() * squares[1].sum() / ((n - 1) * (n - 2))
        return (x.T @ y).square().sum() - n / (n - 2) * squares[0] @ squares[1] + both

    return float((hsic(x, y) / (hsic(x, x) * hsic(y, y)).sqrt()).nan_to_num())  # 0 where features are constant


def _vectors(features: Features) -> list[Tensor]:
    """Return of each set what was read: the global feature, or the mean of the rows."""
    vectors = []
    for part in features.parts:
        vector = part.global_ if part.local is None else mean_rows(part.local.float(), part.length)
        assert vector is not None, "one of both is read"
        vectors.append(vector.float())
    return vectors
