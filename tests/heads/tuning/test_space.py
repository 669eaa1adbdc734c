"""The space of a tuning: what is bundled, what a user adds, and the faults that end it before anything is trained."""

from fnmatch import fnmatchcase

import pytest

from xret.heads.model import FeatureFacts
from xret.heads.recipes.names import recipe_names
from xret.heads.recipes.recipe import changed, load_recipe
from xret.heads.runs.config import flat
from xret.heads.tuning.space import FOLDER, Choice, Range, as_settings, make_space, own_values, read_file
from xret.pipeline.errors import RecipeError

GRID, ROI = FeatureFacts("grid", 16, 16), FeatureFacts("roi", 16, 16)
WORDS, TOKENS = FeatureFacts("words", None, None, 9), FeatureFacts("tokens", 16, 16)
HEADS = [f"aggregator.{side}.head_dim=8" for side in ("image", "text")]


def space_of(name="vsepp", own=(), settings=(), image=GRID, text=WORDS):
    return make_space(load_recipe(name, settings), image, text, own, settings)


def refusal(own, settings=(), name="vsepp", **facts):
    with pytest.raises(RecipeError) as caught:
        space_of(name, own, settings, **facts)
    start, _, faults = str(caught.value).partition(" cannot be used: ")
    assert start == f"the space of recipe '{name}'"
    return faults.split("; ")


def test_the_bundled_space_has_the_keys_of_the_recipe():
    space = space_of()
    assert space["optimizer.lr"] == Range(1e-4, 1e-2, log=True, whole=False)
    assert space["loss.triplet.margin"] == Range(0.05, 0.4, log=False, whole=False)
    assert "similarity.alpha" not in space
    assert {"similarity.alpha", "optimizer.aggregator_lr", "optimizer.lr"} <= space_of("setdiv", settings=HEADS).keys()
    assert "loss.triplet.margin" not in space_of("pcmepp")


def test_keys_of_adapters_are_those_of_the_features_in_use(monkeypatch, tmp_path):
    (tmp_path / "default.yaml").write_text("adapter.*.global: mean,max\noptimizer.lr: 1:30\n")
    (tmp_path / "vsepp.yaml").write_text("optimizer.lr: null\n")
    monkeypatch.setattr("xret.heads.tuning.space.FOLDER", tmp_path)
    assert space_of() == {
        "adapter.grid.global": Choice(("mean", "max")),
        "adapter.words.global": Choice(("mean", "max")),
    }
    assert space_of(image=ROI, text=TOKENS).keys() == {"adapter.roi.global", "adapter.tokens.global"}
    assert space_of("pcmepp")["optimizer.lr"] == Range(1, 30, log=False, whole=False)  # 1:30 is no number of base 60


@pytest.mark.parametrize("file", sorted(FOLDER.glob("*.yaml")), ids=lambda file: file.stem)
def test_a_bundled_space_has_keys_of_its_system(file):
    texts = read_file(file)
    assert texts
    known = flat(load_recipe("vsepp" if file.stem == "default" else file.stem).to_dict())
    assert [key for key in texts if not any(fnmatchcase(one, key) for one in known)] == []


@pytest.mark.parametrize("name", recipe_names())
def test_the_own_values_of_every_recipe_lie_in_its_space_but_for_no_decay(name):
    """So that the first trial is the recipe itself."""
    recipe = load_recipe(name)
    image = FeatureFacts(recipe.data.image_kind or "grid", 16, 16)
    text = TOKENS if recipe.data.text_kind == "tokens" or recipe.augment.mix else WORDS
    space = make_space(recipe, image, text)
    own, values = own_values(space, recipe), flat(recipe.to_dict())
    different = {key for key in space if own.get(key) != values[key]}
    assert different <= {"optimizer.weight_decay"}
    assert "optimizer.weight_decay" not in different or values["optimizer.weight_decay"] == 0


def test_own_keys_are_added_or_replace():
    space = space_of(
        own=["model.dim=8,16", "optimizer.lr=1e-5:1", "data.batch_size=4:32:log", "data.unit=image,caption"],
    )
    assert space["model.dim"] == Choice((8, 16))
    assert space["optimizer.lr"] == Range(1e-5, 1.0, log=False, whole=False)
    assert space["data.batch_size"] == Range(4, 32, log=True, whole=True)
    assert str(space["data.batch_size"]) == "4:32:log"
    assert str(space["data.unit"]) == "image,caption"


def test_what_is_set_is_not_varied():
    assert "optimizer.lr" not in space_of(settings=["optimizer.lr=0.1"])
    assert "is given to --space and to --set" in refusal(["optimizer.lr=1:2"], ["optimizer.lr=1"])[0]
    keys = ("optimizer.lr", "optimizer.weight_decay", "loss.triplet.margin")
    everything = [f"{key}=0.1" for key in keys] + [f"adapter.{kind}.dropout=0.1" for kind in ("grid", "words")]
    known = flat(load_recipe("vsepp").to_dict())
    fixed = [setting for setting in everything if setting.split("=")[0] in known]
    assert refusal([], fixed)[0].startswith("nothing is left to vary: give --space KEY=LOW:HIGH")


def test_a_part_that_is_varied_takes_its_keys_out(tmp_path):
    space = space_of("setdiv", ["similarity=chamfer,smooth-chamfer"], HEADS)
    assert space["similarity.name"] == Choice(("chamfer", "smooth-chamfer"))
    assert "similarity.alpha" not in space
    both = ["similarity=chamfer,smooth-chamfer", "similarity.alpha=4:16"]
    assert "similarity.alpha cannot be varied beside similarity.name" in refusal(both, HEADS, "setdiv")[0]


@pytest.mark.parametrize(
    ("own", "said"),
    [
        ("model.dim", "must have the form KEY=LOW:HIGH"),
        ("optimizer.lrr=1:2", "recipe 'vsepp' has no key optimizer.lrr (did you mean 'optimizer.lr'?)"),
        ("adapter.roi.layers=linear,mlp", "adapter.roi.layers cannot be varied"),
        ("schedule.epochs=5:9", "trials are compared epoch by epoch"),
        ("data.image=a,b", "trials share the features"),
        (
            "runtime.precision=float32,bfloat16",
            "runtime.precision cannot be varied: it does not describe how a head learns",
        ),
        ("optimizer.lr=2:1", "the first number must be below the second"),
        ("optimizer.lr=0:1:log", "a logarithmic range begins above 0"),
        ("optimizer.lr=a:b", "must be a range of numbers"),
        ("optimizer.lr=1:2:lin", "must be a range of numbers"),
        ("optimizer.lr=1:nan", "must be a range of numbers"),
        ("optimizer.lr=0.1", "one value is for --set"),
        ("model.dim=8,8", "names a value twice"),
        ("model.dim=1.5:3", "model.dim must be"),
        ("data.unit=1:2", "data.unit must be one of image, caption"),
        ("adapter.words.bidirectional=yes,no", "adapter.words.bidirectional must be true or false"),
        ("similarity=cosine,smooth-chamfer", "and similarity 'smooth-chamfer' compares sets"),
    ],
)
def test_what_is_wrong_is_said(own, said):
    assert any(said in fault for fault in refusal([own]))


def test_a_head_that_cannot_be_built_from_these_features_is_refused():
    faults = refusal(["adapter.words.train_vectors=true,false"])
    assert "the embeddings would stay random" in faults[0]


def test_all_faults_come_at_once():
    faults = refusal(["optimizer.lrr=1:2", "model.dim=1", "optimizer.lr=2:1", "model.dim=2,3", "model.dim=2,4"])
    assert len(faults) >= 4


def test_changing_a_resolved_recipe_is_loading_it_with_these_settings():
    first = ["model.dim=8", "optimizer.lr=0.1"]
    for more in (["optimizer.lr=0.2"], ["aggregator.image=average", "augment.image=0.25"], ["loss.mmd.weight=0.5"]):
        assert changed(load_recipe("vsepp", first), more) == load_recipe("vsepp", [*first, *more])
    with pytest.raises(RecipeError, match=r"recipe 'vsepp' cannot be used: .*lrr is not a key"):
        changed(load_recipe("vsepp", first), ["optimizer.lrr=1"])


def test_the_weight_of_a_loss_that_the_recipe_lacks_can_be_varied():
    space = space_of("linear", ["loss.sigmoid.weight=0:1", "loss.mmd.weight=0,0.5"])
    assert space["loss.sigmoid.weight"] == Range(0, 1, log=False, whole=False)
    assert space["loss.mmd.weight"] == Choice((0.0, 0.5))
    assert "has no key loss.sigmod.weight" in refusal(["loss.sigmod.weight=0:1"], name="linear")[0]


def test_own_values():
    recipe = load_recipe("vsepp", ["model.dim=8", "optimizer.lr=0.5", "optimizer.ema=null"])
    space = {
        "optimizer.lr": Range(1e-4, 1e-2, log=True, whole=False),
        "model.dim": Range(4, 16, log=False, whole=True),
        "optimizer.ema": Range(0.9, 0.99, log=False, whole=False),
        "data.unit": Choice(("image", "caption")),
        "loss.triplet.negatives": Choice(("all", "semi")),
        "data.batch_size": Choice((16, 100, 1000)),
        "loss.sigmoid.weight": Range(0.5, 1, log=False, whole=False),  # a loss that the recipe does not have
        "data.chunk": Choice((None, 8)),
        "schedule.patience": Choice((3, 8)),
    }
    values = own_values(space, recipe)
    own = {"data.unit": "caption", "data.batch_size": 100, "loss.sigmoid.weight": 0.5, "data.chunk": None}
    assert values == {"optimizer.lr": 1e-2, "model.dim": 8, **own}
    assert as_settings({"a": True, "b": None, "c": 1e-5}) == ["a=true", "b=null", "c=1e-05"]
