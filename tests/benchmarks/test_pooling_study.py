"""The synthetic pooling study: known poolings by hand, and a generator that learns one."""

import pytest
import torch
from benchmarks import pooling_study
from benchmarks.pooling_study import coefficient_error, pattern, study

from xret.heads.modules.aggregators.gpo import GPO
from xret.heads.modules.aggregators.pooling import k_max_rows


@pytest.mark.parametrize(
    ("name", "rows", "weights"),
    [
        ("A", 4, [0.25, 0.25, 0.25, 0.25]),
        ("M-1", 3, [1, 0, 0]),
        ("M-10", 12, [0.1] * 10 + [0, 0]),
        ("M-10", 2, [0.5, 0.5]),
        ("T-50%", 5, [0.5, 0.5, 0, 0, 0]),
        ("T-50%", 1, [1]),
        ("L", 4, [3 / 6, 2 / 6, 1 / 6, 0]),
        ("L", 1, [1]),
    ],
)
def test_patterns_by_hand(name, rows, weights):
    assert pattern(name, rows).tolist() == pytest.approx(weights)


def test_the_error_is_that_of_a_loop():
    torch.manual_seed(0)
    pooling = GPO(4, 4)
    squares = []
    for rows in (2, 3, 4):
        given, wanted = pooling.coefficients(torch.tensor([rows]))[0], pattern("M-1", rows)
        squares += [(a - b) ** 2 for a, b in zip(given.tolist(), wanted.tolist(), strict=True)]
    assert coefficient_error(pooling, "M-1", range(2, 5)) == pytest.approx((sum(squares) / 9) ** 0.5)


def test_what_is_learned_is_the_pooling_of_the_pattern(monkeypatch):
    """What a step wants is what `k_max_rows` makes of the same features, without coefficients or sorted rows."""
    compared = []

    class Watched(GPO):
        def forward(self, local, length, global_):
            compared.append((local, length))
            return super().forward(local, length, global_)

    monkeypatch.setattr(pooling_study.functional, "mse_loss", lambda pooled, target: compared.append(target))
    pooling = Watched(pooling_study.DIM, pooling_study.DIM, generator="interpolation")
    pooling_study._step(pooling, {rows: pattern("M-10", rows) for rows in pooling_study.TRAINED})
    (local, length), target = compared
    assert length.min() >= 20
    assert len(length.unique()) > 1
    torch.testing.assert_close(target, k_max_rows(local, length, 10))


@pytest.mark.parametrize(("name", "most"), [("A", 1e-6), ("L", 0.02)])
def test_interpolation_learns_what_it_can_express(name, most):
    """It begins as the average."""
    found = study("interpolation", name, steps=40)
    assert (found.generator, found.pattern, found.steps) == ("interpolation", name, 40)
    assert found.seen < most


def test_a_generator_learns_and_the_same_words_give_the_same():
    found = study("cos-sin-mlp", "M-1", steps=60)
    assert found.seen < 0.5 * study("cos-sin-mlp", "M-1", steps=1).seen
    assert found == study("cos-sin-mlp", "M-1", steps=60)
