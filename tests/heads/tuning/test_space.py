"""The space of a tuning: what is bundled, what a user adds, and the faults that end it before anything is trained."""

from fnmatch import fnmatchcase

import pytest
import yaml
from optuna.distributions import CategoricalDistribution as Choice
from optuna.distributions import FloatDistribution as Real
from optuna.distributions import IntDistribution as Whole

from xret.heads.model import FeatureFacts
from xret.heads.recipes.names import recipe_names
from xret.heads.recipes.recipe import load_recipe
from xret.heads.recipes.schema import flat
from xret.heads.tuning.space import FILE, describe, make_space
from xret.pipeline.errors import RecipeError

GRID, ROI = (FeatureFacts("grid", 16, 16),), (FeatureFacts("roi", 16, 16),)
WORDS, TOKENS = (FeatureFacts("words", None, None, 9),), (FeatureFacts("tokens", 16, 16),)
SPACES = yaml.load(FILE.read_text(), yaml.BaseLoader)


def space_of(name="vsepp", own=(), settings=(), image=GRID, text=WORDS):
    return make_space(name, image, text, dict(own), dict(settings))[0]


def refusal(own, settings=(), name="vsepp"):
    with pytest.raises(RecipeError) as caught:
        space_of(name, own, settings)
    start, _, faults = str(caught.value).partition(" cannot be used: ")
    assert start == f"the space of recipe '{name}'"
    return faults


def test_the_bundled_space_has_the_keys_of_the_recipe():
    space = space_of()
    assert space["optimizer.lr"] == Real(1e-4, 1e-2, log=True)
    assert space["loss.triplet.margin"] == Real(0.05, 0.4)
    assert "similarity.alpha" not in space
    assert {"similarity.alpha", "optimizer.aggregator_lr", "optimizer.lr"} <= space_of("setdiv").keys()
    assert "loss.triplet.margin" not in space_of("pcmepp")


def test_keys_of_adapters_are_those_of_the_features_in_use():
    adapters = [key for key in space_of("mlp", image=ROI, text=TOKENS) if key.startswith("adapter.")]
    assert {key.split(".")[1] for key in adapters} == {"roi", "tokens"}
    of_words = [key for key in space_of("setdiv-small") if key.startswith("adapter.words")]
    assert of_words == ["adapter.words.dropout"]  # a GRU has no hidden layer


@pytest.mark.parametrize("system", SPACES)
def test_a_bundled_space_has_keys_of_its_system(system):
    known = flat(load_recipe("vsepp" if system == "default" else system).to_dict())
    assert [key for key in SPACES[system] if not any(fnmatchcase(one, key) for one in known)] == []


@pytest.mark.parametrize("name", recipe_names())
def test_the_first_trial_of_every_recipe_is_the_recipe_but_for_no_decay(name):
    small = {"model.dim": 8}
    recipe = load_recipe(name, small)
    image = (FeatureFacts(recipe.data.image_kind or "grid", 16, 16),)
    text = TOKENS if recipe.data.text_kind == "tokens" or recipe.augment.mix else WORDS
    space, first = make_space(name, image, text, {}, small)
    values = flat(recipe.to_dict())
    different = {key for key in space if first.get(key) != values[key]}
    assert different <= {"optimizer.weight_decay"}
    assert "optimizer.weight_decay" not in different or values["optimizer.weight_decay"] == 0


def test_own_keys_are_added_or_replace():
    own = {"model.dim": [8, 16], "optimizer.lr": "1e-5:1", "data.batch_size": "4:32:log", "data.unit": "image,caption"}
    space = space_of(own=own)
    assert space["model.dim"] == Choice((8, 16))
    assert space["optimizer.lr"] == Real(1e-5, 1.0)
    assert space["data.batch_size"] == Whole(4, 32, log=True)
    assert [describe(space[key]) for key in own] == ["8,16", "1e-05:1", "4:32:log", "image,caption"]


def test_what_is_set_is_not_varied():
    assert "optimizer.lr" not in space_of(settings={"optimizer.lr": 0.1})
    assert "is given to `space` and to `settings`" in refusal({"optimizer.lr": "1:2"}, {"optimizer.lr": 1})
    everything = dict.fromkeys(("optimizer.lr", "optimizer.weight_decay", "loss.triplet.margin"), 0.1)
    everything |= {f"adapter.{kind}.dropout": 0.1 for kind in ("grid", "words")}
    assert refusal({}, everything).startswith("nothing is left to vary: give `space` KEY=LOW:HIGH")


def test_a_part_that_is_varied_takes_its_keys_out():
    own = {"similarity": ["chamfer", "smooth-chamfer"]}
    space = space_of("setdiv", own)
    assert space["similarity.name"] == Choice(("chamfer", "smooth-chamfer"))
    assert "similarity.alpha" not in space
    both = own | {"similarity.alpha": "4:16"}
    assert "similarity.alpha cannot be varied beside similarity.name" in refusal(both, name="setdiv")


def test_the_weight_of_a_loss_that_the_recipe_lacks_can_be_varied():
    space = space_of("linear", {"loss.sigmoid.weight": "0:1", "loss.mmd.weight": [0, 0.5]})
    assert (space["loss.sigmoid.weight"], space["loss.mmd.weight"]) == (Real(0, 1), Choice((0.0, 0.5)))
    assert "has no key loss.sigmod.weight" in refusal({"loss.sigmod.weight": "0:1"}, name="linear")


def test_the_first_trial_is_moved_into_the_space():
    settings = {"model.dim": 8, "optimizer.lr": 0.5, "optimizer.ema": None}
    own = {
        "loss.triplet.margin": "0.3:0.4",
        "optimizer.clip": "5.0:6.0",
        "data.batch_size": [16, 100, 1000],
        "loss.triplet.negatives": ["all", "semi-hard"],
        "loss.sigmoid.weight": "0.5:1.0",  # a loss that the recipe does not have
        "data.chunk": [None, 8],
    }
    recipe = load_recipe("vsepp")
    assert (recipe.loss["triplet"]["margin"], recipe.data.batch_size, recipe.data.chunk) == (0.2, 128, None)
    _, first = make_space("vsepp", GRID, WORDS, own, settings)
    expected = {"loss.triplet.margin": 0.3, "optimizer.clip": 5.0, "loss.sigmoid.weight": 0.5}
    assert {key: first[key] for key in own if key in first} == expected | {"data.chunk": None}


@pytest.mark.parametrize(
    ("key", "given", "said"),
    [
        ("optimizer.lrr", "1:2", "recipe 'vsepp' has no key optimizer.lrr (did you mean 'optimizer.lr'?)"),
        ("adapter.roi.layers", "linear,mlp", "these features use adapter.grid and adapter.words"),
        ("schedule.epochs", "5:9", "trials are compared epoch by epoch"),
        ("data.image", "a,b", "data.image cannot be varied: all trials have the same"),
        ("runtime.precision", "float32,bfloat16", "runtime.precision cannot be varied"),
        ("optimizer.lr", "2:1", "optimizer.lr=2:1: "),
        ("optimizer.lr", "0:1:log", "optimizer.lr=0:1:log: "),
        ("optimizer.lr", "a:b", "optimizer.lr must be a number"),
        ("optimizer.lr", "1:2:lin", "a range has the form"),
        ("optimizer.lr", "0.1", "one value is for `settings`"),
        ("model.dim", "8,8", "with different values"),
        ("model.dim", "1.5:3", "model.dim must be"),
        ("data.unit", "1:2", "data.unit must be one of image, caption"),
        ("adapter.words.bidirectional", "yes,no", "adapter.words.bidirectional must be true or false"),
        ("similarity", "cosine,smooth-chamfer", "and similarity 'smooth-chamfer' compares sets"),
    ],
)
def test_what_is_wrong_is_said(key, given, said):
    assert said in refusal({key: given})
