"""What pools alone: the width stays, and nothing gives zeros. The contract of all aggregators is in `test_testing`."""

import pytest
import torch

from xret.heads.modules.aggregators import AGGREGATORS
from xret.heads.modules.aggregators.fspool import FSPool
from xret.heads.modules.aggregators.gaussian import TwinBranches
from xret.heads.modules.aggregators.pcme import PCMEPlusPlus
from xret.heads.modules.aggregators.pooling import Average, Pooling
from xret.heads.modules.aggregators.region_graph import RegionGraph


@pytest.mark.parametrize("part", [part for part in AGGREGATORS.values() if issubclass(part, Pooling)])
def test_a_sample_without_rows_is_zero(part):
    found = part(8, 8)(torch.randn(3, 5, 8), torch.tensor([0, 5, 3]), None).embedding
    assert not found[0].any() and found[1:].any(1).all()


@pytest.mark.parametrize(
    ("part", "parameters"),
    [
        (FSPool, {}),
        (Average, {}),
        (RegionGraph, {"then": "average"}),
        (PCMEPlusPlus, {}),
        (TwinBranches, {"of": "average"}),
    ],
)
def test_what_only_pools_keeps_the_width(part, parameters):
    with pytest.raises(ValueError, match="keeps the width of the local rows, which is 3 and not 4"):
        part(3, 4, **parameters)
