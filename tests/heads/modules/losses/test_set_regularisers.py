"""Global discriminative and intra-set divergence loss against recorded values and by loop."""

import math

import pytest
import torch
from recorded import DTYPES, assert_recorded, leaf

from xret.heads.modules.aggregators import Aggregated
from xret.heads.modules.losses import set_regularisers
from xret.heads.modules.losses.set_regularisers import GlobalDiscriminative, IntraSetDivergence


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("scale", "margin"), [(1, 0), (4, 0.2), (16, 0.5)])
@pytest.mark.parametrize("name", ["gd", "isd"])
def test_recorded_values(golden, monkeypatch, name, scale, margin, dtype):
    monkeypatch.setattr(set_regularisers, "SCALE", scale)
    data = golden("set_regularisers")
    leaves = {"set": leaf(data, "in_set", dtype)}
    if name == "gd":
        leaves["global"] = leaf(data, "in_global", dtype)
        loss = 2 * GlobalDiscriminative(margin=margin).of("image", Aggregated(leaves["set"], global_=leaves["global"]))
    else:
        loss = IntraSetDivergence(margin=margin).of("image", Aggregated(leaves["set"]))
    assert_recorded(data, f"{name}_s{scale}_m{margin}", loss, leaves, dtype)


def cos(x, y):
    return (x @ y / (x.norm() * y.norm())).item()


def test_loops_over_elements_and_pairs_of_both_sides(monkeypatch):
    monkeypatch.setattr(set_regularisers, "SCALE", 2)
    discriminative, divergence, sides = [], [], []
    for count, k in ((3, 4), (5, 2)):
        elements, global_ = torch.randn(count, k, 5).double(), torch.randn(count, 5).double()
        sides.append(Aggregated(elements, global_=global_))
        own = [math.exp(2 * (cos(x, g) - 0.3)) for row, g in zip(elements, global_, strict=True) for x in row]
        pairs = [math.exp(2 * (cos(row[i], row[j]) - 0.3)) for row in elements for j in range(k) for i in range(j)]
        discriminative.append(sum(own) / len(own))
        divergence.append(sum(pairs) / len(pairs))
    # Eq. 7 halves the sum of both sides, eq. 8 does not.
    assert GlobalDiscriminative(margin=0.3)(None, None, *sides).item() == pytest.approx(sum(discriminative) / 2)
    assert IntraSetDivergence(margin=0.3)(None, None, *sides).item() == pytest.approx(sum(divergence))
