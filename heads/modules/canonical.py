"""Canonical correlation analysis: linear maps of paired vectors into one space, in closed form.

Images x and captions y are centred, whitened with a ridge, and turned so that they agree component by component:

    Wx = (Cxx + r mean(λx) I)^-½,  Wy alike;   U S V' = Wx Cxy Wy;   x → S^p U' Wx (x - mean),  y → S^p V' Wy (y - mean)

S are the correlations of Hotelling, *Relations Between Two Sets of Variates* (Biometrika 1936), r the ridge in mean
eigenvalues (Vinod, *Canonical ridge and econometrics of joint production*, 1976), and p the power by which correlated
components count for more (Gong et al., *A Multi-View Embedding Space for Modeling Internet Images, Tags, and their
Semantics*, IJCV 2014, section 3.2). With an infinite ridge nothing is whitened; with a power of 0 as well, the maps are
the rotations of orthogonal Procrustes (Schönemann 1966).

All is float64, and made of means and covariances alone: memory follows from the widths of the vectors.
"""

import math
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional


class LinearMap(NamedTuple):
    """Vectors `[N, C]` less a `mean [C]`, times a `matrix [C, D]`."""

    mean: Tensor
    matrix: Tensor

    def __call__(self, vectors: Tensor) -> Tensor:
        """Return `[N, D]`, float64."""
        return (vectors.double() - self.mean) @ self.matrix


class _Spread(NamedTuple):
    """How vectors spread around their mean: eigenvalues [C] and eigenvectors [C, C] of their covariance."""

    mean: Tensor
    values: Tensor
    vectors: Tensor

    def scales(self, ridge: float) -> Tensor:
        """Return by what each eigenvector is multiplied to whiten along it."""
        if math.isinf(ridge):
            return torch.ones_like(self.values)
        return (self.values + ridge * self.values.mean()).clamp(min=1e-30).rsqrt()


class Moments:
    """Means and covariances of images and their captions, of one feature set a side or several; a caption is a pair."""

    def __init__(self) -> None:
        self._sums: dict[tuple[str, int, int], Tensor] = {}
        self._spreads: dict[tuple[str, int], _Spread] = {}
        self._turned: dict[tuple[float, int, int], tuple[Tensor, Tensor, Tensor]] = {}  # what has no power yet

    def add(self, images: Sequence[Tensor], captions: Sequence[Tensor], owner: Tensor) -> None:
        """Add images, of each set `[I, C]`, with their captions, of each set `[M, C]`, and the image of each, `[M]`."""
        # With a 1 at the end of each vector, sums of products hold the sums of the vectors and their number, too.
        xs, ys = ([functional.pad(one.double(), (0, 1), value=1) for one in side] for side in (images, captions))
        times = owner.bincount(minlength=len(xs[0]))[:, None]
        found = {("image", i, i): x.T @ (times * x) for i, x in enumerate(xs)}
        for c, y in enumerate(ys):
            found["caption", c, c] = y.T @ y
            summed = y.new_zeros(len(xs[0]), y.shape[1]).index_add_(0, owner, y)
            found |= {("cross", i, c): x.T @ summed for i, x in enumerate(xs)}
        self._sums = {key: one + self._sums[key] if key in self._sums else one for key, one in found.items()}
        self._spreads.clear()
        self._turned.clear()

    def maps(self, ridge: float, power: float, image: int = 0, caption: int = 0) -> tuple[LinearMap, LinearMap]:
        """Return the maps of an image set and of a caption set, to the smaller of both widths."""
        x, y = self._spread("image", image), self._spread("caption", caption)
        if (ridge, image, caption) not in self._turned:
            sums = self._sums["cross", image, caption]
            between = sums[:-1, :-1] / sums[-1, -1] - x.mean.outer(y.mean)
            of_x, of_y = x.vectors * x.scales(ridge), y.vectors * y.scales(ridge)
            u, s, vh = torch.linalg.svd(of_x.T @ between @ of_y, full_matrices=False)
            self._turned[ridge, image, caption] = of_x @ u, s, of_y @ vh.T
        of_x, s, of_y = self._turned[ridge, image, caption]
        return LinearMap(x.mean, of_x * s**power), LinearMap(y.mean, of_y * s**power)

    def _spread(self, side: str, number: int) -> _Spread:
        if (side, number) not in self._spreads:
            sums = self._sums[side, number, number]
            mean = sums[-1, :-1] / sums[-1, -1]
            values, vectors = torch.linalg.eigh(sums[:-1, :-1] / sums[-1, -1] - mean.outer(mean))
            self._spreads[side, number] = _Spread(mean, values.clamp(min=0), vectors)
        return self._spreads[side, number]
