"""What several similarities share: unit rows, all cosines or distances in one product, and checks of the shapes."""

import torch
from torch import Tensor
from torch.nn import functional

from ..embedding import Gaussian, Sequence


def unit(x: Tensor) -> Tensor:
    """Return the rows of `x [..., D]` with length one (zero rows stay zero), in float32 at least."""
    return functional.normalize(x.to(precise(x)), dim=-1)


def precise(x: Tensor) -> torch.dtype:
    """Return the type that similarities of `x` have: float32, or float64 if `x` does."""
    return torch.promote_types(x.dtype, torch.float32)


def element_cosines(images: Tensor, captions: Tensor, scale: Tensor | float = 1.0) -> Tensor:
    """Return the cosines of all elements of sets `images [I, K1, D]` and `captions [C, K2, D]`: `[I, K1, K2, C]`.

    One matrix product. The captions come last so that reductions over elements run along contiguous rows. `scale`
    multiplies the cosines by way of the images, which are far fewer numbers. The result may be changed in place.
    """
    check_sets(images, captions)
    with torch.autocast(images.device.type, enabled=False):
        rows, columns = scale * unit(images), unit(captions).transpose(0, 1)
        products = rows.flatten(0, 1) @ columns.flatten(0, 1).T
        return products.view(*rows.shape[:2], *columns.shape[:2])


def squared_distances(x: Tensor, y: Tensor) -> Tensor:
    """Return the squared Euclidean distances of the rows of `x [N, D]` and `y [M, D]`, float64 `[N, M]`.

    |x|^2 - 2 x y + |y|^2 needs no `[N, M, D]`, but loses in float32 every digit of what is near by: hence float64.
    """
    x, y = x.double(), y.double()
    squares = x.square().sum(1)[:, None] + y.square().sum(1)
    with torch.autocast(x.device.type, enabled=False):
        return torch.addmm(squares, x, y.T, alpha=-2).clamp(min=0)


def check_vectors(images: Tensor, captions: Tensor) -> None:
    """Raise ValueError if these are no vectors `[samples, width]` of one width."""
    _check(images, captions, 2, "vectors [samples, width]")


def check_sets(images: Tensor, captions: Tensor) -> None:
    """Raise ValueError if these are no sets `[samples, elements, width]` of one width."""
    _check(images, captions, 3, "sets [samples, elements, width]")


def check_gaussians(images: Gaussian, captions: Gaussian) -> None:
    """Raise ValueError if these are no Gaussians of one width."""
    if not (isinstance(images, Gaussian) and isinstance(captions, Gaussian)):
        raise ValueError(f"this similarity compares Gaussians, not {_name(images)} with {_name(captions)}")
    _check(images.mean, captions.mean, 2, "Gaussians [samples, width]")


def check_sequences(images: Sequence, captions: Sequence) -> None:
    """Raise ValueError if these are no sequences of one width."""
    if not (isinstance(images, Sequence) and isinstance(captions, Sequence)):
        raise ValueError(f"this similarity compares sequences, not {_name(images)} with {_name(captions)}")
    _check(images.rows, captions.rows, 3, "sequences [samples, rows, width]")


def _check(images: Tensor, captions: Tensor, dimensions: int, expected: str) -> None:
    shapes = [list(x.shape) if isinstance(x, Tensor) else _name(x) for x in (images, captions)]
    fits = all(isinstance(x, Tensor) and x.ndim == dimensions for x in (images, captions))
    if not fits or images.shape[-1] != captions.shape[-1]:
        raise ValueError(
            f"this similarity compares embedding {expected} of one width, not {shapes[0]} with {shapes[1]}"
        )


def _name(x: object) -> str:
    return type(x).__name__
