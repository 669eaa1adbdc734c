"""Heads on several feature sets of a side: every recipe trains on them, and all that reads a run reads them."""

import math

import pytest
import torch
from bundled_recipes import small_settings
from safetensors.torch import load_file
from scores import score
from small_store import make_store
from small_trainings import assert_equal, numbers, stopped_after

from xret.heads.evaluation.evaluation import evaluate
from xret.heads.evaluation.scoring import compare, embed
from xret.heads.model import FeatureFacts, build_model, feature_facts
from xret.heads.modules.joined_adapter import JoinedAdapter
from xret.heads.recipes.names import recipe_names
from xret.heads.recipes.recipe import load_recipe
from xret.heads.runs.features import batches_of, sets_named, sets_of_run
from xret.heads.runs.run import Run
from xret.heads.training.train import train
from xret.pipeline.errors import CacheError, RecipeError, RunError
from xret.pipeline.store import FeatureCache

CPU = torch.device("cpu")
BOTH = ["data.image=[grid, roi]", "data.text=words,states"]
SYSTEMS = [name for name in recipe_names() if "/" not in name]
VECTORS = ["cca", "fusemix"]  # need a vector of each caption, which words have not


def small(name, *settings):
    return load_recipe(name, [*small_settings(name), "data.batch_size=8", *settings])


@pytest.fixture(scope="module")
def store(tmp_path_factory):
    url = tmp_path_factory.mktemp("several") / "small.zarr"
    kinds = {"image": ("grid", "roi"), "text": ("words", "tokens", "longer")}
    return make_store(url, train=24, val=8, test=8, views=(3, 2), broken=(5,), **kinds)


@pytest.fixture(scope="module")
def run(store, tmp_path_factory):
    out = tmp_path_factory.mktemp("run") / "setdiv"
    train(store, small("setdiv", *BOTH, "adapter.grid.standardize=true", "adapter.tokens.standardize=true"), out)
    return out


@pytest.mark.parametrize("name", SYSTEMS)
def test_every_recipe_trains_on_them_and_is_evaluated(name, store, tmp_path):
    texts = "longer" if name in VECTORS else "words"
    summary = train(store, small(name, BOTH[0], f"data.text={texts},states"), tmp_path / "run", device="cpu")
    opened = Run(summary.run)
    (line,) = opened.metrics()
    assert all(math.isfinite(part) for part in line["parts"].values())
    for branch in (opened.model(torch.device("cpu")).image, opened.model(torch.device("cpu")).text):
        assert isinstance(branch.adapter, JoinedAdapter)
    again = evaluate(summary.run, split="val", device="cpu").results[0]
    assert again.rsum == pytest.approx(opened.info.best_rsum)


def test_the_run_names_them_in_their_order(run, store):
    cache, opened = FeatureCache.open(store), Run(run)
    sets = {"image": [cache.image_set(name) for name in ("grid", "roi")]}
    sets["text"] = [cache.caption_set(name) for name in ("words", "states")]
    for side, found in sets.items():
        assert opened.info.names(side) == tuple(features.name for features in found)
        assert opened.info.fingerprints(side) == tuple(features.fingerprint for features in found)
    assert [facts.kind for facts in opened.image_facts] == ["grid", "roi"]
    assert load_recipe(str(run / "recipe.yaml")) == opened.recipe
    assert opened.vocabulary == cache.caption_set("words").vocabulary


def test_each_set_is_standardised_by_itself(run, store):
    cache, kept = FeatureCache.open(store), load_file(run / "model.safetensors")
    rows = torch.tensor([row for row in range(24) if row != 5]).numpy()
    draws = cache.image_set("grid").local(rows)  # statistics are taken of the first view
    expected = torch.from_numpy(draws).double().flatten(0, 1).mean(0).float()
    torch.testing.assert_close(kept["image.adapter.sets.0.rows_input.mean"], expected)
    captions = [row for row in range(int(cache.caption_start[24])) if cache.caption_image[row] != 5]
    states = torch.from_numpy(cache.caption_set("states").local(torch.tensor(captions).numpy())).double()
    torch.testing.assert_close(kept["text.adapter.sets.1.rows_input.mean"], states.mean(0).float())
    assert "image.adapter.sets.1.rows_input.mean" not in kept  # adapter.roi does not ask for it


AUGMENTED = ["augment.image=0.2", "augment.text=0.2", "augment.mask_words=0.3", "adapter.words.ends=true"]


@pytest.mark.parametrize("place", ["auto", "stream"])
def test_a_training_that_was_stopped_goes_on_exactly(store, tmp_path, place):
    more = ["runtime.checkpoint_steps=1", f"runtime.cache={place}", "schedule.epochs=2", *AUGMENTED]
    train(store, small("setdiv", *BOTH, *more), tmp_path / "whole", device="cpu")
    with stopped_after(4):
        train(store, small("setdiv", *BOTH, *more), tmp_path / "run", device="cpu")
    train(store, small("setdiv", *BOTH, *more), tmp_path / "run", device="cpu", resume=True)
    assert_equal(numbers(tmp_path / "run"), numbers(tmp_path / "whole"))
    with pytest.raises(RunError, match=r"begun otherwise: data\.text"):
        other = small("setdiv", BOTH[0], "data.text=[words, longer]", *more)
        train(store, other, tmp_path / "run", device="cpu", resume=True)


def test_another_store_is_learnt_as_well_and_evaluated(store, tmp_path):
    kinds = {"image": ("grid", "roi"), "text": ("words", "tokens"), "views": (3, 2)}
    other = make_store(tmp_path / "other.zarr", train=10, val=4, test=6, words="more", **kinds)
    out = tmp_path / "run"
    train([store, other], small("vsepp", *BOTH), out, device="cpu")
    assert Run(out).info.also_stores == [other]
    assert evaluate(out, store=other, device="cpu").results[0].images == 6
    alone = make_store(tmp_path / "alone.zarr", train=8, image="grid", text=("words", "tokens"), views=3)
    with pytest.raises(RunError, match=r"has no image features equal to 'roi@"):
        train([store, alone], small("vsepp", *BOTH), tmp_path / "no", device="cpu")
    with pytest.raises(RunError, match=r"has no image features equal to 'roi@\w+'"):
        evaluate(out, store=alone, device="cpu")
    assert not (tmp_path / "no").exists()


def test_the_mean_over_views_takes_each_sets_own(run, store):
    opened, cache, texts = Run(run), FeatureCache.open(store), None
    model, alone = opened.model(CPU), []
    for view in range(3):  # which roi does not have three of
        batches = batches_of(sets_of_run(opened, cache), model, "test", CPU, views=(view,))
        images, captions = embed(model, batches)
        texts = texts or batches.texts()
        alone.append(compare(model, images, captions, texts))
    assert not torch.equal(alone[0], alone[2])
    averaged = score(opened.path, views=3).similarity
    torch.testing.assert_close(averaged, torch.stack(alone).mean(0))
    assert evaluate(run, views=True, device="cpu").views == (3,)


def test_losses_that_write_captions_get_the_words(store):
    recipe = small("vsrn", BOTH[0], "data.text=[states, words]")
    sets = sets_named(FeatureCache.open(store), recipe.data.image, recipe.data.text)
    model = build_model(recipe, *map(feature_facts, sets))
    (features,) = batches_of(sets, model, "val", CPU).caption_features(100)
    made, words = model.embed_captions(features), features.parts[1]
    assert torch.equal(made.token.rows, words.token)
    assert torch.equal(made.token.length, words.length)


def test_two_vocabularies_are_one_too_many():
    words, states = FeatureFacts("words", None, None, 9), FeatureFacts("tokens", 5, 5)
    with pytest.raises(RecipeError, match=r"data\.text names 2 sets of words, and a head has one vocabulary"):
        build_model(small("vsepp"), (FeatureFacts("grid", 5, 5),), (words, states, words))


@pytest.mark.parametrize(
    ("settings", "error", "sentence"),
    [
        (["data.text=[words, words]"], RecipeError, r"data\.text must be auto, the name of a feature set, or several"),
        (["data.text=[]"], RecipeError, r"data\.text must be auto, the name"),
        (["data.image=auto,grid"], RecipeError, r"data\.image must be auto, the name"),
        (["data.image=[grid, butd]"], CacheError, "no feature set fits 'butd'"),
        (["data.image=[grid, gri]"], CacheError, r"data\.image=grid, gri names a feature set twice"),
        (["data.image=grid"], CacheError, "several feature sets fit 'auto'"),
        ([BOTH[0], "data.text=[longer, states]", "augment.mask_words=0.2"], RecipeError, "kind 'tokens' are"),
        ([*BOTH, "data.unit=image", "data.captions=1", "augment.mix=1"], RecipeError, "kind 'words' have none"),
    ],
)
def test_what_cannot_be_joined_ends_in_a_sentence(store, tmp_path, settings, error, sentence):
    with pytest.raises(error, match=sentence):
        train(store, small("vsepp", *settings), tmp_path / "run", device="cpu")
    assert not (tmp_path / "run").exists()


def test_a_variant_takes_sets_of_its_papers_kinds_alone(store, tmp_path):
    name, sets = "setdiv/f30k-butd-bigru", ["data.image=roi", "data.text=[words, states]"]
    with pytest.raises(RecipeError, match=r"kind 'words', not 'tokens'; .*`settings` data\.text_kind=null"):
        train(store, small(name, *sets), tmp_path / "run", device="cpu")
    train(store, small(name, *sets, "data.text_kind=null"), tmp_path / "run", device="cpu")
