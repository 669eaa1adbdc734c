"""Gaussians: twin branches are the aggregators that they are made of, PCME's and PCME++'s parts are as by hand."""

import math
from typing import get_args

import pytest
import torch
from torch.nn.functional import normalize

from xret.heads.modules.adapters import Adapted
from xret.heads.modules.aggregators import AGGREGATORS
from xret.heads.modules.aggregators.gaussians import Of
from xret.heads.modules.embedding import Gaussian
from xret.nn import GPO, PCME, PCMEPlusPlus, TwinBranches

LENGTH = torch.tensor([5, 1, 3])


def inputs(local_dim=4, dtype=torch.float64):
    generator = torch.Generator().manual_seed(1)
    local, global_ = (torch.randn(*shape, generator=generator, dtype=dtype) for shape in ((3, 5, local_dim), (3, 4)))
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


def deviation_by_hand(head, rows, global_):
    """One sample whose rows are all valid."""
    scores = [(head.attention[2].weight @ torch.tanh(head.attention[0].weight @ row)).item() for row in rows]
    weights = torch.tensor(scores, dtype=rows.dtype).softmax(0)
    log_deviation = head.deviation(sum(w * row for w, row in zip(weights, rows, strict=True)))
    if isinstance(head.summary, torch.nn.Linear):
        return log_deviation + head.summary(global_)
    states, _ = head.summary(rows[None])  # forwards after the last row, backwards after the first
    return log_deviation + torch.cat([states[0, -1, :2], states[0, 0, 2:]])


@pytest.mark.parametrize("summary", ["linear", "gru"])
def test_gaussian_of_pcme_by_hand(summary):
    head = PCME(3, 4, summary=summary).double()
    local, length, global_ = inputs(3)
    mean, log_variance = head(local, length, global_).gaussian
    torch.testing.assert_close(mean, normalize(head.mean(local, length, global_).embedding[:, 0], dim=1))
    for sample, n in enumerate(length.tolist()):
        expected = 2 * deviation_by_hand(head, local[sample, :n], global_[sample])
        torch.testing.assert_close(log_variance[sample], expected)


def test_samples_have_the_moments_of_the_gaussian():
    torch.manual_seed(0)
    head = PCME(3, 4, samples=1000).double()
    aggregated = [head(*inputs(3)) for _ in range(40)]
    mean, log_variance = aggregated[0].gaussian
    deviation = (log_variance / 2).exp()
    samples = torch.cat([one.embedding for one in aggregated], dim=1)
    assert samples.shape == (3, 40_000, 4)
    assert ((samples.mean(1) - mean).abs() < 0.03 * deviation).all()
    assert ((samples.std(1) / deviation - 1).abs() < 0.02).all()


def test_training_draws_anew_and_evaluation_repeats():
    head = PCME(3, 4, samples=3).double()
    assert (head(*inputs(3)).embedding != head(*inputs(3)).embedding).all()
    head.eval()
    first = head(*inputs(3))
    assert torch.equal(first.embedding, head(*inputs(3)).embedding)
    mean, log_variance = first.gaussian
    noise = (first.embedding - mean[:, None]) / (log_variance / 2).exp()[:, None]
    torch.testing.assert_close(noise, head.noise.expand(3, 3, 4))
    # It travels with the weights, and the two branches of a model do not share it.
    other = PCME(3, 4, samples=3).double().eval()
    assert (other.noise != head.noise).all()
    other.load_state_dict(head.state_dict())
    assert torch.equal(first.embedding, other(*inputs(3)).embedding)


def test_pcmepp_is_two_gpos():
    head = PCMEPlusPlus(4, 4).double()
    local, length, global_ = inputs(4)
    aggregated = head(local, length, global_)
    assert isinstance(aggregated.embedding, Gaussian)
    for name, rows in (("mean", local), ("log_variance", head.project(local))):
        gpo = GPO(4, 4).double()
        gpo.load_state_dict(getattr(head, name).state_dict())
        pooled = gpo(rows, length, None).embedding
        expected = normalize(pooled, dim=1) if name == "mean" else pooled
        torch.testing.assert_close(getattr(aggregated.embedding, name), expected)


def test_pcmepp_begins_near_its_bias():
    torch.manual_seed(0)
    head = PCMEPlusPlus(64, 64)
    log_variance = head(torch.zeros(2, 3, 64), torch.tensor([3, 2]), None).embedding.log_variance
    torch.testing.assert_close(log_variance, torch.full((2, 64), -4.0))


def test_what_cannot_be_is_refused():
    with pytest.raises(ValueError, match="PCME: dim is 5, but must be even where summary is 'gru'"):
        PCME(4, 5, summary="gru")
