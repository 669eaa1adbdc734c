"""Dropout on a CPU: the same distribution as torch's, from fewer draws."""

import pytest
import torch

from xret.heads.modules.dropout import Dropout, dropout
from xret.pipeline.device import stacking


@pytest.mark.parametrize("rate", [0.1, 0.5, 0.95])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_values_are_dropped_one_by_one_and_the_rest_is_scaled(rate, dtype):
    torch.manual_seed(0)
    x = torch.ones(301, 1003, dtype=dtype, requires_grad=True)
    made = dropout(x, rate, True)
    made.sum().backward()
    assert made.dtype == dtype and torch.equal(x.grad, made)
    assert set(made.unique().tolist()) == {0, made.max().item()}
    assert made.max().item() == pytest.approx(1 / (1 - rate), rel=0.005)
    kept = (made > 0).float()
    deviation = (rate * (1 - rate) / kept.numel()) ** 0.5
    assert kept.mean().item() == pytest.approx(1 - rate, abs=5 * deviation)
    # Values side by side in a row, in a column, and those that share a draw do not depend on each other.
    centred = kept - kept.mean()
    for lag in ((0, 1), (0, 2), (0, 3), (0, 4), (1, 0)):
        moved = centred.roll(lag, (0, 1))
        assert abs((centred * moved).mean().item()) < 5 * rate * (1 - rate) / kept.numel() ** 0.5


def test_heads_computed_together_have_rates_of_their_own():
    generators = [torch.Generator().manual_seed(seed) for seed in (0, 1)]
    with stacking(generators, [0, 1]):
        drop = torch.vmap(lambda x, rate: dropout(x, rate, True), in_dims=(None, 0))
        made = drop(torch.ones(301, 1003), torch.tensor([0.1, 0.5]))
    torch.testing.assert_close((made > 0).float().mean((1, 2)), torch.tensor([0.9, 0.5]), rtol=0, atol=0.005)
    torch.testing.assert_close(made.amax((1, 2)), 1 / torch.tensor([0.9, 0.5]), rtol=0.005, atol=0)


def test_what_is_drawn_follows_from_the_seed():
    def drawn(seed):
        torch.manual_seed(seed)
        return dropout(torch.ones(50, 7), 0.5, True)

    assert torch.equal(drawn(1), drawn(1)) and not torch.equal(drawn(1), drawn(2))


@pytest.mark.parametrize("shape", [(), (0, 3), (5,)])
def test_any_shape(shape):
    assert dropout(torch.ones(shape), 0.3, True).shape == shape


def test_nothing_is_dropped_outside_training_or_at_rate_zero():
    x, layer = torch.randn(4, 5), Dropout(0.5)
    assert layer.eval()(x) is x and Dropout(0.0).train()(x) is x
    assert not torch.equal(layer.train()(x), x)
