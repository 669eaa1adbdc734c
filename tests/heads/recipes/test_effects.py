"""Keys that another key leaves unread: what is said of them, and that they change no weight and no embedding."""

import pytest
import torch

from xret.heads.ablation.plan import make_plan, plan_variation
from xret.heads.model import FeatureFacts, build_losses, build_model
from xret.heads.recipes.effects import require_effect, unread
from xret.heads.recipes.recipe import changed, load_recipe
from xret.heads.training.optimisation import build_optimizer, drop_frozen, learning_rate, set_rates, warmup, weights_of
from xret.pipeline.errors import RecipeError

SMALL = ["model.dim=8"]
BESIDE = {  # settings that leave another one unread
    "similarity.lambda_lse=19": ["similarity.pooling=average"],
    "similarity.top=2": ["similarity.inference=assignment"],
    "loss.infonce.logarithm=true": ["loss.infonce.learned=false"],
    "aggregator.text.hidden_dim=8": ["aggregator.text.generator=interpolation"],
    "loss.triplet.warmup_epochs=2": ["loss.triplet.negatives=all"],
}


def refusal(name, *settings, varied=()):
    with pytest.raises(RecipeError) as caught:
        require_effect([load_recipe(name, [*SMALL, *settings])], settings, varied=varied)
    return str(caught.value)


@pytest.mark.parametrize(
    ("name", "setting", "said"),
    [
        ("mlp", "adapter.grid.depth=4", "adapter.grid.layers is mlp: leave it out, or set adapter.grid.layers=blocks"),
        ("linear", "adapter.grid.hidden_dropout=0.5", "adapter.grid.layers is linear"),
        ("linear", "adapter.words.hidden=16", "adapter.words.layers is linear"),
        ("sail", "adapter.grid.batch_norm=false", "adapter.grid.layers is gated"),
        ("vsepp", "adapter.words.hidden_dropout=0.5", "adapter.words.encoder is gru"),
        ("mlp", "adapter.words.state_dropout=0.5", "adapter.words.encoder is bag"),
        ("mlp", "schedule.gamma=0.5", "schedule.name is cosine: leave it out, or set schedule.name=step"),
        (
            "setdiv",
            "loss.infonce.smoothing=0.1",
            "loss.infonce.weight is 0: leave it out, or set",
        ),
        ("setdiv-small", "loss.triplet.margin=0.1", "loss.triplet.weight is 0: leave it out"),
        (
            "scan",
            "similarity.lambda_lse=19",
            "similarity.pooling is average: leave it out, or set similarity.pooling=lse",
        ),
        (
            "mlp",
            "schedule.warmup_after=2",
            "schedule.warmup_epochs is 0: leave it out, or set schedule.warmup_epochs=1 or schedule.warmup_ratio",
        ),
        ("vsepp", "loss.triplet.warmup=linear", "loss.triplet.warmup_epochs is 0: leave it out, or set"),
        ("maxmatch", "similarity.top=2", "similarity.inference is assignment: leave it out, or set"),
        ("linear", "loss.infonce.logarithm=true", "loss.infonce.learned is False: leave it out, or set"),
        ("vse-infty", "aggregator.text.hidden_dim=8", "aggregator.text.generator is interpolation: leave it out"),
        ("vse-infty", "loss.triplet.warmup_epochs=2", "loss.triplet.negatives is all: leave it out, or set"),
        ("mlp", "optimizer.momentum=0.5", "optimizer.name is adamw: leave it out, or set optimizer.name=sgd"),
        ("vsepp", "optimizer.decay=all", "optimizer.weight_decay is 0.0: leave it out, or set"),
        ("mlp", "augment.image_varies=true", "augment.image is 0.0: leave it out, or set augment.image=0.2"),
    ],
)
def test_a_setting_that_decides_nothing_is_refused(name, setting, said):
    message = refusal(name, setting, *BESIDE.get(setting, []))
    assert message.startswith(f"recipe '{name}' cannot be used: {setting.partition('=')[0]} has no effect while {said}")


def test_schedules_that_do_not_fall_are_not_asked_how_often():
    assert "schedule.by has no effect" in refusal("mlp", "schedule=constant", "schedule.by=step")


def test_what_is_read_is_no_fault():
    settings = ["adapter.grid.layers=blocks", "adapter.grid.depth=2", "schedule=step", "schedule.step=3"]
    require_effect([load_recipe("mlp", settings)], settings)


def test_a_key_that_a_varied_one_may_let_in_is_no_fault():
    settings = ["adapter.grid.hidden=16"]
    require_effect([load_recipe("linear", settings)], settings, varied=["adapter.grid.layers"])
    plan = plan_variation("linear", ["adapter.grid.layers=linear,mlp"], [*SMALL, *settings])
    assert [variant.recipe.adapter["grid"]["hidden"] for variant in plan.variants] == [16, 16]


def test_either_length_of_a_warm_up_lets_its_beginning_in():
    for length in ("schedule.warmup_epochs=2", "schedule.warmup_ratio=0.1"):
        settings = ["schedule.warmup_after=2", length]
        require_effect([load_recipe("mlp", settings)], settings)
        require_effect([load_recipe("mlp", settings[:1])], settings[:1], varied=[length.partition("=")[0]])
    assert "optimizer.beta1 has no effect" in refusal("mlp", "optimizer=sgd", "optimizer.beta1=0.8")


def test_what_switches_nothing_on_is_no_fault():
    settings = ["augment.image=0", "augment.image_varies=false", "adapter.grid.depth=1"]
    require_effect([load_recipe("vse-infty", settings)], settings)


def test_of_keys_that_vary_together_one_has_to_decide_something():
    plan_variation("setdiv-small", ["adapter.roi.hidden_dropout,adapter.words.hidden_dropout=0,0.3"], SMALL)
    with pytest.raises(RecipeError, match=r"adapter\.grid\.depth has no effect"):
        plan_variation("mlp", ["adapter.grid.depth,adapter.roi.depth=1,4"], SMALL)


def test_a_setting_of_a_grid_decides_something_in_one_of_its_cells():
    with pytest.raises(RecipeError, match=r"schedule\.gamma has no effect while schedule\.name is cosine"):
        make_plan(grid="setdiv-table4", settings=["schedule.gamma=0.3"])


def test_a_setting_may_decide_something_in_a_baseline_alone():
    varied = "vsepp", ["loss.triplet.margin=0.1,0.2"]
    make_plan(*varied, settings=["optimizer.decay=all"], baselines=["linear"])  # which has weight decay
    with pytest.raises(RecipeError, match=r"optimizer\.decay has no effect while optimizer\.weight_decay is 0\.0"):
        make_plan(*varied, settings=["optimizer.decay=all"])
    with pytest.raises(RecipeError, match=r"^recipe 'vsepp' cannot be used: schedule\.gamma has no effect"):
        make_plan(*varied, settings=["schedule=cosine", "schedule.gamma=0.3"], baselines=["linear"])


def test_a_variation_of_what_decides_nothing_is_refused():
    with pytest.raises(RecipeError, match=r"adapter\.grid\.depth has no effect while adapter\.grid\.layers is mlp"):
        plan_variation("mlp", ["adapter.grid.depth=1,4"], SMALL)


@pytest.mark.parametrize("name", ["linear", "mlp", "sail", "fusemix", "vsepp"])
def test_what_is_called_unread_changes_no_embedding(name):
    """Each of these keys takes another value; the head stays the same, in training too."""
    recipe = load_recipe(name, SMALL)
    facts = FeatureFacts("grid", 6, 6), FeatureFacts("words", None, None, 9)
    others = {"batch_norm": "false", "bidirectional": "false", "layers": "gated"}
    if name == "fusemix":
        recipe = changed(recipe, ["augment.mix=0"])  # of words there is nothing to blend
    expected = embedded(recipe, *facts)
    keys = [key for key in unread(recipe) if key.startswith(("adapter.grid.", "adapter.words."))]
    for key in keys:
        value = others.get(key.rpartition(".")[2], "0.5" if "dropout" in key else "3")
        assert torch.equal(expected, embedded(changed(recipe, [f"{key}={value}"]), *facts)), key
    assert keys


def embedded(recipe, image, text):
    torch.manual_seed(0)
    model = build_model(recipe, image, text).train()
    length = torch.tensor([3, 2])
    rows = torch.arange(36.0).view(2, 3, 6).cos()
    one = model.image.adapter(length, rows, rows.mean(1))
    other = model.text.adapter(length, token=torch.tensor([[1, 2, 3], [4, 5, 0]]))
    return torch.cat([one.global_, other.global_])


def test_what_is_called_unread_of_an_optimizer_changes_no_group():
    facts = FeatureFacts("grid", 6, 6), FeatureFacts("words", None, None, 9)
    for name, others in (("sgd", ["beta1=0.5", "beta2=0.5"]), ("adamw", ["momentum=0.5"]), ("adam", ["decay=all"])):
        recipe = load_recipe("vsepp", [*SMALL, f"optimizer={name}", "optimizer.weight_decay=0"])
        for other in others:
            key = f"optimizer.{other.partition('=')[0]}"
            assert key in unread(recipe)
            assert groups(changed(recipe, [f"optimizer.{other}"]), *facts) == groups(recipe, *facts), key
    still = changed(load_recipe("setdiv", SMALL), ["optimizer.aggregator_lr=0"])
    for other in ("image_aggregator_lr=0.5", "aggregator_frozen=2"):
        found = changed(still, [f"optimizer.{other}"])
        assert f"optimizer.{other.partition('=')[0]}" in unread(found)
        assert rates(found, *facts) == rates(still, *facts)


def groups(recipe, image, text):
    """Return all that an optimiser does with each group of weights."""
    optimizer = build_optimizer(build_model(recipe, image, text), build_losses(recipe, text), recipe.optimizer)
    return [{key: value for key, value in group.items() if key != "params"} for group in optimizer.param_groups]


def rates(recipe, image, text):
    """Return every weight's learning rate after each of three epochs, and whether it has a gradient then."""
    model, losses = build_model(recipe, image, text), build_losses(recipe, text)
    optimizer, found = build_optimizer(model, losses, recipe.optimizer), []
    for now in (0.0, 1.0, 2.0):
        for parameter in (weights := weights_of(model, losses)):
            parameter.grad = torch.ones_like(parameter)
        set_rates(optimizer, recipe.schedule, 0.1, now)
        drop_frozen(optimizer, now)
        of = {parameter: group["lr"] for group in optimizer.param_groups for parameter in group["params"]}
        found += [(of[parameter], parameter.grad is None) for parameter in weights]
    return found


def test_what_is_called_unread_of_a_schedule_changes_no_rate():
    for name, settings in (("cosine", ["gamma=0.5", "step=3"]), ("step", ["by=step"]), ("constant", ["by=step"])):
        recipe = changed(load_recipe("mlp", SMALL), [f"schedule={name}"])
        for setting in settings:
            other = changed(recipe, [f"schedule.{setting}"])
            assert f"schedule.{setting.partition('=')[0]}" in unread(other)
            for now in (0.0, 3.5, 12.25, 39.9):
                assert learning_rate(other.schedule, 1.0, now) == learning_rate(recipe.schedule, 1.0, now)
    early, late = (changed(load_recipe("mlp", SMALL), [f"schedule.warmup_after={after}"]) for after in (0, 3))
    assert "schedule.warmup_after" in unread(late)
    assert all(warmup(one.schedule, now) == 1 for one in (early, late) for now in (0.0, 3.5, 39.9))
