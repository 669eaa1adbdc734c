"""Global discriminative and intra-set divergence loss against recorded values."""

import pytest
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
