"""Match probability of cosines and of samples: slow loops, distant pairs, training; with recorded values in losses/."""

import math

import pytest
import torch
from torch.nn.functional import softplus

from xret.heads.modules.similarity.samples import (
    MatchProbability,
    MonteCarloMatch,
    match_probability,
    monte_carlo_log_odds,
)


def samples(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def monte_carlo_match(*samples_and_parameters, **link):
    """The match probability itself, `[I, C]`."""
    return monte_carlo_log_odds(*samples_and_parameters, **link).sigmoid()


def begun_at(module, scale, shift):
    with torch.no_grad():
        module.log_scale.fill_(math.log(scale))
        module.shift.fill_(shift)
    return module


def sigmoid(x):
    return 1 / (1 + math.exp(-x))


@pytest.mark.parametrize(("k1", "k2"), [(1, 1), (2, 5), (5, 3)])
def test_agrees_with_a_loop_over_pairs(k1, k2):
    images, captions = samples(3, k1, 6), samples(4, k2, 6, seed=1)
    cosine = torch.nn.functional.cosine_similarity
    for i, image in enumerate(images):
        for c, caption in enumerate(captions):
            pairs = [(x, y) for x in image for y in caption]
            logits = [1.5 - 2 * math.sqrt(((x - y) ** 2).sum() + 1e-6) for x, y in pairs]
            expected = {
                match_probability: sum(sigmoid(2 * cosine(x, y, dim=0).item() + 1.5) for x, y in pairs) / len(pairs),
                monte_carlo_match: sum(sigmoid(2 * logit) for logit in logits) / len(pairs),
            }
            for compare, value in expected.items():
                assert compare(images, captions, 2.0, 1.5)[i, c].item() == pytest.approx(value, rel=1e-12)
            plain = monte_carlo_match(images, captions, 2.0, 1.5, link="logistic")[i, c].item()
            assert plain == pytest.approx(sum(map(sigmoid, logits)) / len(pairs), rel=1e-12)


def test_near_samples_far_from_zero_are_told_apart_in_float32():
    near = torch.full((1, 1, 64), 10.0)
    others = near + torch.tensor([0.001, 0.002, 0.003])[:, None, None]
    distance = (1.0 - monte_carlo_log_odds(near, others, 1.0, 1.0, link="logistic"))[0]
    # 64 dimensions: 8 times the difference of each, which float32 itself holds to 1e-6 here.
    torch.testing.assert_close(distance, torch.tensor([0.008, 0.016, 0.024]), rtol=0.01, atol=1e-6)


def test_log_odds_rank_and_train_where_the_probability_is_rounded():
    images = torch.zeros(1, 2, 3, requires_grad=True)
    captions = torch.tensor([0.0, 20.0, 30.0])[:, None, None].expand(3, 2, 3)
    probability = monte_carlo_match(images, captions, 15.0, 15.0)
    assert probability.tolist() == [[1, 0, 0]]
    odds = monte_carlo_log_odds(images, captions, 15.0, 15.0)
    assert odds[0, 0] > 25 > 0 > odds[0, 1] > odds[0, 2]
    softplus(-odds[0, 2]).backward()
    assert images.grad.isfinite().all()
    assert (images.grad < 0).all()


@pytest.mark.parametrize("part", [MatchProbability, MonteCarloMatch])
def test_scale_and_shift_train_and_the_scale_stays_positive(part):
    similarity = begun_at(part(), 2.0, 0.5)
    images, captions = samples(4, 2, 6).float(), samples(4, 2, 6, seed=1).float()
    optimizer = torch.optim.AdamW(similarity.parameters(), lr=0.5)

    def probability():
        found = similarity(images, captions)
        return found.sigmoid() if part is MonteCarloMatch else found

    before = probability().detach()
    for _ in range(20):
        optimizer.zero_grad()
        (probability().sum() + 3 * similarity.scale).backward()
        optimizer.step()
    assert 0 < similarity.scale.item() < 1
    assert similarity.shift.item() < 0
    assert probability().sum() < before.sum() / 2


def test_modules_use_their_parameters():
    images, captions = samples(3, 2, 4), samples(2, 3, 4, seed=1)
    module = begun_at(MonteCarloMatch(link="logistic").double(), 2.0, 1.0)
    expected = monte_carlo_log_odds(images, captions, 2.0, 1.0, link="logistic")
    torch.testing.assert_close(module(images, captions).detach(), expected, rtol=1e-6, atol=1e-6)
    odds = begun_at(MonteCarloMatch().double(), 2.0, 1.0)(images, captions).detach()
    torch.testing.assert_close(odds.sigmoid(), monte_carlo_match(images, captions, 2.0, 1.0), rtol=1e-6, atol=1e-6)
    p = begun_at(MatchProbability().double(), 2.0, 1.0)(images, captions).detach()
    torch.testing.assert_close(p, match_probability(images, captions, 2.0, 1.0), rtol=1e-6, atol=1e-6)


def test_wrong_values_are_refused():
    with pytest.raises(ValueError, match="sets"):
        monte_carlo_match(torch.ones(2, 3), torch.ones(2, 2, 3), 1.0, 0.0)
