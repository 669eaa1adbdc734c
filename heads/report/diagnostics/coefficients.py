"""What GPO has learned: the weight of each rank (*Learning the Best Pooling Strategy*, VSE-infinity, Figure 5)."""

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from ...modules.aggregators.gpo import GPO


@dataclass(frozen=True)
class Length:
    """The coefficients for N rows, from the largest value's to the smallest's, and how many samples have so many."""

    length: int
    samples: int
    coefficients: list[float]


@dataclass(frozen=True)
class Part:
    """A GPO by its name in the branch, with the lengths that occur, ascending."""

    part: str
    lengths: list[Length]


@dataclass(frozen=True)
class Coefficients:
    """The GPOs of both branches."""

    image: list[Part]
    text: list[Part]


@torch.no_grad()
def gpo_coefficients(branch: nn.Module, length: Tensor) -> list[Part]:
    """Return the coefficients of every GPO of a branch for the lengths that occur.

    Where every dimension has coefficients of its own, they are the mean over dimensions. A GPO whose coefficients
    depend on the sample has none of its own and is left out.

    Args:
        branch: of a model; an embedding may have several GPOs, such as one for the mean and one for the variance.
        length: valid rows of each sample of a split, ``[B]``.
    """
    lengths, samples = length.clamp(min=1).unique(return_counts=True)
    found = []
    for name, part in branch.named_modules():
        if isinstance(part, GPO) and not part.feature_input:
            weights = part.coefficients(lengths)
            rows = (weights.mean(2) if weights.ndim == 3 else weights).tolist()
            known = zip(lengths.tolist(), samples.tolist(), rows, strict=True)
            found.append(Part(name, [Length(n, count, row[:n]) for n, count, row in known]))
    return found
