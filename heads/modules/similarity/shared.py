"""What similarities are, and what several share: unit rows, cosines or distances in one product, blocks, a check."""

import math
from collections.abc import Callable
from typing import Any, ClassVar, NamedTuple, cast

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn.functional import normalize

from ....pipeline.device import stacked
from ..embedding import Embedding, Joint, Sequence, each, kind_of, shape_of
from ..padding import valid_rows
from ..parts import Part, Registry

SIDE = 512  # of a block of Gaussians or sequences, which are compared in float64 or bound their memory themselves
# Pairs of elements in a block: a temporary has 16 MiB in float32. glibc returns those above 32 MiB to the system each
# time, and getting them again costs more than most of the arithmetic.
CELLS = 1 << 22


class PaperCost(NamedTuple):
    """What comparing a pair costs by a paper's equations.

    Attributes:
        macs: multiply-accumulates.
        of: whose equations they are.
        why: how what is computed here differs, for readers.
    """

    macs: int
    of: str
    why: str


class Similarity(Part):
    """Base of similarities, called as `similarity(images, captions)` for `[I, C]`, larger is closer.

    Attributes:
        embedding: what it compares: `"vector"`, `"set"`, `"gaussian"` or `"sequence"`.
        score: what follows "A score is" for readers, in a line.
        log_odds: whether a score is the log-odds that both match, as some losses need it.
        of_cosines: whether vectors, elements, rows or means count by their cosines alone, so that neither their lengths
            nor a rotation of all change a score.
        dot_product: whether a score is the dot product of two vectors, of unit length where `of_cosines`.
        attends: which rows attend to which, ``t-i`` (words to places) or ``i-t``; None: there is no `attention`.

    A subclass with a `forward` of its own has to state `of_cosines` and `dot_product` itself.
    """

    embedding: ClassVar[str] = "vector"
    score: ClassVar[str] = "the similarity of both embeddings; larger is closer"
    log_odds: ClassVar[bool] = False
    of_cosines: ClassVar[bool]
    dot_product: ClassVar[bool]
    attends: str | None = None

    def __init_subclass__(cls) -> None:
        super().__init_subclass__()
        if "forward" in vars(cls):
            cls.of_cosines, cls.dot_product = (vars(cls).get(name, False) for name in ("of_cosines", "dot_product"))

    def normalised(self, embedding: Embedding) -> Embedding:
        """Return an embedding with unit length where it does not count, so that its scores stay what they are."""
        if not self.of_cosines:
            return embedding
        if isinstance(embedding, Tensor):
            return unit(embedding)
        assert not isinstance(embedding, Joint), "its scores are no cosines"
        return type(embedding)(unit(embedding[0]), embedding[1])

    def points(self, embedding: Embedding, *, query: bool) -> Tensor:
        """Return points `[T, W]`, all elements or rows of the first sample, then of the next: an index looks them up.

        Samples whose points are near to those of a `query` by Euclidean distance are candidates, which the similarity
        then ranks. By default they are the elements, rows or means, of unit length where `of_cosines`.
        """
        embedding = self.normalised(embedding)
        if isinstance(embedding, Sequence):
            return embedding.rows[valid_rows(*embedding)]
        return embedding.flatten(0, -2) if isinstance(embedding, Tensor) else embedding[0]

    def attention(self, images: Embedding, captions: Embedding) -> Tensor:
        """Return the weights of I images of N rows and C captions of L words, `[I, C, N, L]`, where it `attends`."""
        raise NotImplementedError

    def paper_cost(self, image: list[int], caption: list[int]) -> PaperCost | None:
        """Return what the paper's equations cost, if that is more than `forward` does; of one embedding's shapes."""
        return None


SIMILARITIES: Registry[Similarity] = Registry("similarity", Similarity, "xret.similarities")


def unit(x: Tensor) -> Tensor:
    """Return the rows of `x [..., D]` with length one (zero rows stay zero), in float32 at least."""
    x = x.to(precise(x))
    return normalize(x, dim=-1) if stacked() else cast(Tensor, _Unit.apply(x))


class _Unit(torch.autograd.Function):
    """`functional.normalize`, whose gradient autograd takes apart into a dozen operations on all of `x`."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        length = torch.linalg.vector_norm(x, dim=-1, keepdim=True).clamp_(min=1e-12)
        rows = x / length
        ctx.save_for_backward(rows, length)
        return rows

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        rows, length = ctx.saved_tensors
        along = (rows * gradient).sum(-1, keepdim=True)
        return torch.addcmul(gradient, rows, along, value=-1).div_(length)


def precise(x: Tensor) -> torch.dtype:
    """Return the type that similarities of `x` have: float32, or float64 if `x` does."""
    return torch.promote_types(x.dtype, torch.float32)


def element_cosines(images: Tensor, captions: Tensor, scale: Tensor | float = 1.0) -> Tensor:
    """Return the cosines of all elements of sets `images [I, K1, D]` and `captions [C, K2, D]`: `[I, K1, K2, C]`.

    One matrix product. The captions come last, so that reductions over elements run along contiguous rows. `scale`
    multiplies the images, which are far fewer numbers than the cosines. The result may be changed in place.
    """
    check("set", images, captions)
    with torch.autocast(images.device.type, enabled=False):
        rows, columns = scale * unit(images), unit(captions).transpose(0, 1)
        products = rows.flatten(0, 1) @ columns.flatten(0, 1).T
        return products.view(*rows.shape[:2], *columns.shape[:2])


def squared_distances(x: Tensor, y: Tensor) -> Tensor:
    """Return the squared Euclidean distances of the rows of `x [N, D]` and `y [M, D]`, float64 `[N, M]`.

    |x|^2 - 2 x y + |y|^2 needs no `[N, M, D]`, but in float32 it loses every digit of a small distance: hence float64.
    """
    x, y = x.double(), y.double()
    squares = x.square().sum(1)[:, None] + y.square().sum(1)
    return torch.addmm(squares, x, y.T, alpha=-2).clamp(min=0)


def check(kind: str, images: Embedding, captions: Embedding) -> None:
    """Raise ValueError unless both are embeddings of this `kind_of`, and of one width."""
    shapes = [shape_of(images), shape_of(captions)]
    kinds = kind_of(images), kind_of(captions)
    axes = 3 if kind in ("set", "sequence") else 2
    if kinds != (kind, kind) or {*map(len, shapes)} != {axes} or shapes[0][-1] != shapes[1][-1]:
        raise ValueError(
            f"this similarity compares {kind}s of one width, not a {kinds[0]} of shape {shapes[0]} "
            f"with a {kinds[1]} of shape {shapes[1]}"
        )


@torch.no_grad()
def in_blocks(compare: Callable[[Any, Any], Tensor], images: Embedding, captions: Embedding) -> Tensor:
    """Compare all images with all captions, block by block: `[I, C]`, as one call of `compare` gives it.

    Beside it, memory holds a few temporaries the size of a block.
    """
    count, width = shape_of(images)[0], shape_of(captions)[0]
    step = block_side(images, captions)
    similarity: Tensor | None = None
    for left in range(0, width, step):
        columns = _rows(captions, left, step)
        for top in range(0, count, step):
            block = compare(_rows(images, top, step), columns)
            if similarity is None:
                similarity = block.new_empty((count, width))
            similarity[top : top + step, left : left + step] = block
    return compare(images, captions) if similarity is None else similarity


def block_side(images: Embedding, captions: Embedding) -> int:
    """Return how many images and how many captions a block of `in_blocks` has.

    The same number of both: each block normalises its rows and columns anew, and a square has the fewest of them.
    """
    if not (isinstance(images, Tensor) and isinstance(captions, Tensor)):
        return SIDE
    elements = [one.shape[1] if one.ndim == 3 else 1 for one in (images, captions)]
    return max(1, math.isqrt(CELLS // math.prod(elements)))


def _rows(embedding: Embedding, begin: int, number: int) -> Embedding:
    return each(lambda x: x[begin : begin + number], embedding)
