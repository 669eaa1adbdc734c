"""Similarities of Gaussians against recorded values, torch's own divergences and slow loops; neighbouring Gaussians."""

import pytest
import torch
from recorded import DTYPES, assert_recorded, leaf
from torch.distributions import Independent, Normal, kl_divergence

from xret.heads.modules.embedding import Gaussian
from xret.heads.modules.similarity.gaussian import KL, MinKL, SampledDistance, Wasserstein

RECORDED = {
    "neg_kl_img_cap": KL(),
    "neg_kl_cap_img": KL("caption-image"),
    "neg_min_kl": MinKL(),
    "neg_w2": Wasserstein(),
    "neg_w2_printed_variance": Wasserstein(form="printed"),
}
ALL = {**RECORDED, "sampled": SampledDistance()}


def gaussians(count, width, seed=0):
    generator = torch.Generator().manual_seed(seed)
    mean, log_variance = torch.randn(2, count, width, generator=generator, dtype=torch.float64)
    return Gaussian(mean, log_variance)


def by_loop(name, x, y):
    """Evaluate one similarity of two Gaussians, each a mean and a log variance `[D]`, from its definition."""
    first, second = (Independent(Normal(mean, (log / 2).exp()), 1) for mean, log in (x, y))
    kl, other_kl = kl_divergence(first, second), kl_divergence(second, first)
    (mean, log), (other_mean, other_log) = x, y
    apart = (mean - other_mean).square().sum()
    cov, other_cov = log.exp().diag(), other_log.exp().diag()
    cross = (cov.sqrt() @ other_cov @ cov.sqrt()).sqrt()  # of diagonal matrices, element by element
    squared = apart + (cov + other_cov - 2 * cross).trace()
    unit, other_unit = mean / mean.norm(), other_mean / other_mean.norm()
    return {
        "neg_kl_img_cap": -kl,
        "neg_kl_cap_img": -other_kl,
        "neg_min_kl": -min(kl, other_kl),
        "neg_w2": -squared.sqrt(),
        "neg_w2_printed_variance": -(apart + (log.exp() - other_log.exp()).square().sum()).sqrt(),
        "sampled": -((unit - other_unit).square().sum() + log.exp().sum() + other_log.exp().sum()),
    }[name]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", RECORDED)
def test_recorded_values_and_gradients(golden, name, dtype):
    data, parts = golden("gaussian_similarity"), ("img_mean", "img_logvar", "txt_mean", "txt_logvar")
    leaves = {part: leaf(data, f"in_{part}", dtype) for part in parts}
    *images, mean, log_variance = leaves.values()
    similarity = RECORDED[name](Gaussian(*images), Gaussian(mean, log_variance))
    assert similarity.dtype == dtype
    assert_recorded(data, name, similarity, leaves, dtype, weights=data["in_cotangent"])


@pytest.mark.parametrize("width", [1, 7])
@pytest.mark.parametrize("name", ALL)
def test_agrees_with_a_loop_over_pairs(name, width):
    images, captions = gaussians(3, width), gaussians(4, width, seed=1)
    similarity = ALL[name](images, captions)
    for i, x in enumerate(zip(*images, strict=True)):
        for c, y in enumerate(zip(*captions, strict=True)):
            torch.testing.assert_close(similarity[i, c], by_loop(name, x, y), rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("offset", [0.0, 1.0, 100.0])
@pytest.mark.parametrize("name", RECORDED)
def test_near_gaussians_are_told_apart_in_float32(name, offset):
    # Differences of a hundredth of a standard deviation on top of a large common mean, 512 dimensions.
    base = gaussians(1, 512)
    noise = gaussians(3, 512, seed=1)
    mean = (offset + base.mean + 0.01 * noise.mean).float()
    log_variance = (base.log_variance - 2 + 0.01 * noise.log_variance).float()
    gaussian = Gaussian(mean, log_variance)
    similarity = ALL[name](gaussian, gaussian)
    assert similarity.dtype == torch.float32
    rows = list(zip(mean.double(), log_variance.double(), strict=True))
    for i, x in enumerate(rows):
        for c, y in enumerate(rows[:i]):
            torch.testing.assert_close(similarity[i, c].double(), by_loop(name, x, y), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("name", RECORDED)
def test_equal_gaussians_are_at_distance_zero_with_a_finite_gradient(name):
    gaussian = gaussians(3, 5)
    mean, log_variance = (part.float().requires_grad_() for part in gaussian)
    similarity = RECORDED[name](Gaussian(mean, log_variance), Gaussian(mean.detach(), log_variance.detach()))
    torch.testing.assert_close(similarity.diagonal(), torch.zeros(3), atol=1e-6, rtol=0)
    similarity.diagonal().sum().backward()
    assert mean.grad.abs().max() < 2
    assert log_variance.grad.abs().max() < 2


def test_variances_at_the_bounds_of_the_paper_are_finite():
    mean = 30 * torch.randn(4, 1024, generator=torch.Generator().manual_seed(0))
    bounds = torch.tensor([0.1, 10.0]).log()[torch.arange(4) % 2][:, None].expand(4, 1024)
    for compare in ALL.values():
        assert compare(Gaussian(mean, bounds), Gaussian(mean.flip(0), bounds)).isfinite().all()


@pytest.mark.parametrize("similarity", [Wasserstein(), SampledDistance()])
def test_the_points_nearest_to_a_query_are_those_of_the_best_scores(similarity):
    images, captions = gaussians(30, 4), gaussians(7, 4, seed=1)
    distances = torch.cdist(similarity.points(captions, query=True), similarity.points(images, query=False))
    assert torch.equal(distances.argsort(1), similarity(images, captions).T.argsort(1, descending=True))
