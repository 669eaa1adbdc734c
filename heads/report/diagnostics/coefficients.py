"""What GPO has learned: the weight of each rank (*Learning the Best Pooling Strategy*, VSE-infinity, Figure 5)."""

from typing import Any

import torch
from torch import Tensor, nn

from ...modules.aggregators.gpo import GPO


def gpo_coefficients(branch: nn.Module, length: Tensor) -> list[dict[str, Any]]:
    """Return the coefficients of every GPO of a branch for the lengths that occur.

    Args:
        branch: of a model; an embedding may have several, as one for the mean and one for the variance.
        length: valid rows of each sample of a split, ``[B]``.

    Returns:
        ``[{"part": its name in the branch, "lengths": [{"length": N, "samples": int, "coefficients": [N floats]}]}]``,
        ascending by length; coefficients from the largest value's to the smallest's, adding up to one. Where every
        dimension has its own, they are the mean over dimensions. A GPO whose coefficients depend on the sample has
        none of its own and is left out.
    """
    lengths, samples = length.clamp(min=1).unique(return_counts=True)
    found = []
    for name, part in branch.named_modules():
        if isinstance(part, GPO) and not part.feature_input:
            found.append({"part": name, "lengths": _lengths(part, lengths, samples)})
    return found


@torch.no_grad()
def _lengths(part: GPO, lengths: Tensor, samples: Tensor) -> list[dict[str, Any]]:
    weights = part.coefficients(lengths)
    if weights.ndim == 3:
        weights = weights.mean(2)
    rows = zip(lengths.tolist(), samples.tolist(), weights.tolist(), strict=True)
    return [{"length": n, "samples": count, "coefficients": row[:n]} for n, count, row in rows]
