"""Recipes: what a file and settings resolve to, and that every fault is named at once."""

import re

import numpy as np
import pytest
import torch
import yaml
from bundled_recipes import OURS, SYSTEMS, faults
from hypothesis import given, settings
from hypothesis import strategies as st

from xret.heads.model import FeatureFacts, build_losses, build_model
from xret.heads.recipes.names import recipe_file, recipe_names
from xret.heads.recipes.recipe import load_recipe, resolve
from xret.heads.recipes.schema import convert
from xret.heads.recipes.settings import normalised, settings_of
from xret.pipeline.errors import RecipeError
from xret.pipeline.reading.batches import Features

WORDS = (FeatureFacts("words", None, None, 11),)
SMALL = ["model.dim=8", "adapter.words.word_dim=6"]
MIX = "augment.mix=1 data.unit=image data.captions=1"  # pairs


@pytest.mark.parametrize("name", SYSTEMS)
def test_a_system_is_complete_and_says_where_it_comes_from(name):
    text = recipe_file(name).read_text()
    assert text.startswith("# ")
    assert "# Paper: " in text and "# Expected" in text
    written, resolved = yaml.safe_load(text), load_recipe(name, ["model.dim=8"]).to_dict()
    assert written["name"] == resolved["name"] == name
    optional = {"augment", "finetune", "runtime", "expected"}
    assert set(resolved) - optional <= set(written) <= {*resolved, "variants", "when"}
    assert set(written["loss"]) | {"same_text"} == set(resolved["loss"])
    assert set(written["adapter"]) <= set(resolved["adapter"])


@pytest.mark.parametrize("name", [*OURS, *SYSTEMS])
@pytest.mark.parametrize("image", ["grid", "roi"])
@pytest.mark.parametrize("text", ["words", "tokens"])
def test_a_system_makes_a_model_that_can_learn(name, image, text):
    torch.manual_seed(0)  # a negative that is drawn may be far enough away by chance
    parts = load_recipe(name, ["model.dim=8"]).aggregator
    small = [*SMALL, *(f"aggregator.{side}.head_dim=8" for side in parts if "head_dim" in parts[side])]
    recipe = load_recipe(name, small)
    facts = WORDS if text == "words" else (FeatureFacts("tokens", 5, 5),)
    if text == "tokens" and "caption-generation" in recipe.terms:
        with pytest.raises(RecipeError, match="needs captions of kind 'words'"):
            build_losses(recipe, facts)
        recipe = load_recipe(name, [*small, "loss.caption-generation.weight=0"])
    if text == "words" and recipe.augment.mix:
        with pytest.raises(RecipeError, match=r"of kind 'words' have none; .* or augment\.mix=0"):
            build_model(recipe, (FeatureFacts(image, 5, 5),), facts)
        recipe = load_recipe(name, [*small, "augment.mix=0"])
    if text == "words" and recipe.model.residual != "none":
        with pytest.raises(RecipeError, match="which words have not"):
            build_model(recipe, (FeatureFacts(image, 5, 5),), facts)
        return
    model = build_model(recipe, (FeatureFacts(image, 5, 5),), facts)
    for key, matrix in model.named_buffers():
        if key.endswith("base.matrix"):  # as a training finds it
            torch.nn.init.normal_(matrix)
    images = model.embed_images(Features(torch.tensor([4, 2]), torch.rand(2, 4, 5), torch.rand(2, 5)))
    other = build_model(recipe, (FeatureFacts(image, 5, 7),), facts)  # as a CLIP's patches and its projection
    made = other.embed_images(Features(torch.tensor([4, 2]), torch.rand(2, 4, 5), torch.rand(2, 7)))
    assert type(made.embedding) is type(images.embedding)
    tokens = torch.tensor([[1, 2, 0], [3, 0, 0], [4, 5, 6]])
    local = torch.rand(3, 3, 5)
    captions = model.embed_captions(Features(torch.tensor([2, 1, 3]), local, torch.rand(3, 5), tokens))
    similarity = model.similarity(images.embedding, captions.embedding)
    assert similarity.shape == (2, 3)
    positives = torch.tensor([[True, True, False], [False, False, True]])
    terms = build_losses(recipe, facts)
    assert set(terms) == set(recipe.terms)
    sum(term(similarity, positives, images, captions) for term in terms.values()).backward()
    # A Gaussian over words has a GRU for mean and variance each, and leaves that of the adapter alone.
    idle = "text.adapter.gru" if name.startswith("gaussian") else "nothing"
    assert [key for key, p in model.named_parameters() if p.grad is None and not key.startswith(idle)] == []
    assert any(p.grad is not None and p.grad.abs().sum() > 0 for p in model.parameters())


@pytest.mark.parametrize("name", recipe_names())
def test_resolving_again_changes_nothing(name):
    recipe = load_recipe(name, ["model.dim=8"])  # narrow: the check of the parts takes no time
    assert resolve(recipe.to_dict()) == recipe
    assert resolve(yaml.safe_load(yaml.safe_dump(recipe.to_dict()))) == recipe


def test_a_setting_changes_one_value():
    before, after = load_recipe("setdiv").to_dict(), load_recipe("setdiv", ["loss.triplet.margin=0.25"]).to_dict()
    assert after["loss"]["triplet"].pop("margin") == 0.25
    assert before["loss"]["triplet"].pop("margin") == 0.1
    assert before == after


def test_another_part_begins_with_its_own_defaults():
    settings = ["aggregator.image=average", "aggregator.text.name=max", "similarity=cosine", "loss.diversity.weight=0"]
    recipe = load_recipe("setdiv", settings)
    assert recipe.aggregator == {"image": {"name": "average"}, "text": {"name": "max"}}
    assert recipe.similarity == {"name": "cosine"}


def test_naming_the_adapter_that_is_there_changes_nothing(tmp_path):
    (tmp_path / "mine.yaml").write_text("base: fusemix\nadapter: {grid: {name: rows, hidden: 9}}\n")
    assert load_recipe("fusemix", ["adapter.grid=rows", "adapter.words=words"]) == load_recipe("fusemix")
    assert load_recipe(str(tmp_path / "mine.yaml")) == load_recipe("fusemix", ["adapter.grid.hidden=9"])


def test_a_part_that_is_chosen_takes_settings_in_any_order():
    settings = ["aggregator.image=element-slots", "aggregator.text=element-slots"]
    settings += ["similarity=smooth-chamfer", "aggregator.image.slots=2", "similarity.alpha=8"]
    forwards, backwards = load_recipe("vsepp", settings), load_recipe("vsepp", settings[::-1])
    assert forwards == backwards
    assert forwards.aggregator["image"]["slots"] == 2
    assert forwards.similarity == {"name": "smooth-chamfer", "alpha": 8.0, "direction": "both"}


def test_a_term_is_added_by_its_weight_and_removed_by_zero():
    assert set(load_recipe("vsepp", ["loss.mmd.weight=0.5"]).terms) == {"triplet", "mmd"}
    assert set(load_recipe("setdiv", ["loss.mmd.weight=0"]).terms) == {"triplet", "diversity"}


@pytest.mark.parametrize(
    ("recipe", "order"),
    [
        ("vsrn", ["caption-generation", "distillation", "triplet", "infonce", "mmd", "sigmoid"]),
        ("hrem", ["distillation", "triplet", "embedding-graph", "uniformity", "infonce"]),
        ("setdiv", ["diversity", "triplet", "mmd", "global-discriminative", "intra-set-divergence", "sigmoid"]),
        ("pcme", ["information-bottleneck", "uniformity", "infonce", "soft-contrastive", "matching-bce"]),
    ],
)
def test_terms_stand_in_the_order_of_older_checkpoints(recipe, order):
    assert list(load_recipe(recipe, {f"loss.{term}.weight": 1 for term in order[::-1]}).terms) == order


def test_every_fault_of_file_and_settings_is_named_at_once(tmp_path):
    values = load_recipe("setdiv").to_dict()
    values["optimiser"] = {}
    values["data"]["unit"] = "images"
    values["adapter"]["gird"] = {}
    values["model"] = 3
    values["aggregator"]["text"]["slotz"] = 3
    (tmp_path / "mine.yaml").write_text(yaml.safe_dump(values))
    message = faults(tmp_path / "mine.yaml", "loss.triplett.margin=1", "margin=1", "data.batch_size=many")
    for fault in (
        "optimiser is not a key (did you mean 'optimizer'?)",
        "data.unit must be one of image, caption, not 'images' (did you mean 'image'?)",
        "data.batch_size must be a whole number, not 'many'",
        "model must be a block with the keys dim, residual, not 3",
        "adapter.gird is not a key (did you mean 'adapter.grid'?)",
        "aggregator.text.slotz is not a key (did you mean 'aggregator.text.slots'?)",
        "loss.triplett is not a key (did you mean 'loss.triplet'?)",
        "margin is not a key (did you mean 'loss.triplet.margin'?)",
    ):
        assert fault in message
    assert message.count(";") == 7
    assert "\n" not in message


def test_bounds_of_parts_are_found_together_with_all_other_faults():
    settings = ["similarity.alpha=-1", "aggregator.text.slots=0", "aggregator.image.update=lstm", "optimizer.lr=fast"]
    assert faults("setdiv", *settings) == (
        "recipe 'setdiv' cannot be used: optimizer.lr must be a number, not 'fast'; "
        "aggregator.image.update must be one of residual, gru, not 'lstm'; "
        "aggregator.text.slots must be between 1 and 1024, not 0; similarity.alpha must be above 0, not -1.0"
    )


@pytest.mark.parametrize("value", [10**5, 2**40, 2**63 - 1, 2**63, 2**70])
def test_absurd_sizes_are_named_before_memory_is_taken(value):
    told = {
        "setdiv": ["model.dim", "aggregator.image.slots", "aggregator.text.iterations", "aggregator.image.head_dim"],
        "vse-infty": ["adapter.grid.hidden", "adapter.words.depth", "adapter.words.word_dim"],
        "pcme": ["aggregator.text.samples"],
    }
    for name, keys in told.items():
        message = faults(name, *(f"{key}={value}" for key in keys))
        for key in keys:
            assert re.search(rf"{re.escape(key)} must be between 1 and \d+( or null)?, not '?{value}'?(;|$)", message)


@pytest.mark.parametrize(
    ("wrong", "setting"), [("optimizer: adam", "optimizer.lr=1"), ("loss: 5", "loss.mmd.weight=1")]
)
def test_a_setting_hides_no_value_where_the_file_must_have_a_block(tmp_path, wrong, setting):
    (tmp_path / "mine.yaml").write_text(f"base: vsepp\n{wrong}\n")
    for chosen in ((), (setting,)):
        assert wrong.split(":")[0] in faults(tmp_path / "mine.yaml", *chosen)


def test_a_recipe_must_say_what_has_no_default(tmp_path):
    (tmp_path / "mine.yaml").write_text("paper: none\n")
    message = faults(tmp_path / "mine.yaml")
    for key in ("name", "aggregator.image.name", "aggregator.text.name", "similarity.name"):
        assert f"{key} is missing" in message


def test_an_option_does_not_add_its_term():
    assert load_recipe("setdiv", ["loss.infonce.scale=3"]) == load_recipe("setdiv")
    both = load_recipe("setdiv", ["loss.infonce.scale=3", "loss.infonce.weight=0.5"]).terms["infonce"]
    assert (both["scale"], both["weight"]) == (3, 0.5)


@pytest.mark.parametrize(
    ("settings", "fault"),
    [
        ("optimizer.clip=0", "optimizer.clip must be above 0 or"),
        ("augment.image=1.5", "augment.image must be between 0 and 1, not 1.5"),
        ("augment.text=-0.1", "augment.text must be between 0 and 1, not -0.1"),
        ("optimizer.lr=1e38", "optimizer.lr must be between 0 and 1000000, not 1e+38"),
        ("finetune.mask_words=3", "finetune.mask_words must be between 0 and 1, not 3"),
        # Blocks and values.
        ("adapter=3", "adapter must be"),
        ("model=3", "model must be"),
        ("name.x=1", "name"),
        ("aggregator.image.slots.x=1", "aggregator.image.slots"),
        ("aggregator.image.slots=2 aggregator.image.slots.x=1", "aggregator.image.slots"),
        # The values of an unknown part are left alone.
        ("aggregator.image=element-slot aggregator.image.whatever=3", "used: aggregator.image.name must be one of "),
        ("aggregator.image=element-slot", "not 'element-slot' (did you mean 'element-slots'?)"),
        # An adapter of features of another kind.
        ("adapter.grid=words", "adapter.grid.name must be one of rows, not 'words'"),
        ("adapter.words=rows", "adapter.words.name must be one of words, not 'rows'"),
        # What does not go together.
        ("loss.soft-contrastive.weight=1", "needs a similarity that gives log-odds: monte-carlo-match"),
        ("aggregator.image=global", "'global' gives a vector and similarity 'smooth-chamfer' compares sets"),
        ("aggregator.image=global", "loss.diversity: "),
        ("loss.triplet.logarithm=true", "did you mean 'loss.infonce.logarithm'"),
        (f"{MIX} data.unit=caption data.captions=null", "augment.mix blends pairs: set data.unit=image"),
        (f"{MIX} data.captions=2", "augment.mix blends pairs"),
        (f"{MIX} data.captions=null", "augment.mix blends pairs"),
        *((f"{MIX} loss.same_text={same}", "set loss.same_text=negative") for same in ("positive", "excluded")),
        ("loss.triplet.weight=0 loss.mmd.weight=0 loss.diversity.weight=0", "at least one term"),
    ],
)
def test_what_cannot_be_is_refused(settings, fault):
    assert fault in faults("setdiv", *settings.split())


@settings(max_examples=25)
@given(st.floats(allow_nan=False, allow_infinity=False, min_value=0, max_value=1e6))
def test_a_number_arrives_as_it_was_written(number):
    for chosen in (
        {"optimizer.lr": number},
        {"optimizer.lr": np.float64(number)},
        settings_of([f"optimizer.lr={number!r}"]),
        {"optimizer": {"lr": number}},
    ):
        assert load_recipe("vsepp", chosen).optimizer.lr == number


def test_equal_settings_are_equal_however_they_are_written():
    written = ["optimizer.lr=1e-3", "aggregator.image=gpo", "model.dim=8", "optimizer.ema=null"]
    other = ["optimizer.lr=0.001", "aggregator.image.name=gpo", "model.dim=08", "optimizer.ema=Null"]
    assert settings_of(written) == settings_of(other)
    assert normalised({"optimizer.lr": "1e-3"}) == normalised({"optimizer": {"lr": 0.001}}) == {"optimizer.lr": 0.001}


@pytest.mark.parametrize(
    ("value", "kind", "expected"),
    [
        *[("1e-3", float, 0.001), (3, float, 3.0), ("3", int, 3), ("false", bool, False), (True, bool, True)],
        *[("null", int | None, None), ("None", float | None, None), ("7", int | None, 7), ("7", int | str, 7)],
        *[("7", str, "7"), ("x", int | str, "x")],
    ],
)
def test_converted_values(value, kind, expected):
    converted = convert(value, kind)
    assert (converted, type(converted)) == (expected, type(expected))


@pytest.mark.parametrize(
    ("value", "kind"),
    [
        *[(True, int), (1.5, int), ("1.5", int), (None, int), ({}, int | None)],
        *[(True, float), ("nan", float), ("inf", float), ([1], float), (10**400, float)],
        *[(1, bool), ("yes", bool), ([3], str)],
    ],
)
def test_refused_values(value, kind):
    with pytest.raises(ValueError, match=r"must be .*, not "):
        convert(value, kind)
