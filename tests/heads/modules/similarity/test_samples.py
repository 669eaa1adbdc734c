"""Match probability of cosines and of samples: slow loops, distant pairs, training; with recorded values in losses/."""

import math

import pytest
import torch
from torch.nn.functional import softplus

from xret.heads.modules.similarity.samples import (
    MatchProbability,
    MonteCarloMatch,
    monte_carlo_log_odds,
)


def samples(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


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
    by_cosine, by_distance, logistic = (
        begun_at(module, 2.0, 1.5)(images, captions)
        for module in (MatchProbability(), MonteCarloMatch(), MonteCarloMatch(link="logistic"))
    )
    for i, image in enumerate(images):
        for c, caption in enumerate(captions):
            pairs = [(x, y) for x in image for y in caption]
            cosines = [torch.cosine_similarity(x, y, dim=0).item() for x, y in pairs]
            logits = [1.5 - 2 * math.sqrt(((x - y) ** 2).sum() + 1e-6) for x, y in pairs]
            for found, terms in (
                (by_cosine[i, c], [sigmoid(2 * cosine + 1.5) for cosine in cosines]),
                (by_distance[i, c].sigmoid(), [sigmoid(2 * logit) for logit in logits]),
                (logistic[i, c].sigmoid(), [sigmoid(logit) for logit in logits]),
            ):
                assert found.item() == pytest.approx(sum(terms) / len(pairs), rel=1e-6)


def test_near_samples_far_from_zero_are_told_apart_in_float32():
    near = torch.full((1, 1, 64), 10.0)
    others = near + torch.tensor([0.001, 0.002, 0.003])[:, None, None]
    distance = (1.0 - monte_carlo_log_odds(near, others, 1.0, 1.0, link="logistic"))[0]
    # 64 dimensions: 8 times the difference of each, which float32 itself holds to 1e-6 here.
    torch.testing.assert_close(distance, torch.tensor([0.008, 0.016, 0.024]), rtol=0.01, atol=1e-6)


def test_log_odds_rank_and_train_where_the_probability_is_rounded():
    images = torch.zeros(1, 2, 3, requires_grad=True)
    captions = torch.tensor([0.0, 20.0, 30.0])[:, None, None].expand(3, 2, 3)
    odds = monte_carlo_log_odds(images, captions, 15.0, 15.0)
    assert odds.sigmoid().tolist() == [[1, 0, 0]]
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
