"""Training losses: each gives a scalar from the similarity matrix, the positives and both sides' embeddings.

Sources: triplet with hardest negatives from VSE++ and SetDiv eq. 9; MMD and diversity from PVSE as SetDiv
section 3.4 uses them. What a mean runs over follows the papers' public code, as the recorded reference values
do. Weights are the recipe's: nothing is weighted in here. A loss without anything to compare is zero and still
attached to the graph.
"""

from typing import Literal, get_args

import torch
from torch import Tensor, nn
from torch.nn import functional

from .aggregators.aggregated import Aggregated

Negatives = Literal["hardest", "all", "semi-hard"]
Reduction = Literal["mean", "sum"]
Kernel = Literal["exponential", "gaussian"]


def triplet(
    similarity: Tensor,
    positives: Tensor,
    *,
    margin: float = 0.2,
    negatives: Negatives = "hardest",
    reduction: Reduction = "mean",
) -> Tensor:
    """Return the triplet loss, image to text plus text to image.

    Every (image, own caption) pair is an anchor in both directions; whatever is not positive is negative.

    Args:
        similarity: `[I, C]`, larger is closer.
        positives: `[I, C]`, True where caption and image belong together; any number a row or column.
        margin: by how much a positive must be closer than a negative.
        negatives: `hardest`: the closest one of each anchor (SetDiv eq. 9). `all`: every one. `semi-hard`:
            every one, each term clipped at the margin: only negatives farther than the positive have a gradient.
        reduction: `mean` over the terms of each direction (`semi-hard`: those above zero), or their `sum`.

    Returns:
        A scalar.
    """
    one_way = {"hardest": _hardest, "all": _every, "semi-hard": _semi_hard}[negatives]
    image_to_text = one_way(similarity, positives, margin, reduction)
    return image_to_text + one_way(similarity.T, positives.T, margin, reduction)


def mmd(images: Tensor, captions: Tensor, kernel: Kernel = "exponential") -> Tensor:
    """Return the squared maximum mean discrepancy between all image and all caption elements, normalised.

    mean k(x, x') - 2 mean k(x, y) + mean k(y, y'), pairs of an element with itself included.

    Args:
        images: `[I, K1, D]`, or `[I, D]` as sets of one.
        captions: `[C, K2, D]` or `[C, D]`.
        kernel: `exponential` is exp(-|x - y| / 2), as public code has it, `gaussian` exp(-|x - y|^2 / 2).

    Returns:
        A scalar. Elements that coincide have distance 0 and gradient 0.
    """
    with torch.autocast(images.device.type, enabled=False):
        x, y = _unit(images).flatten(0, -2), _unit(captions).flatten(0, -2)
        return _mean_kernel(x, x, kernel) - 2 * _mean_kernel(x, y, kernel) + _mean_kernel(y, y, kernel)


def diversity(slots: Tensor) -> Tensor:
    """Return the mean of exp(-2 |x - x'|^2) over samples and pairs of their unit slots (SetDiv section 3.4).

    Args:
        slots: `[B, K, D]`.

    Returns:
        A scalar; zero where K is 1.
    """
    with torch.autocast(slots.device.type, enabled=False):
        unit = _unit(slots)
        first, second = torch.triu_indices(slots.shape[1], slots.shape[1], 1, device=slots.device)
        cosines = (unit @ unit.transpose(1, 2))[:, first, second]
        # Of unit vectors, |x - x'|^2 = 2 - 2 cos.
        return (4 * cosines - 4).exp().sum() / max(cosines.numel(), 1)


class Triplet(nn.Module):
    """`triplet`, with all negatives during the first epochs if asked (VSE-infinity's warm-up).

    Args:
        margin: see `triplet`.
        negatives: see `triplet`.
        reduction: see `triplet`.
        warmup_epochs: so many first epochs use all negatives instead.

    Attributes:
        epoch: the epoch under way, from 0; the trainer sets it.
    """

    def __init__(
        self,
        *,
        margin: float = 0.2,
        negatives: Negatives = "hardest",
        reduction: Reduction = "mean",
        warmup_epochs: int = 0,
    ) -> None:
        super().__init__()
        _one_of("triplet", "negatives", negatives, get_args(Negatives))
        _one_of("triplet", "reduction", reduction, get_args(Reduction))
        self.margin = margin
        self.negatives = negatives
        self.reduction = reduction
        self.warmup_epochs = warmup_epochs
        self.epoch = 0

    def forward(self, similarity: Tensor, positives: Tensor, images: Aggregated, captions: Aggregated) -> Tensor:
        """Return the loss of `similarity [I, C]` under `positives [I, C]`."""
        negatives = "all" if self.epoch < self.warmup_epochs else self.negatives
        return triplet(similarity, positives, margin=self.margin, negatives=negatives, reduction=self.reduction)


class Mmd(nn.Module):
    """`mmd` between the embeddings of both sides."""

    def __init__(self, *, kernel: Kernel = "exponential") -> None:
        super().__init__()
        _one_of("mmd", "kernel", kernel, get_args(Kernel))
        self.kernel = kernel

    def forward(self, similarity: Tensor, positives: Tensor, images: Aggregated, captions: Aggregated) -> Tensor:
        """Return the discrepancy of `images.embedding` and `captions.embedding`."""
        return mmd(images.embedding, captions.embedding, self.kernel)


class Diversity(nn.Module):
    """`diversity` of the image slots plus that of the caption slots.

    Args:
        form: `exponential`, the only one so far.
    """

    def __init__(self, *, form: Literal["exponential"] = "exponential") -> None:
        super().__init__()
        _one_of("diversity", "form", form, ("exponential",))

    def forward(self, similarity: Tensor, positives: Tensor, images: Aggregated, captions: Aggregated) -> Tensor:
        """Return the loss of `images.slots` and `captions.slots`; ValueError where an aggregator has none."""
        return diversity(_slots("image", images)) + diversity(_slots("text", captions))


LOSSES: dict[str, type[nn.Module]] = {"triplet": Triplet, "mmd": Mmd, "diversity": Diversity}


def _hardest(similarity: Tensor, positives: Tensor, margin: float, reduction: str) -> Tensor:
    """One direction: anchors are rows."""
    # A row without a negative gets -inf, which the hinge turns into zero.
    hardest = similarity.masked_fill(positives, -torch.inf).amax(1, keepdim=True)
    terms = (margin + hardest - similarity).relu().masked_fill(~positives, 0)
    return terms.sum() / (positives.sum().clamp(min=1) if reduction == "mean" else 1)


def _triplets(similarity: Tensor, positives: Tensor, margin: float) -> tuple[Tensor, Tensor]:
    """Return the hinge argument of each positive pair with each column, and where that column is negative."""
    row, column = positives.nonzero(as_tuple=True)
    return margin + similarity[row] - similarity[row, column][:, None], ~positives[row]


def _every(similarity: Tensor, positives: Tensor, margin: float, reduction: str) -> Tensor:
    terms, valid = _triplets(similarity, positives, margin)
    total = terms.relu().masked_fill(~valid, 0).sum()
    return total / (valid.sum().clamp(min=1) if reduction == "mean" else 1)


def _semi_hard(similarity: Tensor, positives: Tensor, margin: float, reduction: str) -> Tensor:
    terms, valid = _triplets(similarity, positives, margin)
    terms = terms.clamp(0, margin).masked_fill(~valid, 0)
    return terms.sum() / ((terms > 0).sum().clamp(min=1) if reduction == "mean" else 1)


def _mean_kernel(x: Tensor, y: Tensor, kernel: str) -> Tensor:
    squared = 2 - 2 * x @ y.T
    if kernel == "gaussian":
        return (-0.5 * squared).exp().mean()
    # Elements as near as the rounding error of the product count as coinciding: the root's slope is infinite at 0,
    # and what was filled in gets no gradient whatever that slope.
    distance = squared.masked_fill(squared < 16 * torch.finfo(squared.dtype).eps, 0).sqrt()
    return (-0.5 * distance).exp().mean()


def _slots(side: str, aggregated: Aggregated) -> Tensor:
    if aggregated.slots is None:
        raise ValueError(
            f"the diversity loss needs slots, but the {side} aggregator has none: "
            "choose element-slots or leave the loss out"
        )
    return aggregated.slots


def _unit(x: Tensor) -> Tensor:
    return functional.normalize(x.to(torch.promote_types(x.dtype, torch.float32)), dim=-1)


def _one_of(loss: str, name: str, value: str, known: tuple[str, ...]) -> None:
    if value not in known:
        raise ValueError(f"{loss}: {name} is '{value}', but must be one of {', '.join(known)}")
