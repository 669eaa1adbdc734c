"""Optimisers, learning rates and weight decay of each part, against torch's own."""

import pytest
import torch
from bundled_recipes import faults
from torch import nn
from torch.optim import SGD, lr_scheduler

from xret.heads.model import FeatureFacts, build_losses, build_model
from xret.heads.recipes.blocks import Optimizer, Schedule
from xret.heads.recipes.recipe import load_recipe
from xret.heads.training.optimisation import build_optimizer, drop_frozen, learning_rate, warmup

IMAGES, WORDS = (FeatureFacts("grid", 6, 6),), (FeatureFacts("words", None, None, 11),)


def head():
    recipe = load_recipe("pcmepp", ["model.dim=16", "adapter.words.word_dim=8"])
    return build_model(recipe, IMAGES, WORDS), build_losses(recipe, WORDS)


def groups_of(model, losses, **values):
    groups = build_optimizer(model, losses, Optimizer(lr=0.5, weight_decay=0.1, **values)).param_groups
    return {id(p): (group["factor"], group["weight_decay"]) for group in groups for p in group["params"]}


def test_each_side_of_each_part_has_its_factor():
    factors = {"image_adapter_lr": 2.0, "text_adapter_lr": 3.0}
    model, losses = head()
    found = groups_of(model, losses, aggregator_lr=0.01, loss_lr=11.0, **factors)
    expected = {"image.adapter": 2.0, "text.adapter": 3.0, "image.aggregator": 0.01, "text.aggregator": 0.01}
    for name, parameter in model.named_parameters():
        factor = expected.get(".".join(name.split(".")[:2]), 11.0)
        assert found[id(parameter)][0] == pytest.approx(factor), name


@pytest.mark.parametrize("decay", ["matrices", "sides", "all"])
def test_what_decays(decay):
    model, losses = head()
    found = groups_of(model, losses, decay=decay)
    assert {p.ndim > 1 for p in model.parameters()} == {True, False}
    for name, parameter in model.named_parameters():
        assert found[id(parameter)][1] == (0.1 if decay != "matrices" or parameter.ndim > 1 else 0.0), name
    assert [found[id(one)][1] for one in losses.parameters()] == [0.1 * (decay == "all")] * 2  # scale and shift


@pytest.mark.parametrize(
    ("schedule", "reference", "by"),
    [
        (Schedule(name="cosine", epochs=4), lambda sgd: lr_scheduler.CosineAnnealingLR(sgd, 4), "epoch"),
        (Schedule(name="cosine", by="step", epochs=4), lambda sgd: lr_scheduler.CosineAnnealingLR(sgd, 20), "step"),
        (Schedule(name="linear", epochs=4), lambda sgd: lr_scheduler.LinearLR(sgd, 1.0, 0.0, 4), "epoch"),
        (Schedule(name="linear", by="step", epochs=4), lambda sgd: lr_scheduler.LinearLR(sgd, 1.0, 0.0, 20), "step"),
        (Schedule(name="step", by="step", step=2, gamma=0.3), lambda sgd: lr_scheduler.StepLR(sgd, 2, 0.3), "epoch"),
        (Schedule(name="constant", epochs=4), lambda sgd: lr_scheduler.ConstantLR(sgd, 1.0), "epoch"),
    ],
)
def test_learning_rates_are_those_of_torch(schedule, reference, by):
    sgd = SGD([nn.Parameter(torch.zeros(1))], lr=0.7)
    reference = reference(sgd)
    for step in range(20):  # of five an epoch
        rate = sgd.param_groups[0]["lr"]
        assert learning_rate(schedule, 0.7, step / 5) == pytest.approx(rate, rel=1e-9, abs=1e-12)
        sgd.step()
        if by == "step" or step % 5 == 4:
            reference.step()


def test_the_learning_rate_warms_up_step_by_step():
    schedule = Schedule(epochs=10, warmup_after=1, warmup_epochs=2)
    moments = [0, 0.5, 1, 1.5, 2, 2.75, 3, 9]
    assert [warmup(schedule, now) for now in moments] == [1, 1, 0, 0.25, 0.5, 0.875, 1, 1]
    assert warmup(Schedule(), 0) == 1
    assert warmup(Schedule(epochs=3, warmup_epochs=0.3), 0.15) == pytest.approx(0.5)


@pytest.mark.parametrize(
    ("values", "reference"),
    [
        ({"name": "adam", "beta1": 0.8, "beta2": 0.98}, lambda p: torch.optim.Adam(p, betas=(0.8, 0.98))),
        ({"name": "adamw", "beta2": 0.95}, lambda p: torch.optim.AdamW(p, betas=(0.9, 0.95))),
        ({"name": "sgd", "momentum": 0.5}, lambda p: SGD(p, momentum=0.5)),
    ],
)
def test_a_step_is_that_of_torch(values, reference):
    torch.manual_seed(0)
    ours = build_optimizer(*head(), Optimizer(lr=0.1, weight_decay=0.2, decay="all", **values))
    weights = [p for group in ours.param_groups for p in group["params"]]
    copies = [p.detach().clone().requires_grad_() for p in weights]
    theirs = reference(copies)
    theirs.param_groups[0].update(lr=0.1, weight_decay=0.2)
    for _ in range(3):
        for one, other in zip(weights, copies, strict=True):
            one.grad = torch.randn_like(one)
            other.grad = one.grad.clone()
        ours.step()
        theirs.step()
    torch.testing.assert_close(weights, copies)


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        (["optimizer=rmsprop"], "optimizer.name must be one of adamw, adam, sgd, not 'rmsprop'"),
        (["optimizer.beta1=1"], "optimizer.beta1 must be between 0 and 0.99999, not 1"),
        (["optimizer.ema=1"], "optimizer.ema must be between 0 and 0.99999"),
        (["optimizer.ema=0.9", "optimizer.swa_epochs=1"], "two averages of the weights; choose one"),
    ],
)
def test_what_an_optimiser_does_not_take_is_refused(settings, said):
    assert said in faults("vsepp", *settings)


def test_what_does_not_learn_has_no_part_in_clipping():
    weights = [nn.Parameter(torch.zeros(1)) for _ in range(3)]
    kinds = zip(weights, (1.0, 1.0, 0.0), (0, 2, 0), strict=True)
    optimizer = torch.optim.AdamW([{"params": [one], "factor": factor, "frozen": n} for one, factor, n in kinds])
    for now, kept in ((0.0, [True, False, False]), (1.9, [True, False, False]), (2.0, [True, True, False])):
        for weight in weights:
            weight.grad = torch.ones(1)
        drop_frozen(optimizer, now)
        assert [weight.grad is not None for weight in weights] == kept
