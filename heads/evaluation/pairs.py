"""Similarities of galleries that are too large for a matrix of all pairs: blocks of it, computed when they are read."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from ...pipeline.errors import RunError
from ..model import Model
from ..modules.embedding import Embedding, each, shape_of
from ..modules.similarity.shared import block_side
from .metrics import Block


@dataclass(frozen=True)
class Part:
    """What one ranker compares: I images in some views, in whose mean, with C captions."""

    model: Model
    views: tuple[Embedding, ...]
    captions: Embedding


@dataclass(frozen=True)
class Pairs:
    """The mean of the similarities of one ranker or several, with what is added to it."""

    parts: tuple[Part, ...]
    caption_image: Tensor  # int64 [C]
    same: Tensor  # for each caption the first one that is scored for it, see `scoring.representatives`, int64 [C]
    biases: tuple[Tensor, Tensor] | None = None  # of images [I], of captions [C]

    @torch.no_grad()
    def blocks(self, own: bool = False) -> Iterator[Block]:
        """Yield the blocks as `metrics.block_ranks` wants them; RunError where a similarity is not finite."""
        order = self.same.argsort(stable=True)
        scored, many = self.same[order].unique_consecutive(return_counts=True)
        ends = [0, *many.cumsum(0).tolist()]
        step = min(block_side(part.views[0], part.captions) for part in self.parts)
        images = shape_of(self.parts[0].views[0])[0]
        for left in range(0, len(scored), step):
            right = min(left + step, len(scored))
            columns = order[ends[left] : ends[right]]
            some = [each(_taking(scored[left:right]), part.captions) for part in self.parts]
            spread = torch.repeat_interleave(torch.arange(right - left, device=many.device), many[left:right])
            owner = self.caption_image[columns]
            for top in range(0, images, step):
                rows = slice(top, min(top + step, images))
                if own and not ((owner >= rows.start) & (owner < rows.stop)).any():
                    continue
                block = mean_of(self.parts, rows, some)
                block = block if len(spread) == right - left else block[:, spread]
                if not block.isfinite().all():
                    raise RunError(NOT_FINITE)
                if self.biases is not None:
                    block = block + self.biases[0][rows, None].to(block) + self.biases[1][columns].to(block)
                yield rows, columns, block

    def joined(self, other: "Pairs", rows: list[int], columns: list[int]) -> "Pairs":
        """Return the mean with the parts of another, which has our images in these rows and captions in columns."""
        images, captions = (torch.tensor(some, device=self.same.device) for some in (rows, columns))
        size = len(captions)
        key = self.same * len(other.same) + other.same[captions]
        groups = key.unique(return_inverse=True)[1]
        first = torch.full_like(key, size).scatter_reduce(0, groups, torch.arange(size, device=key.device), "amin")
        take_images, take_captions = _taking(images), _taking(captions)
        parts = tuple(
            Part(part.model, tuple(each(take_images, view) for view in part.views), each(take_captions, part.captions))
            for part in other.parts
        )
        return replace(self, parts=self.parts + parts, same=first[groups])

    def deviation(self) -> float:
        """Return the standard deviation of all similarities."""
        sums = [(block.numel(), block.double().sum(), block.double().square().sum()) for _, _, block in self.blocks()]
        count, total, squares = (sum(column) for column in zip(*sums, strict=True))
        return float((squares / count - (total / count) ** 2).clamp(min=0).sqrt())


NOT_FINITE = "the model gives similarities that are not finite: its weights are damaged, train it again"


def mean_of(parts: tuple[Part, ...], rows: slice, captions: list[Embedding]) -> Tensor:
    """Return the mean over rankers, of the mean over views, of some images with `captions` of each ranker."""
    of_parts = []
    for part, some in zip(parts, captions, strict=True):
        of_views = [part.model.similarity(each(_taking(rows), view), some) for view in part.views]
        of_parts.append(torch.stack(of_views).mean(0) if len(of_views) > 1 else of_views[0])
    return torch.stack(of_parts).mean(0) if len(of_parts) > 1 else of_parts[0]


def _taking(some: slice | Tensor) -> Callable[[Tensor], Tensor]:
    return lambda tensor: tensor[some]
