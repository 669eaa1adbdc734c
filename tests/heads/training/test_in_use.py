"""Keys that change nothing, for what the features are."""

import pytest
import torch
from command_line import refused
from small_store import make_store

from xret.heads.model import FeatureFacts, build_losses, build_model
from xret.heads.recipes.recipe import changed, load_recipe
from xret.heads.training.in_use import not_in_use, require_in_use, settings_not_in_use
from xret.heads.training.optimisation import build_optimizer
from xret.heads.training.training import train
from xret.pipeline.errors import RecipeError
from xret.pipeline.reading.features import Features

GRID, WORDS, TOKENS = FeatureFacts("grid", 5, 5), FeatureFacts("words", None, None, 9), FeatureFacts("tokens", 6, 6)
GLOBAL = FeatureFacts("global", None, 5)  # adapted as a grid is


def head(name, *settings, image=GRID, text=TOKENS):
    return load_recipe(name, ["model.dim=8", *settings]), image, text


def test_a_key_that_one_of_several_heads_reads_is_in_use():
    key = "adapter.tokens.noise"
    words, joined = head("vsepp", text=WORDS), head("vsepp", text=(WORDS, TOKENS))
    assert not not_in_use(key, [words, joined])
    assert not not_in_use("optimizer.lr", [words])
    for heads in ([words, words], [words, head("vsepp", image=GLOBAL, text=WORDS)]):
        said = f"{key} is not in use with these features: take a key of adapter.grid or adapter.words"
        assert not_in_use(key, heads) == said
    assert not_in_use("adapter.roi.noise", [joined]).endswith("of adapter.grid or adapter.words or adapter.tokens")
    require_in_use([f"{key}=0.5"], *joined)
    with pytest.raises(RecipeError, match=r"^adapter\.tokens\.noise is not in use with these features: take a key of"):
        require_in_use([f"{key}=0"], *words)


@pytest.mark.parametrize(
    ("key", "one", "in_use"),
    [
        ("augment.image", head("linear"), False),  # the cached global feature
        ("augment.image_varies", head("linear"), False),
        ("augment.image", head("linear", image=GLOBAL), False),
        ("augment.image", head("linear", "adapter.grid.global=pooled"), True),
        ("augment.image", head("linear", "aggregator.image=average"), True),
        ("augment.image", head("linear", image=(GLOBAL, FeatureFacts("roi", 5, 5))), True),  # the mean of regions
        ("augment.text", head("linear"), True),  # the mean of the tokens
        ("augment.text", head("linear", "adapter.tokens.global=cached"), False),
        ("augment.text", head("linear", text=WORDS), True),
        ("augment.text", head("fusemix"), False),  # the mean is blended with another
        ("augment.text", head("fusemix", "augment.mix=0"), True),
        ("augment.image", head("setdiv"), True),
    ],
)
def test_rows_can_be_left_out_where_rows_are_read(key, one, in_use):
    said = not_in_use(key, [one])
    assert bool(said) is not in_use
    assert in_use or f"{key} has no effect where one vector is read of each " in said
    assert not not_in_use(key, [one, head("setdiv")])


def test_features_that_are_global_alone_are_taken_as_they_are():
    key, one = "adapter.grid.global", head("linear", "adapter.grid.global=pooled", image=GLOBAL)
    said = f"{key} has no effect on features that are global alone: leave it out"
    assert not_in_use(key, [one]) == said
    assert settings_not_in_use([f"{key}=pooled"], [one]) == [said]
    assert settings_not_in_use([f"{key}=cached"], [head("linear", image=GLOBAL)]) == []
    assert settings_not_in_use([f"{key}_layer=own"], [head("linear", f"{key}_layer=own", image=GLOBAL)])
    assert "is not in use" in settings_not_in_use(["adapter.roi.global=cached"], [one])[0]
    assert settings_not_in_use([f"{key}=pooled"], [head("linear", f"{key}=pooled", image=(GLOBAL, GRID))]) == []


UNREAD = (
    "{} has no effect where the global feature is not read: leave it out, or take an aggregator that reads it, such"
)
UNSHARED = "{} has no effect where rows and global feature have no layers to share: leave it out"
ALONE = ("aggregator.image.global_feature=false", "aggregator.text.global_feature=false")
FROZEN = {"image": FeatureFacts("grid", 5, 8, space="clip"), "text": FeatureFacts("tokens", 6, 8, space="clip")}


@pytest.mark.parametrize(
    ("one", "of_global", "of_layer"),
    [
        (head("vse-infty"), UNREAD, UNREAD),
        (head("setdiv"), "", ""),
        (head("setdiv", ALONE[0]), UNREAD, UNREAD),
        (head("setdiv", ALONE[1]), "", ""),
        (head("maxmatch", *ALONE), "", ""),  # its loss reads it
        (head("maxmatch", *ALONE, "loss.global-discriminative.weight=0"), UNREAD, UNREAD),
        (head("maxmatch", *ALONE, "model.residual=true", **FROZEN), UNREAD, UNREAD),  # it then reads the frozen one
        (head("maxmatch", "model.residual=true", **FROZEN), "", ""),
        (head("linear"), "", UNSHARED),
        (head("linear", "adapter.grid.global=mean"), "", UNSHARED),
        (head("pvse", "adapter.grid.global=cached"), "", ""),
        (head("pvse", "adapter.grid.global=cached", image=FeatureFacts("grid", 7, 5)), "", UNSHARED),
        (head("pvse", image=FeatureFacts("grid", 7, 5)), "", ""),
        (head("pcme"), "", ""),
        (head("pcmepp"), UNREAD, UNREAD),
        (head("gaussian-vsepp"), "", UNSHARED),
        (head("gaussian-vsepp", "aggregator.image.of=gpo"), UNREAD, UNREAD),
    ],
)
def test_how_a_global_feature_is_made_counts_where_it_is_read(one, of_global, of_layer):
    keys = ["adapter.grid.global", "adapter.grid.global_layer"]
    for key, wanted in zip(keys, (of_global, of_layer), strict=True):
        said = not_in_use(key, [one])
        assert said.startswith(wanted.format(key)) if wanted else not said
        assert not not_in_use(key, [one, head("setdiv")])
        assert not not_in_use(key, [one], ["aggregator.image.name"])
    reached = of_images(*one)
    assert reached["global"] is not bool(of_global)
    assert (reached["shared"] and reached["rows"] and reached["own"]) is not bool(of_layer)


def of_images(recipe, image, text):
    """Return what the losses reach of an image adapter, and whether rows and global feature can share a layer."""
    torch.manual_seed(0)
    own, made = changed(recipe, ["adapter.grid.global_layer=own"]), []
    model, losses = build_model(own, image, text), build_losses(own, text)
    model.image.adapter.register_forward_hook(lambda module, read, adapted: made.append(adapted.global_))
    features = [
        Features(torch.tensor([4, 3, 4]), torch.randn(3, 4, one.channels), torch.randn(3, one.global_channels))
        for one in (image, text)
    ]
    images, captions = model.embed_images(features[0]), model.embed_captions(features[1])
    similarity = model.similarity(images.embedding, captions.embedding)
    total = sum(loss(similarity, torch.eye(3, dtype=torch.bool), images, captions) for loss in losses.values())
    adapter = model.image.adapter
    wanted = {"global": made[0], "rows": adapter.layer.weight, "own": adapter.global_layer.weight}
    found = torch.autograd.grad(total, list(wanted.values()), allow_unused=True)
    shared = build_model(recipe, image, text).image.adapter.global_layer is None
    return {"shared": shared, **{name: one is not None for name, one in zip(wanted, found, strict=True)}}


def test_a_global_feature_that_nothing_reads_is_left_as_it_is():
    key, one = "adapter.grid.global", head("vse-infty", "adapter.grid.global=max")
    assert settings_not_in_use([f"{key}=max"], [one])
    assert settings_not_in_use([f"{key}=mean", "adapter.grid.global_layer=shared"], [head("vse-infty")]) == []
    varied = ["adapter.grid.global", "adapter.grid.global_layer"]
    assert not_in_use(key, [one], varied)  # another value of its own lets nothing in
    assert not not_in_use(varied[1], [head("linear")], varied)
    for other in ("adapter.tokens.global", "aggregator.image.dropout"):
        assert not_in_use(key, [one], [key, other])
    bag = ["adapter.words.encoder=bag", "adapter.words.local=embedding", "adapter.words.global=mean"]
    require_in_use(bag, *head("scan", *bag, text=WORDS))
    assert not_in_use("adapter.words.global", [head("scan", text=WORDS)])
    assert not not_in_use("adapter.words.global", [head("scan", text=WORDS)], ["adapter.words.encoder"])
    with pytest.raises(RecipeError, match=r"^adapter\.grid\.global has no effect where the global feature is not read"):
        require_in_use([f"{key}=max"], *one)


def test_a_setting_that_leaves_no_rows_out_is_let_through():
    settings = ["augment.image=0", "augment.text=0", "augment.image_varies=false"]
    one = head("linear", *settings)
    assert settings_not_in_use(settings, [one]) == []
    require_in_use(settings, *one)
    both = head("fusemix", "augment.image=0.5", "augment.text=0.5")
    said = "{} has no effect where one vector is read of each {}: leave it out, or take a recipe that reads rows"
    found = settings_not_in_use(["augment.image=0.5", "augment.text=0.5"], [both])
    assert found == [said.format("augment.image", "image"), said.format("augment.text", "caption")]


@pytest.mark.parametrize("varied", ["augment.mix", "aggregator.text.name", "adapter.tokens.global"])
def test_rows_are_let_through_where_another_trial_may_read_them(varied):
    settings, one = ["augment.text=0.5"], head("fusemix", "augment.text=0.5")
    assert settings_not_in_use(settings, [one], [varied]) == []
    assert settings_not_in_use(settings, [one], ["optimizer.lr", "adapter.tokens.dropout"])


@pytest.mark.parametrize(
    ("key", "name", "in_use"),
    [
        ("aggregator_lr", "mlp", False),
        ("aggregator_frozen", "vsepp", False),
        ("image_aggregator_lr", "mlp", False),
        ("text_aggregator_lr", "setdiv", True),
        ("similarity_lr", "mlp", False),
        ("similarity_frozen", "pcme", True),  # its match probability has a scale
        ("loss_lr", "mlp", True),  # the scale of its InfoNCE
        ("loss_lr", "vsepp", False),
        ("adapter_lr", "linear", True),
        ("text_adapter_lr", "linear", True),
    ],
)
def test_a_learning_rate_is_of_weights(key, name, in_use):
    said, one = not_in_use(f"optimizer.{key}", [head(name)]), head(name)
    part = key.rpartition("_")[0].replace("_", " ")
    assert said == (
        "" if in_use else f"optimizer.{key} has no effect where the {part} has nothing that learns: leave it out"
    )
    recipe, image, text = one
    made = [build_optimizer(build_model(recipe, image, text), build_losses(recipe, text), recipe.optimizer)]
    other = changed(recipe, [f"optimizer.{key}={3 if key.endswith('frozen') else 0.5}"])
    made.append(build_optimizer(build_model(recipe, image, text), build_losses(recipe, text), other.optimizer))
    assert (groups(made[0]) != groups(made[1])) is in_use
    varied = ["aggregator.image.name", "similarity.name", "loss.sigmoid.weight"]
    assert not not_in_use(f"optimizer.{key}", [one], varied)
    assert not_in_use(f"optimizer.{key}", [one], ["similarity.alpha", "loss.triplet.margin"]) == said


def groups(optimizer):
    """Return when and how fast every group of weights learns."""
    return [(group["factor"], group["frozen"]) for group in optimizer.param_groups]


def test_a_learning_rate_of_no_weights_is_refused_and_not_searched(tmp_path):
    store = str(make_store(tmp_path / "s.zarr", train=4, val=2, test=2))
    said = "optimizer.aggregator_lr has no effect where the aggregator has nothing that learns: leave it out"
    told = ["--recipe", "mlp", "--set", "optimizer.aggregator_lr=0.1", "--out", str(tmp_path / "run")]
    assert said in refused("train-head", store, *told)
    assert said in refused("tune", store, "--recipe", "mlp", "--space", "optimizer.aggregator_lr=0:1", *told[-2:])
    assert said in refused("ablate", store, "--recipe", "mlp", "--vary", "optimizer.aggregator_lr=1,0.1", *told[-2:])
    assert not (tmp_path / "run").exists()
    one = head("mlp", "optimizer.aggregator_lr=1", "optimizer.similarity_frozen=0")
    assert settings_not_in_use(["optimizer.aggregator_lr=1", "optimizer.similarity_frozen=0"], [one]) == []


def test_what_was_begun_with_a_setting_that_decides_nothing_goes_on(tmp_path):
    store, settings = make_store(tmp_path / "s.zarr", train=4, val=2, test=2), ["optimizer.similarity_lr=0.5"]
    recipe = load_recipe("vsepp", [*settings, "model.dim=8", "schedule.epochs=1"])
    how = {"settings": settings, "device": "cpu", "seed": 0}
    with pytest.raises(RecipeError, match=r"^optimizer\.similarity_lr has no effect where the similarity has nothing"):
        train(store, recipe, tmp_path / "run", **how, resume=True)
    train(store, recipe, tmp_path / "run", **{**how, "settings": ()})  # as a version did that let it through
    assert train(store, recipe, tmp_path / "run", **how, resume=True).epochs == 1


def test_rows_that_no_head_reads_cannot_be_left_out(tmp_path):
    store = str(make_store(tmp_path / "s.zarr", train=4, val=2, test=2))
    told = ["--recipe", "linear", "--set", "augment.image=0.5", "--out", str(tmp_path / "run")]
    said = "augment.image has no effect where one vector is read of each image: leave it out, or take a recipe"
    assert said in refused("train-head", store, *told)
    assert not (tmp_path / "run").exists()
    searched = ["--recipe", "linear", "--space", "augment.image=0:0.5", "--out", str(tmp_path / "tuned")]
    assert said in refused("tune", store, *searched)
