"""Learning rates and weight decay of each part, and the cosine of each step."""

import pytest
import torch

from xret.heads.model import FeatureFacts, build_losses, build_model
from xret.heads.recipes.blocks import Optimizer, Schedule
from xret.heads.recipes.recipe import load_recipe
from xret.heads.training.optimisation import build_optimizer, learning_rate

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
