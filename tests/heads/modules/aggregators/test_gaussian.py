"""Twin branches: each is the aggregator that it is made of, variances keep their bounds and shape."""

import math
from typing import get_args

import pytest
import torch

from xret.heads.modules.adapters import Adapted
from xret.heads.modules.aggregators import AGGREGATORS
from xret.heads.modules.aggregators.gaussian import Of, TwinBranches
from xret.heads.modules.embedding import Gaussian

LENGTH = torch.tensor([5, 2, 3])


def inputs(dtype=torch.float64):
    generator = torch.Generator().manual_seed(1)
    local, global_ = (torch.randn(*shape, generator=generator, dtype=dtype) for shape in ((3, 5, 4), (3, 4)))
    return local, LENGTH, global_


@pytest.mark.parametrize("of", get_args(Of))
def test_mean_is_the_kind_and_its_twin_shares_nothing(of):
    torch.manual_seed(0)
    twin = TwinBranches(4, 4, of=of).double().eval()
    aggregated = twin(*inputs())
    assert isinstance(aggregated.embedding, Gaussian)
    assert aggregated.gaussian is None
    kind = AGGREGATORS[of](4, 4).double().eval()
    kind.load_state_dict(twin.mean.state_dict())
    expected = kind(*inputs()).embedding
    torch.testing.assert_close(aggregated.embedding.mean, expected / expected.norm(dim=1, keepdim=True))
    assert (aggregated.rows is not None) == (of == "region-graph")
    assert twin.uses_local == (of != "global")
    # The variance has weights of its own, which alone decide it: a branch's, or else those of a second adapter.
    own = [*twin.log_variance.parameters()]
    assert twin.uses_twin == (not own)
    if own:
        aggregated.embedding.log_variance.sum().backward()
        assert all(p.grad is None for p in twin.mean.parameters())
        assert any(p.grad is not None and p.grad.abs().sum() > 0 for p in own)
        assert not {id(p) for p in twin.mean.parameters()} & {id(p) for p in own}


def test_both_branches_are_normalised_alike():
    twin = TwinBranches(4, 4, of="region-graph", normalise="regions")
    assert (twin.mean.normalise, twin.log_variance.normalise) == ("regions", "regions")


def test_average_by_hand():
    local = torch.tensor([[[2.0, 3.0], [4.0, 5.0], [9.0, 9.0]]])
    others = Adapted(torch.tensor([[[-12.0, 5.0]]]), torch.tensor([1]), None)
    mean, log_variance = TwinBranches(2, 2, of="average")(local, torch.tensor([2]), None, others).embedding
    torch.testing.assert_close(mean, torch.tensor([[0.6, 0.8]]))
    torch.testing.assert_close(log_variance, torch.tensor([[-12 / 13, 5 / 13]]))


def test_one_value_keeps_its_bounds():
    twin = TwinBranches(2, 2, of="average", shape="spherical-one-value")
    with torch.no_grad():
        twin.head.weight.copy_(torch.tensor([[100.0, 0.0]]))
    for sign, bound in ((1, 10.0), (-1, 0.1)):
        _, log_variance = twin(torch.full((1, 1, 2), float(sign)), torch.tensor([1]), None).embedding
        torch.testing.assert_close(log_variance, torch.full((1, 2), math.log(bound)))


@pytest.mark.parametrize("shape", ["ellipsoidal", "spherical-average", "spherical-one-value"])
@pytest.mark.parametrize("scale", [0.01, 1.0, 1000.0])
def test_variance_keeps_bounds_and_shape(shape, scale):
    torch.manual_seed(0)
    twin = TwinBranches(4, 4, of="average", shape=shape).double()
    local, length, global_ = inputs()
    mean, log_variance = twin(scale * local, length, global_).embedding
    variance = log_variance.exp()
    assert mean.shape == variance.shape == (3, 4)
    assert ((variance >= 0.1 - 1e-12) & (variance <= 10 + 1e-12)).all()
    same = (variance == variance[:, :1]).all()
    assert same == (shape != "ellipsoidal")


def test_spherical_average_is_the_mean_of_the_ellipsoidal_variances():
    ellipsoidal, spherical = (
        TwinBranches(4, 4, of="seq2seq", shape=shape).double() for shape in ("ellipsoidal", "spherical-average")
    )
    spherical.load_state_dict(ellipsoidal.state_dict())
    expected = ellipsoidal(*inputs()).embedding.log_variance.exp().mean(1, keepdim=True)
    torch.testing.assert_close(spherical(*inputs()).embedding.log_variance.exp(), expected.expand(3, 4))


def test_other_width_of_local_rows():
    # Probabilistic VSE++'s text: twin GRUs over word embeddings.
    twin = TwinBranches(3, 6, of="seq2seq", shape="spherical-one-value")
    assert twin(torch.randn(2, 4, 3), torch.tensor([4, 1]), None).embedding.mean.shape == (2, 6)
