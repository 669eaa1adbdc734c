"""Learning rates and weight decay of each part, and the cosine of each step."""

import pytest
import torch
from torch import nn

from xret.heads.model import FeatureFacts, build_losses, build_model
from xret.heads.recipes.blocks import Optimizer, Schedule
from xret.heads.recipes.recipe import load_recipe
from xret.heads.training.optimisation import build_optimizer, drop_frozen, learning_rate, warmup
from xret.pipeline.errors import RecipeError

IMAGES, WORDS = FeatureFacts("grid", 6, 6), FeatureFacts("words", None, None, 11)


def head():
    recipe = load_recipe("pcmepp", ["model.dim=16", "adapter.words.word_dim=8"])
    return build_model(recipe, IMAGES, WORDS), build_losses(recipe, WORDS)


def groups_of(model, losses, **values):
    groups = build_optimizer(model, losses, Optimizer(lr=0.5, weight_decay=0.1, **values)).param_groups
    return {id(p): (group["factor"], group["weight_decay"]) for group in groups for p in group["params"]}


def test_each_side_of_each_part_has_its_factor():
    factors = {"image_adapter_lr": 2.0, "text_adapter_lr": 3.0, "image_aggregator_lr": 5.0, "text_aggregator_lr": 7.0}
    model, losses = head()
    found = groups_of(model, losses, adapter_lr=0.1, aggregator_lr=0.01, similarity_lr=11.0, **factors)
    expected = {"image.adapter": 0.2, "text.adapter": 0.3, "image.aggregator": 0.05, "text.aggregator": 0.07}
    for name, parameter in model.named_parameters():
        factor = expected.get(".".join(name.split(".")[:2]), 11.0)
        assert found[id(parameter)][0] == pytest.approx(factor), name


def test_without_factors_of_a_side_both_sides_share_their_groups_in_the_order_of_old():
    model, losses = head()
    groups = build_optimizer(model, losses, Optimizer(weight_decay=0.1, aggregator_lr=0.5)).param_groups
    assert [(group["factor"], group["weight_decay"]) for group in groups] == [(1, 0.1), (1, 0), (0.5, 0.1), (0.5, 0)]
    order = [p for side in (model.image, model.text) for p in side.adapter.parameters() if p.ndim > 1]
    assert [id(p) for p in groups[0]["params"]] == [id(p) for p in order]


@pytest.mark.parametrize("decay", ["matrices", "all"])
def test_what_decays(decay):
    model, losses = head()
    found = groups_of(model, losses, decay=decay)
    assert {p.ndim > 1 for p in model.parameters()} == {True, False}
    for name, parameter in model.named_parameters():
        assert found[id(parameter)][1] == (0.1 if decay == "all" or parameter.ndim > 1 else 0.0), name


def test_the_cosine_of_each_step_is_that_of_torch():
    schedule, steps = Schedule(by="step", epochs=4), 5
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=0.7)
    reference = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 4 * steps)
    for epoch in range(4):
        for step in range(steps):
            now = epoch + step / steps
            assert learning_rate(schedule, 0.7, now) == pytest.approx(optimizer.param_groups[0]["lr"], rel=1e-9)
            assert learning_rate(Schedule(epochs=4), 0.7, now) == learning_rate(schedule, 0.7, epoch)
            assert learning_rate(Schedule(name="step", by="step", step=2), 1.0, now) == 0.1 ** (epoch // 2)
            optimizer.step()
            reference.step()


@pytest.mark.parametrize("by", ["step", "epoch"])
def test_linear_is_that_of_torch_and_constant_stays(by):
    schedule, steps = Schedule(name="linear", by=by, epochs=4), 5
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=0.7)
    many = 4 * steps if by == "step" else 4
    reference = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.0, many)
    for number in range(many):
        now = number / steps if by == "step" else number
        assert learning_rate(schedule, 0.7, now) == pytest.approx(optimizer.param_groups[0]["lr"], rel=1e-9)
        assert learning_rate(Schedule(name="constant", by=by, epochs=4), 0.7, now) == 0.7
        optimizer.step()
        reference.step()


def test_a_warm_up_by_its_share_of_the_epochs_is_one_by_its_number():
    share, number = Schedule(epochs=20, warmup_ratio=0.1), Schedule(epochs=20, warmup_epochs=2)
    for now in (0, 0.25, 1, 1.75, 2, 2.5, 19):
        assert warmup(share, now) == warmup(number, now)
    assert warmup(Schedule(epochs=3, warmup_ratio=0.1), 0.15) == pytest.approx(0.5)


@pytest.mark.parametrize(
    ("values", "reference"),
    [
        ({"name": "adam", "beta1": 0.8, "beta2": 0.98}, lambda p: torch.optim.Adam(p, betas=(0.8, 0.98))),
        ({"name": "adamw", "beta2": 0.95}, lambda p: torch.optim.AdamW(p, betas=(0.9, 0.95))),
        ({"name": "sgd", "momentum": 0.5}, lambda p: torch.optim.SGD(p, momentum=0.5)),
    ],
)
def test_a_step_is_that_of_torch(values, reference):
    torch.manual_seed(0)
    model, losses = head()
    ours = build_optimizer(model, losses, Optimizer(lr=0.1, weight_decay=0.2, decay="all", **values))
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


def test_what_an_optimiser_does_not_take_is_refused():
    for settings, said in (
        (["optimizer=rmsprop"], "optimizer.name must be one of adamw, adam, sgd, not 'rmsprop'"),
        (["optimizer.beta1=1"], "optimizer.beta1 must be between 0 and 0.99999, not 1"),
        (["optimizer.betas=0.9"], "optimizer.betas is not a key (did you mean 'optimizer.beta"),
        (["schedule.warmup_ratio=0.1", "schedule.warmup_epochs=1"], "both say how long lr rises; choose one"),
        (["optimizer.ema=0.9", "optimizer.swa_epochs=1"], "two averages of the weights; choose one"),
        (["schedule.epochs=3", "optimizer.swa_epochs=4"], "swa_epochs=4 is more than all epochs, schedule.epochs=3"),
        (["optimizer.ema=1"], "optimizer.ema must be below 1, not 1; 0.999 averages"),
        (
            ["schedule=linaer"],
            "schedule.name must be one of cosine, linear, step, constant, not 'linaer' (did you mean",
        ),
    ):
        with pytest.raises(RecipeError) as caught:
            load_recipe("vsepp", ["loss.triplet.warmup_epochs=0", *settings])
        assert said in str(caught.value)


@pytest.mark.parametrize("name", ["cosine", "step"])
def test_learning_rates_are_those_of_torch(name):
    schedule = Schedule(name=name, epochs=12, step=5, gamma=0.3)
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=0.7)
    if name == "cosine":
        reference = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 12)
    else:
        reference = torch.optim.lr_scheduler.StepLR(optimizer, 5, 0.3)
    for epoch in range(12):
        assert learning_rate(schedule, 0.7, epoch) == pytest.approx(optimizer.param_groups[0]["lr"], rel=1e-9)
        optimizer.step()
        reference.step()


def test_the_learning_rate_warms_up_step_by_step():
    schedule = Schedule(epochs=10, warmup_after=1, warmup_epochs=2)
    moments = [0, 0.5, 1, 1.5, 2, 2.75, 3, 9]
    assert [warmup(schedule, now) for now in moments] == [1, 1, 0, 0.25, 0.5, 0.875, 1, 1]
    assert warmup(Schedule(), 0) == 1


def test_what_does_not_learn_has_no_part_in_clipping():
    weights = [nn.Parameter(torch.zeros(1)) for _ in range(3)]
    groups = [
        {"params": [weight], "factor": factor, "frozen": frozen}
        for weight, factor, frozen in zip(weights, (1.0, 1.0, 0.0), (0, 2, 0), strict=True)
    ]
    optimizer = torch.optim.AdamW(groups)
    for now, kept in ((0.0, [True, False, False]), (1.9, [True, False, False]), (2.0, [True, True, False])):
        for weight in weights:
            weight.grad = torch.ones(1)
        drop_frozen(optimizer, now)
        assert [weight.grad is not None for weight in weights] == kept
