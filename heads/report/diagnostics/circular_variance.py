"""How far the elements of an embedding set lie apart: the circular variance, in the forms of two papers.

Sources: *Improving Cross-Modal Retrieval with Set of Diverse Embeddings* (SetDiv, section 4.6, Table 3) and *Maximal
Matching Matters* (MaxMatch, section 4.4, Table 4), which squares the norm.
"""

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional


def circular_variance(images: Tensor, captions: Tensor) -> dict[str, Any]:
    r"""Return the natural logarithm of the mean circular variance of the sets of a split, in both forms.

    Args:
        images: sets ``[I, K1, D]``; the elements are normalised here.
        captions: sets ``[C, K2, D]``.

    Returns:
        ``{"log": {"image", "text", "both"}, "log_squared": the same}``. With the norm n of the mean of a set's unit
        elements, ``log`` is SetDiv's, of 1 - n, and ``log_squared`` MaxMatch's, of 1 - n². ``both`` is over the sets
        of images and captions together. Sets without any spread give about -36, where double precision ends.
    """
    norms = {"image": _norms(images), "text": _norms(captions)}
    norms["both"] = torch.cat(list(norms.values()))
    return {
        "log": {side: _log_mean(1 - norm) for side, norm in norms.items()},
        "log_squared": {side: _log_mean(1 - norm.square()) for side, norm in norms.items()},
    }


def _norms(sets: Tensor) -> Tensor:
    """Return the norm of the mean of each set's unit elements, float64 ``[B]``."""
    means = [functional.normalize(part.double(), dim=-1).mean(1) for part in sets.split(1024)]
    return torch.cat([mean.norm(dim=-1) for mean in means])


def _log_mean(variance: Tensor) -> float:
    return variance.mean().clamp(min=torch.finfo(torch.float64).eps).log().item()
