"""PCME's and PCME++'s heads: the parts by hand, the samples' moments, repeatable evaluation, padding."""

import pytest
import torch
from torch.nn.functional import normalize

from xret.heads.modules.aggregators.gpo import GPO
from xret.heads.modules.aggregators.pcme import PCME, PCMEPlusPlus
from xret.heads.modules.embedding import Gaussian

LENGTH = torch.tensor([5, 1, 3])


def inputs(local_dim=3, dtype=torch.float64):
    generator = torch.Generator().manual_seed(1)
    local, global_ = (torch.randn(*shape, generator=generator, dtype=dtype) for shape in ((3, 5, local_dim), (3, 4)))
    return local, LENGTH, global_


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
def test_gaussian_by_hand(summary):
    head = PCME(3, 4, summary=summary).double()
    local, length, global_ = inputs()
    mean, log_variance = head(local, length, global_).gaussian
    torch.testing.assert_close(mean, normalize(head.mean(local, length, global_).embedding[:, 0], dim=1))
    for sample, n in enumerate(length.tolist()):
        expected = 2 * deviation_by_hand(head, local[sample, :n], global_[sample])
        torch.testing.assert_close(log_variance[sample], expected)


def test_samples_have_the_moments_of_the_gaussian():
    torch.manual_seed(0)
    head = PCME(3, 4, samples=1000).double()
    aggregated = [head(*inputs()) for _ in range(40)]
    mean, log_variance = aggregated[0].gaussian
    deviation = (log_variance / 2).exp()
    samples = torch.cat([one.embedding for one in aggregated], dim=1)
    assert samples.shape == (3, 40_000, 4)
    assert ((samples.mean(1) - mean).abs() < 0.03 * deviation).all()
    assert ((samples.std(1) / deviation - 1).abs() < 0.02).all()


def test_training_draws_anew_and_evaluation_repeats():
    head = PCME(3, 4, samples=3).double()
    assert (head(*inputs()).embedding != head(*inputs()).embedding).all()
    head.eval()
    first = head(*inputs())
    assert torch.equal(first.embedding, head(*inputs()).embedding)
    mean, log_variance = first.gaussian
    noise = (first.embedding - mean[:, None]) / (log_variance / 2).exp()[:, None]
    torch.testing.assert_close(noise, head.noise.expand(3, 3, 4))
    # It travels with the weights, and the two branches of a model do not share it.
    other = PCME(3, 4, samples=3).double().eval()
    assert (other.noise != head.noise).all()
    other.load_state_dict(head.state_dict())
    assert torch.equal(first.embedding, other(*inputs()).embedding)


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
