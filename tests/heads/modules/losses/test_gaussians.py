"""Information bottleneck and uniformity against recorded values, torch's own divergence and a loop over pairs."""

import pytest
import torch
from recorded import DTYPES, assert_near, assert_recorded, bits, leaf, near
from torch.distributions import Normal, kl_divergence
from torch.nn.functional import normalize

from xret.heads.modules.aggregators import Aggregated
from xret.heads.modules.embedding import Gaussian
from xret.heads.modules.losses.gaussians import InformationBottleneck, Uniformity


def information_bottleneck(mean, log_variance):
    """The loss of one side."""
    return InformationBottleneck().of("image", Aggregated(Gaussian(mean, log_variance)))


def uniformity(vectors):
    """The loss of vectors that are all of images."""
    return Uniformity()(None, None, Aggregated(vectors), Aggregated(vectors[:0]))


def sides(data, dtype):
    leaves = {
        f"{side}_{part}": leaf(data, f"soft/in_{side}_{part}", dtype)
        for side in ("img", "txt")
        for part in ("samples", "logsigma")
    }
    images, captions = (
        Aggregated(
            leaves[f"{side}_samples"],
            # The mean is not what the samples have: the code must take theirs.
            gaussian=Gaussian(torch.full((6, 12), 99.0, dtype=dtype), 2 * leaves[f"{side}_logsigma"]),
        )
        for side in ("img", "txt")
    )
    return images, captions, leaves


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("key", ["vib", "uniformity"])
def test_recorded_losses_of_samples(golden, key, dtype):
    data = golden("probabilistic_losses")
    images, captions, leaves = sides(data, dtype)
    loss = (InformationBottleneck(form="pcme") if key == "vib" else Uniformity())(None, None, images, captions)
    if key == "uniformity":  # which reads no more
        leaves = {side: leaves[f"{side}_samples"] for side in ("img", "txt")}
    assert_recorded(data, key, loss, leaves, dtype, "soft/")


@pytest.mark.parametrize("dtype", DTYPES)
def test_recorded_bottleneck_of_gaussians(golden, dtype):
    data = golden("probabilistic_losses")
    images, captions = (
        Aggregated(
            Gaussian(normalize(leaf(data, f"csd/in_{s}_mean", dtype), dim=1), leaf(data, f"csd/in_{s}_logvar", dtype))
        )
        for s in ("img", "txt")
    )
    loss = InformationBottleneck()(None, None, images, captions)
    assert_near(loss, data[f"csd/out{bits(dtype)}_vib1e-4_vib"], near(dtype))


def test_bottleneck_is_the_divergence_from_the_standard_normal():
    mean, log_variance = torch.randn(3, 4, dtype=torch.float64), torch.randn(3, 4, dtype=torch.float64)
    divergence = kl_divergence(Normal(mean, (log_variance / 2).exp()), Normal(0.0, 1.0))
    expected = divergence.mean().item()
    assert information_bottleneck(mean, log_variance).item() == pytest.approx(expected, rel=1e-12)
    mean.requires_grad_()
    assert torch.autograd.gradcheck(lambda m: information_bottleneck(m, log_variance), mean)
    assert information_bottleneck(torch.zeros(2, 3), torch.zeros(2, 3)) == 0


def test_uniformity_of_vectors_far_apart_and_of_one():
    far = torch.tensor([[100.0, 0.0], [0.0, 100.0]], requires_grad=True)
    loss = uniformity(far)
    loss.backward()
    assert loss.item() == pytest.approx(-2 * 20_000)
    assert far.grad.isfinite().all()
    single = torch.ones(1, 3, requires_grad=True)
    uniformity(single).backward()
    assert (single.grad == 0).all()


def test_vectors_and_sets_count_alike():
    images, captions = torch.randn(2, 3), torch.randn(2, 2, 3)
    expected = uniformity(torch.cat([images, captions.flatten(0, 1)]))
    assert Uniformity()(None, None, Aggregated(images), Aggregated(captions)) == expected
