"""Generalised mean pooling with a learned exponent.

Source: Radenovic, Tolias, Chum: *Fine-tuning CNN Image Retrieval with No Human Annotation* (TPAMI 2019), eq. 3;
a baseline of VSE-infinity (section 5.2), which finds the published code unstable: its gradients explode.
"""

import math

import torch
from torch import Tensor, nn
from torch.nn import functional

from ..padding import valid_rows
from .aggregated import AGGREGATORS
from .pooling import Pooling

BEGIN = 3.0  # the exponent at first, as published
FLOOR = 1e-6  # the mean is one of positive values: what lies below counts as this, as in the published code


def generalised_mean(local: Tensor, length: Tensor, p: Tensor) -> Tensor:
    """Return `(mean of x^p)^(1/p)` over the first `length[b]` rows of each feature, `[B, C]`; zeros for no rows.

    Values below 1e-6, all negative ones among them, count as 1e-6 and get no gradient. The largest value of a
    feature is divided out before the power is taken and multiplied back after the root, which changes neither
    value nor gradient: no power overflows, and the mean lies between 1/N and 1, however large p is.

    Args:
        local: `[B, N, C]`.
        length: `[B]`.
        p: exponent, a scalar above 0.
    """
    valid = valid_rows(local, length)
    # Roots and powers need float32.
    dtype = torch.promote_types(local.dtype, torch.float32)
    rows = local.to(dtype).masked_fill(~valid[..., None], 0).clamp(min=FLOOR)
    largest = rows.amax(1, keepdim=True).detach()
    powers = (rows / largest).pow(p.to(dtype)).masked_fill(~valid[..., None], 0)
    empty = ~valid.any(1)[:, None]
    # An empty sample has the mean 0, whose root has no finite slope.
    mean = (powers.sum(1) / length.to(powers).clamp(min=1)[:, None]).masked_fill(empty, 1)
    return (largest[:, 0] * mean.pow(1 / p.to(dtype))).masked_fill(empty, 0).to(local.dtype)


@AGGREGATORS.register("gem", "a learned power between mean and maximum")
class GeM(Pooling):
    """Generalised mean pooling: one learned exponent, from the average (p = 1) to the maximum (p to infinity).

    The exponent is 1 + softplus of the weight, so that it stays above 1, where no slope grows without bound.
    """

    def __init__(self, local_dim: int, dim: int) -> None:
        super().__init__(local_dim, dim)
        self.weight = nn.Parameter(
            torch.tensor(BEGIN - 1 + math.log(-math.expm1(1 - BEGIN)))
        )  # the inverse of softplus

    @property
    def p(self) -> Tensor:
        """The exponent, a scalar."""
        return 1 + functional.softplus(self.weight)

    def pool(self, local: Tensor, length: Tensor) -> Tensor:
        """Return the generalised mean."""
        return generalised_mean(local, length, self.p)
