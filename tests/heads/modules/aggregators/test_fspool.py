"""Featurewise sort pooling against numpy's interpolation, one feature of one sample at a time."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from xret.heads.modules.aggregators.fspool import FSPool


@settings(max_examples=30)
@given(
    seed=st.integers(0, 1000),
    length=st.lists(st.integers(0, 9), min_size=1, max_size=4),
    pieces=st.integers(1, 12),
)
def test_weights_are_interpolated(seed, length, pieces):
    torch.manual_seed(seed)
    module = FSPool(3, 3).double()
    module.weight = torch.nn.Parameter(torch.randn(pieces + 1, 3, dtype=torch.float64))
    local = torch.randn(len(length), 9, 3, dtype=torch.float64)
    pooled = module(local, torch.tensor(length), None).embedding
    knots = np.linspace(0, 1, pieces + 1)
    for b, rows in enumerate(length):
        places = np.linspace(0, 1, rows) if rows > 1 else np.zeros(rows)
        for column in range(3):
            values = np.sort(local[b, :rows, column].numpy())[::-1]
            weights = np.interp(places, knots, module.weight[:, column].detach().numpy())
            assert pooled[b, column].item() == pytest.approx((weights * values).sum(), rel=1e-9, abs=1e-12)
